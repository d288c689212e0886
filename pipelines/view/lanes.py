"""Lanes of a timeline: columns of a trajectory over a window of its steps, in a bounded number of points.

Lanes are aligned by the step: at step t are the observation that was seen, the action that it led to, and the reward
and flags that followed. In a window of more steps than points, a point stands for several steps: their mean, and their
lowest and highest value. Columns of more bytes than `_MOST_BYTES` in the window are sampled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.lake.spaces import LENGTH
from pipelines.view.columns import PICTURES, describe
from pipelines.view.steps import StepReader, StoredTrajectory

MOST_POINTS = 2000
_MOST_LANES = 24
_MOST_NUMBERS = 40_000  # of a lane
_MOST_BYTES = 64 << 20  # of a lane, read at a time
_MOST_MARKS = 1000
_MOST_TEXTS = 200
_LETTERS = 2000  # of a text


@dataclass(frozen=True)
class StepWindow:
    """Steps [start, stop) of a trajectory of `length` actions, in `points` points."""

    start: int
    stop: int
    length: int
    points: int

    @classmethod
    def of(cls, length: int, start: int, stop: int, points: int) -> StepWindow:
        """Clip the wanted window to the T + 1 steps of a trajectory."""
        start = min(max(start, 0), length)
        stop = min(max(stop, start + 1), length + 1)
        return cls(start, stop, length, max(1, min(points, MOST_POINTS, stop - start)))

    @property
    def edges(self) -> np.ndarray:
        """(points + 1,): the first step of each point, and the end."""
        return np.linspace(self.start, self.stop, self.points + 1).round().astype(np.int64)

    @property
    def is_exact(self) -> bool:
        return self.points == self.stop - self.start


def lanes(reader: StepReader, found: StoredTrajectory, window: StepWindow, names: Sequence[str]) -> dict[str, Any]:
    """Read the window, its steps `t`, the marks of its flags, and a lane for each of the columns `names`."""
    known = {column["name"]: column for column in describe(found.schema)}
    wanted = [known[name] for name in dict.fromkeys(names) if name in known][:_MOST_LANES]
    made = []
    for column in wanted:
        if column["kind"] == "text":
            made.append({**column, "texts": _texts(reader, found, window, column["name"])})
        elif column["kind"] not in PICTURES:
            dims = min(column["size"], max(1, _MOST_NUMBERS // window.points))
            shift = 0 if column["role"] == "observation" else 1
            points, sampled = _points(reader, found, window, column["name"], dims, shift)
            lane = {name: numbers(each) for name, each in points.items()}
            made.append({**column, "dims": dims, "sampled": sampled, **lane})
    return {
        "start": window.start,
        "stop": window.stop,
        "length": window.length,
        "exact": window.is_exact,
        "t": window.edges[:-1].tolist(),
        "marks": _marks(reader, found, window),
        "lanes": made,
    }


def _points(
    reader: StepReader,
    found: StoredTrajectory,
    window: StepWindow,
    name: str,
    dims: int,
    shift: int,
) -> tuple[dict[str, np.ndarray], bool]:
    """Read `mean`, and for a window that is not exact also `low` and `high`, each (dims, points); NaN after the end.

    `shift`: rows between a step and the row that holds its value. Also return whether steps were sampled.
    """
    edges = window.edges
    end = window.length + 1 - shift  # steps that have a value
    firsts, lasts = np.minimum(edges[:-1], end), np.minimum(edges[1:], end)
    allowed = _MOST_BYTES // max(found.schema.column(name).step_bytes, 1)
    sampled = int(lasts[-1] - firsts[0]) > allowed
    shape = (dims, window.points)
    mean, low, high = (np.full(shape, np.nan) for _ in range(3))

    def rows(first: int, last: int) -> np.ndarray:
        values = reader.rows(found.uid, name, first + shift, last + shift)
        return values.reshape(last - first, -1)[:, :dims].astype(np.float64)

    if sampled:
        each = max(1, allowed // window.points)
        for point, (first, last) in enumerate(zip(firsts.tolist(), lasts.tolist(), strict=True)):
            if first < last:
                values = rows(first, min(last, first + each))
                mean[:, point], low[:, point], high[:, point] = values.mean(0), values.min(0), values.max(0)
    elif firsts[0] < lasts[-1]:
        values = rows(int(firsts[0]), int(lasts[-1]))
        at = firsts[firsts < lasts] - firsts[0]
        counts = (lasts - firsts)[firsts < lasts]
        kept = slice(0, len(at))
        with np.errstate(all="ignore"):  # values of somebody else may be infinite
            mean[:, kept] = (np.add.reduceat(values, at) / counts[:, None]).T
            low[:, kept], high[:, kept] = np.minimum.reduceat(values, at).T, np.maximum.reduceat(values, at).T
    if window.is_exact:
        return {"mean": mean}, sampled
    return {"mean": mean, "low": low, "high": high}, sampled


def _marks(reader: StepReader, found: StoredTrajectory, window: StepWindow) -> dict[str, list[int]]:
    """List the steps at which flags are set. A soft reset is marked at the step that begins the next attempt."""
    last = min(window.stop, window.length)
    marks: dict[str, list[int]] = {}
    for name in ("reset", "terminated", "truncated"):
        first = window.start
        rows = min(last + 1 - first, _MOST_BYTES)
        flags = reader.rows(found.uid, name, first, first + rows)
        at = np.flatnonzero(flags) + first - (0 if name == "reset" else 1)
        marks[name] = at[at >= first][:_MOST_MARKS].tolist()
    return marks


def _texts(reader: StepReader, found: StoredTrajectory, window: StepWindow, name: str) -> list[list[Any]]:
    """List [step, text] where the text changes, looking at one step of each point."""
    column = found.schema.column(name)
    every = window.edges[:-1]
    most = max(1, _MOST_BYTES // max(column.step_bytes, 1))
    every = every[:: max(1, math.ceil(len(every) / most))]
    shown: list[list[Any]] = []
    chunk = max(1, (4 << 20) // max(column.step_bytes, 1))
    last: str | None = None
    if window.is_exact:  # contiguous rows are read together
        spans = [(int(every[i]), int(every[min(i + chunk, len(every)) - 1]) + 1) for i in range(0, len(every), chunk)]
    else:
        spans = [(int(t), int(t) + 1) for t in every]
    for first, stop in spans:
        points = reader.rows(found.uid, name, first, stop)
        lengths = reader.rows(found.uid, f"{name}.{LENGTH}", first, stop)
        for place, length in enumerate(lengths.tolist()):
            codes = points[place, : max(0, min(length, _LETTERS))].tolist()
            # Surrogates and numbers beyond Unicode, which a damaged or foreign lake may have, are not characters.
            text = "".join(chr(c) if 0 <= c < 0xD800 or 0xDFFF < c < 0x110000 else "\ufffd" for c in codes)
            if text != last:
                shown.append([first + place, text])
                last = text
            if len(shown) == _MOST_TEXTS:
                return shown
    return shown


def numbers(values: np.ndarray) -> list[Any]:
    """Convert to nested lists, rounded to seven digits, with None for what JSON does not have."""

    def shorten(value: float) -> float | int | None:
        if not math.isfinite(value):
            return None
        return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.7g}")

    flat = np.asarray(values, dtype=np.float64)
    rows = [flat] if flat.ndim == 1 else list(flat)
    shown = [list(map(shorten, row.tolist())) for row in rows]
    return shown[0] if flat.ndim == 1 else shown
