"""A trajectory as a few lines of text: what was earned, done and seen, a character for some steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from amago_cli import escaping
from amago_cli.table import cell

if TYPE_CHECKING:
    import numpy as np

    from pipelines.lake.schema import Schema
    from pipelines.lake.trajectory import Trajectory

_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.-~=+*#"
_MOST_LINES = 6  # of actions, and of observations
_MOST_WIDE = 64  # values of one step beyond which a column is no line of numbers


def sparkline(values: np.ndarray, width: int, *, unicode: bool = True) -> str:
    """`values` (n,), at most `width` characters: each the mean of its share of them, from the lowest to the highest."""
    import numpy as np

    marks = _BLOCKS if unicode else _ASCII
    edges = np.linspace(0, len(values), min(width, len(values)) + 1).round().astype(int)
    finite = np.nan_to_num(np.asarray(values, dtype=np.float64))
    means = np.add.reduceat(finite, edges[:-1]) / np.diff(edges)
    low, span = means.min(), np.ptp(means)
    levels = np.zeros(len(means), dtype=int) if span == 0 else ((means - low) / span * (len(marks) - 1)).round()
    return "".join(marks[int(level)] for level in levels)


def flags(columns: Mapping[str, np.ndarray], width: int) -> str:
    """Where a soft reset (r), the end (T) or a cut (t) was."""
    import numpy as np

    rows = len(columns["reset"])
    edges = np.linspace(0, rows, min(width, rows) + 1).round().astype(int)
    line = np.full(len(edges) - 1, ".")
    for name, mark in (("reset", "r"), ("truncated", "t"), ("terminated", "T")):
        line[np.add.reduceat(columns[name].astype(int), edges[:-1]) > 0] = mark
    return "".join(line)


def portrait(
    trajectory: Trajectory,
    row: Mapping[str, Any],
    schema: Schema,
    *,
    width: int,
    unicode: bool,
    figures: Mapping[str, np.ndarray] | None = None,
) -> str:
    """A trajectory in lines of at most `width` characters; `figures` are more lines, of a number for each action."""
    found = _lines(trajectory.columns, schema, figures or {})
    lines = [(escaping.line(name), values) for name, values in found]
    name_width = max(len(name) for name, _ in [*lines, ("flags", None)])
    texts = []
    for name, values in lines:
        low, high = (cell(float(edge)) for edge in (values.min(), values.max()))
        texts.append((name, values, low if low == high else f"{low} .. {high}"))
    room = max(width - name_width - 6 - max(len(text) for _, _, text in texts), 8)
    drawn = [
        f"  {name:<{name_width}}  {sparkline(values, room, unicode=unicode)}  {text}" for name, values, text in texts
    ]
    marks = f"  {'flags':<{name_width}}  {flags(trajectory.columns, room)}"
    return "\n".join([escaping.line(_heading(row)), *drawn, marks])


def _heading(row: Mapping[str, Any]) -> str:
    success = {None: "", True: ", success", False: ", no success"}[row["success"]]
    policy = f", {row['policy_id']}" if row["policy_id"] else ""
    version = f"@{row['policy_version']}" if row["policy_version"] >= 0 else ""
    derived = f", {row['relabel_method']} of {row['base_uid']}" if row["base_uid"] else ""
    task = f" {row['task']}" if row["task"] and row["task"] != row["env"] else ""
    task += f" '{row['goal_text']}'" if row.get("goal_text") else ""
    earned = f"{row['length']} steps, return {cell(row['return'])}{success}"
    return f"{row['uid']}  {row['env']}{task}: {earned}{policy}{version}{derived}"


def _lines(
    columns: Mapping[str, np.ndarray], schema: Schema, figures: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """A name and values (rows,) for each line: reward, figures, actions, then what is numeric and narrow of what was
    seen. Row 0 was led to by nothing: reward and action begin at row 1.
    """
    import numpy as np

    yield "reward", columns["reward"][1:]
    yield from figures.items()
    for role, first in (("action", 1), ("observation", 0)):
        left = _MOST_LINES
        for column in schema.columns:
            size = int(np.prod(column.shape, dtype=int))
            if column.role != role or size > _MOST_WIDE:
                continue
            flat = columns[column.name][first:].reshape(len(columns[column.name]) - first, size)
            for place in range(min(size, left)):
                yield column.name if size == 1 else f"{column.name}[{place}]", flat[:, place]
            left -= min(size, left)
