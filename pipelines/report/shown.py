"""Runs as a page shows them: each with a name of its own, a number and a colour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipelines.errors import AmagoError
from pipelines.report.page import AXES
from pipelines.runs.comparison import grouped
from pipelines.runs.stored import StoredRun

_COLUMNS = {"updates": "update", "steps": "env_steps", "seconds": "seconds"}


@dataclass(frozen=True)
class ShownRun:
    """A run of a page; `points`: how many points its curves have at most. `color`: that of
    its group, if there are several groups of several runs."""

    stored: StoredRun
    label: str
    number: int
    points: int
    color: int

    @cached_property
    def rows(self) -> np.ndarray:
        """The lines of the log that are shown, evenly chosen (R,)."""
        count = self.stored.metrics.rows
        return np.unique(np.linspace(0, count - 1, min(count, self.points)).round().astype(int))

    def column(self, name: str) -> np.ndarray:
        """Return a metric at the lines that are shown (R,); NaN where a line does not have it."""
        values = self.stored.metrics.columns.get(name)
        return np.full(len(self.rows), np.nan) if values is None else values[self.rows]

    @cached_property
    def along(self) -> dict[str, np.ndarray]:
        """Updates, environment steps and seconds of the lines that are shown."""
        return {axis: self.column(name) for axis, name in _COLUMNS.items()}

    def along_of(self, updates: Sequence[float]) -> dict[str, list[float]]:
        """Return `updates` with the environment steps and seconds at them."""
        found: dict[str, list[float]] = {}
        for axis, name in _COLUMNS.items():
            at = [self.stored.metrics.at(name, update) for update in updates]
            found[axis] = [np.nan if value is None else value for value in at]
        return found | {"updates": list(updates)}


def shown_runs(stored: Sequence[StoredRun], *, points: int) -> list[ShownRun]:
    """Return runs with distinct names."""
    names = Counter(run.name for run in stored)
    labels = [run.name if names[run.name] == 1 else str(run.path) for run in stored]
    colors = _colors(stored)
    return [ShownRun(run, labels[place], place, points, colors[place]) for place, run in enumerate(stored)]


def _colors(stored: Sequence[StoredRun]) -> list[int]:
    """Return the place of each run's colour: one for each group, where that says more than one for each run."""
    try:
        groups = grouped(stored)
    except AmagoError:  # none was evaluated
        groups = []
    if not 1 < len(groups) < len(stored):
        return list(range(len(stored)))
    places = {run.path: place for place, group in enumerate(groups) for run in group.runs}
    return [places.get(run.path, 0) for run in stored]


def axes_of(runs: Sequence[ShownRun]) -> list[str]:
    """Return the x axes that the runs' logs have."""
    return [axis for axis in AXES if any(np.isfinite(run.along[axis]).any() for run in runs)] or ["updates"]


def text(value: Any, longest: int = 300) -> str:
    """Return text of a file of others, cut to a bounded length."""
    found = value if isinstance(value, str) else "" if value is None else str(value)
    return found if len(found) <= longest else found[:longest] + "..."
