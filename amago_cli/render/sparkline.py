"""A trajectory as a few lines of text: rewards, actions and observations, one character per group of steps.

With an agent's values, also a table of its steps.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from amago_cli.render import escaping
from amago_cli.render.table import cell, render
from pipelines.lake.spaces import LENGTH, Ragged

if TYPE_CHECKING:
    from pipelines.lake.schema import Schema
    from pipelines.lake.trajectory import Trajectory

_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.-~=+*#"
_MOST_LINES = 6  # of actions, and of observations
_LEFT_OUT = "not shown"
VALUES = ("q", "v", "advantage", "weight", "disagreement")
_MOST_STEPS = 20


def sparkline(values: np.ndarray, width: int, *, unicode: bool = True) -> str:
    """Draw `values` (n,) in at most `width` characters, each the mean of its share, from lowest to highest."""
    marks = _BLOCKS if unicode else _ASCII
    edges = np.linspace(0, len(values), min(width, len(values)) + 1).round().astype(int)
    finite = np.nan_to_num(np.asarray(values, dtype=np.float64))
    means = np.add.reduceat(finite, edges[:-1]) / np.diff(edges)
    low, span = means.min(), np.ptp(means)
    levels = np.zeros(len(means), dtype=int) if span == 0 else ((means - low) / span * (len(marks) - 1)).round()
    return "".join(marks[int(level)] for level in levels)


def flags(columns: Mapping[str, np.ndarray], width: int) -> str:
    """Mark soft resets (r), terminations (T) and truncations (t)."""
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
    """Draw a trajectory in lines of at most `width` characters; `figures` adds lines with one number per action.

    The last line names the columns that have no line of their own.
    """
    numbers, texts, missing = _choose(trajectory.columns, schema)
    lines = [("reward", trajectory.columns["reward"][1:]), *(figures or {}).items(), *numbers]
    names = [*(escaping.line(name) for name, _ in [*lines, *texts]), _LEFT_OUT if missing else "flags"]
    name_width = max(map(len, names))
    scales = []
    for _, values in lines:
        low, high = (cell(float(edge)) for edge in (values.min(), values.max()))
        scales.append(low if low == high else f"{low} .. {high}")
    room = max(width - name_width - 6 - max(map(len, scales)), 8)

    def line(name: str, text: str) -> str:
        return f"  {escaping.line(name):<{name_width}}  {text}"

    success = {None: "", True: ", success", False: ", no success"}[row["success"]]
    policy = f", {row['policy_id']}" if row["policy_id"] else ""
    version = f"@{row['policy_version']}" if row["policy_version"] >= 0 else ""
    derived = f", {row['relabel_method']} of {row['base_uid']}" if row["base_uid"] else ""
    task = f" {row['task']}" if row["task"] and row["task"] != row["env"] else ""
    task += f" '{row['goal_text']}'" if row.get("goal_text") else ""
    earned = f"{row['length']} steps, return {cell(row['return'])}{success}"
    drawn = [escaping.line(f"{row['uid']}  {row['env']}{task}: {earned}{policy}{version}{derived}")]
    for (name, values), scale in zip(lines, scales, strict=True):
        drawn.append(line(name, f"{sparkline(values, room, unicode=unicode)}  {scale}"))
    most = max(width - name_width - 4, 8)
    for name, words in texts:
        text = escaping.line(words)
        drawn.append(line(name, text if len(text) <= most else f"{text[: most - 3]}..."))
    drawn.append(line("flags", flags(trajectory.columns, room)))
    if missing:
        text, indent = line(_LEFT_OUT, ", ".join(map(escaping.line, missing))), name_width + 4
        drawn += textwrap.wrap(text, max(width, indent + 20), subsequent_indent=" " * indent, break_on_hyphens=False)
    return "\n".join(drawn)


def tabulate_values(columns: Mapping[str, np.ndarray], figures: Mapping[str, np.ndarray]) -> str:
    """Tabulate the steps with the agent's values (T,); of a long trajectory those with the largest advantages."""
    steps = np.arange(len(figures["q"]))
    title = "step by step"
    if len(steps) > _MOST_STEPS:
        title = f"the {_MOST_STEPS} of {len(steps):,} steps with the largest absolute advantage"
        steps = np.sort(np.argsort(-np.abs(figures["advantage"]), kind="stable")[:_MOST_STEPS])
    rows = []
    for step in steps.tolist():
        parts = columns["action"][step + 1].reshape(-1).tolist()
        action = " ".join(f"{part:.3g}" if isinstance(part, float) else str(part) for part in parts)
        rows.append([step, action, float(columns["reward"][step + 1]), *(float(figures[n][step]) for n in VALUES)])
    lines = render(["step", "action", "reward", *VALUES], rows, show=cell, title=title)
    return "\n".join(f"  {line}" for line in lines)


def _choose(
    columns: Mapping[str, np.ndarray], schema: Schema
) -> tuple[list[tuple[str, np.ndarray]], list[tuple[str, str]], list[str]]:
    """Choose what to draw of actions and observations: lines of numbers (rows,), texts, and names not shown.

    Every numeric column gets a line, and several if there are few columns. No action led to row 0: actions start at
    row 1.
    """
    numbers: list[tuple[str, np.ndarray]] = []
    texts: list[tuple[str, str]] = []
    missing: list[str] = []
    for role, first in (("action", 1), ("observation", 0)):
        flat: dict[str, np.ndarray] = {}
        for column in schema.columns:
            whole = column.name.removesuffix(f".{LENGTH}")
            if column.role != role or (whole != column.name and _join_texts(whole, columns, schema) is not None):
                continue  # the length of a text, which the text itself shows
            values, shape = columns[column.name][first:], "x".join(map(str, column.shape))
            if (words := _join_texts(column.name, columns, schema)) is not None:
                texts.append((column.name, words))
            elif column.dtype == "uint8" and len(column.shape) == 3:
                missing.append(f"{column.name} ({shape} pixels: --images DIR)")
            elif column.ragged:
                missing.append(f"{column.name} (up to {shape} {column.dtype})")
            else:
                flat[column.name] = values.reshape(len(values), math.prod(column.shape))
        left = max(_MOST_LINES - len(flat), 0)
        for name, values in flat.items():
            size = values.shape[1]
            shown = min(size, 1 + left)
            left -= shown - 1
            numbers += [(name if size == 1 else f"{name}[{place}]", values[:, place]) for place in range(shown)]
            if shown < size:
                missing.append(f"{name}[{shown}..{size - 1}]" if size - shown > 1 else f"{name}[{shown}]")
    return numbers, texts, missing


def _join_texts(name: str, columns: Mapping[str, np.ndarray], schema: Schema) -> str | None:
    """Join the texts of a column in order, each with the step at which it starts; None for a column of numbers."""
    space = schema.spaces.observation.get(name)
    if not isinstance(space, Ragged) or not space.text:
        return None
    values, lengths = columns[name], columns[f"{name}.{LENGTH}"]
    found: dict[int, str] = {}
    last = None
    for step, (row, length) in enumerate(zip(values, lengths.tolist(), strict=True)):
        code = row[:length].tobytes()
        if code == last:
            continue
        last = code
        found[step] = "".join(chr(point) if 0 <= point < 0x110000 else "\ufffd" for point in row[:length].tolist())
    shown = [f"'{text}'" if step == 0 else f"{step}: '{text}'" for step, text in found.items()]
    return ", ".join(shown)
