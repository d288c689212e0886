"""A trajectory as a few lines of text: what was earned, done and seen, a character for some steps."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from amago_cli.render import escaping
from amago_cli.render.table import cell
from pipelines.lake.spaces import LENGTH, Ragged

if TYPE_CHECKING:
    from pipelines.lake.schema import Schema
    from pipelines.lake.trajectory import Trajectory

_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.-~=+*#"
_MOST_LINES = 6  # of actions, and of observations
_LEAST_TEXT = 32.0  # scale of a text: its highest character, a space at least
_LEFT_OUT = "not shown"


def sparkline(values: np.ndarray, width: int, *, unicode: bool = True) -> str:
    """`values` (n,), at most `width` characters: each the mean of its share of them, from the lowest to the highest."""
    marks = _BLOCKS if unicode else _ASCII
    edges = np.linspace(0, len(values), min(width, len(values)) + 1).round().astype(int)
    finite = np.nan_to_num(np.asarray(values, dtype=np.float64))
    means = np.add.reduceat(finite, edges[:-1]) / np.diff(edges)
    low, span = means.min(), np.ptp(means)
    levels = np.zeros(len(means), dtype=int) if span == 0 else ((means - low) / span * (len(marks) - 1)).round()
    return "".join(marks[int(level)] for level in levels)


def flags(columns: Mapping[str, np.ndarray], width: int) -> str:
    """Where a soft reset (r), the end (T) or a cut (t) was."""
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
    """A trajectory in lines of at most `width` characters; `figures` are more lines, of a number for each action. The
    last line names what has no line of its own."""
    numbers, texts, missing = _chosen(trajectory.columns, schema)
    lines = [("reward", trajectory.columns["reward"][1:]), *(figures or {}).items(), *numbers]
    name_width = max(
        map(len, [*(escaping.line(name) for name, _ in [*lines, *texts]), _LEFT_OUT if missing else "flags"])
    )
    scales = [_scale(values) for _, values in lines]
    room = max(width - name_width - 6 - max(map(len, scales)), 8)

    def line(name: str, text: str) -> str:
        return f"  {escaping.line(name):<{name_width}}  {text}"

    drawn = [
        line(name, f"{sparkline(values, room, unicode=unicode)}  {scale}")
        for (name, values), scale in zip(lines, scales, strict=True)
    ]
    drawn += [line(name, _shortened(escaping.line(text), max(width - name_width - 4, 8))) for name, text in texts]
    drawn.append(line("flags", flags(trajectory.columns, room)))
    if missing:
        drawn += _folded(line(_LEFT_OUT, ", ".join(map(escaping.line, missing))), width, indent=name_width + 4)
    return "\n".join([escaping.line(_heading(row)), *drawn])


def _heading(row: Mapping[str, Any]) -> str:
    success = {None: "", True: ", success", False: ", no success"}[row["success"]]
    policy = f", {row['policy_id']}" if row["policy_id"] else ""
    version = f"@{row['policy_version']}" if row["policy_version"] >= 0 else ""
    derived = f", {row['relabel_method']} of {row['base_uid']}" if row["base_uid"] else ""
    task = f" {row['task']}" if row["task"] and row["task"] != row["env"] else ""
    task += f" '{row['goal_text']}'" if row.get("goal_text") else ""
    earned = f"{row['length']} steps, return {cell(row['return'])}{success}"
    return f"{row['uid']}  {row['env']}{task}: {earned}{policy}{version}{derived}"


def _scale(values: np.ndarray) -> str:
    low, high = (cell(float(edge)) for edge in (values.min(), values.max()))
    return low if low == high else f"{low} .. {high}"


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _folded(text: str, width: int, *, indent: int) -> list[str]:
    return textwrap.wrap(text, max(width, indent + 20), subsequent_indent=" " * indent, break_on_hyphens=False)


def _chosen(
    columns: Mapping[str, np.ndarray], schema: Schema
) -> tuple[list[tuple[str, np.ndarray]], list[tuple[str, str]], list[str]]:
    """What is shown of actions and observations, and what is not: lines of numbers (rows,), texts, names.

    Every column of numbers has a line, more of them where few columns share the room. Row 0 was led to by nothing:
    actions begin at row 1.
    """
    numbers: list[tuple[str, np.ndarray]] = []
    texts: list[tuple[str, str]] = []
    missing: list[str] = []
    for role, first in (("action", 1), ("observation", 0)):
        flat: dict[str, np.ndarray] = {}
        for column in schema.columns:
            if column.role != role or _text_of_length(column.name, columns, schema):
                continue
            values, shape = columns[column.name][first:], "x".join(map(str, column.shape))
            if (words := _words(column.name, columns, schema)) is not None:
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


def _text_of_length(name: str, columns: Mapping[str, np.ndarray], schema: Schema) -> bool:
    """Whether a column only says how long a text is, which its line shows."""
    whole = name.removesuffix(f".{LENGTH}")
    return whole != name and _words(whole, columns, schema) is not None


def _words(name: str, columns: Mapping[str, np.ndarray], schema: Schema) -> str | None:
    """The texts of a column in the order in which they were seen, with the step at which each began; None for a column
    of numbers. The schema does not tell texts from sequences of whole numbers: a text is printable throughout."""
    space = schema.spaces.observation.get(name)
    if not isinstance(space, Ragged) or np.dtype(space.dtype).kind not in "iu" or space.scale < _LEAST_TEXT:
        return None
    values, lengths = columns[name], columns[f"{name}.{LENGTH}"]
    found: dict[int, str] = {}
    last = None
    for step, (row, length) in enumerate(zip(values, lengths.tolist(), strict=True)):
        code = row[:length].tobytes()
        if code == last:
            continue
        last = code
        points = row[:length].tolist()
        if not all(0 <= point < 0x110000 and (chr(point).isprintable() or chr(point) in "\n\t") for point in points):
            return None
        found[step] = "".join(map(chr, points))
    shown = [f"'{text}'" if step == 0 else f"{step}: '{text}'" for step, text in found.items()]
    return ", ".join(shown)
