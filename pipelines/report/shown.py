"""Runs as a page shows them: each with a distinct name, a number and a colour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipelines.errors import AmagoError
from pipelines.report.page import Curve
from pipelines.runs.comparison import group_runs
from pipelines.runs.stored import StoredRun

_COLUMNS = {"updates": "update", "steps": "env_steps", "seconds": "seconds"}


@dataclass(frozen=True)
class ShownRun:
    """A run of a page. Its curves have at most `points` points. `color` is that of its group, if there are several
    groups of several runs, and otherwise its own."""

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
        """Select a metric at the lines that are shown (R,); NaN where a line does not have it."""
        values = self.stored.metrics.columns.get(name)
        return np.full(len(self.rows), np.nan) if values is None else values[self.rows]

    @cached_property
    def along(self) -> dict[str, np.ndarray]:
        """Updates, environment steps and seconds of the lines that are shown."""
        return {axis: self.column(name) for axis, name in _COLUMNS.items()}

    def at_updates(self, updates: Sequence[float]) -> dict[str, list[float]]:
        """Look up the environment steps and seconds at `updates`; one list for each x axis."""
        found: dict[str, list[float]] = {}
        for axis, name in _COLUMNS.items():
            at = [self.stored.metrics.at(name, update) for update in updates]
            found[axis] = [np.nan if value is None else value for value in at]
        return found | {"updates": list(updates)}

    def make_variants(self, name: str, names: set[str]) -> list[Curve]:
        """Collect a metric with its variants: at other discounts, or of the parts of the network."""
        variants = {"acting discount" if any(n.startswith(f"{name}@") for n in names) else name: name}
        variants |= {f"discount {n.removeprefix(f'{name}@')}": n for n in sorted(names) if n.startswith(f"{name}@")}
        if name == "grad_norm":
            parts = sorted(n for n in names if n.startswith("grad_norm_"))
            variants = {"whole network": name} | {n.removeprefix("grad_norm_"): n for n in parts}
        curves = [self.make_curve(column, label, color=place) for place, (label, column) in enumerate(variants.items())]
        return [curve for curve in curves if curve is not None]

    def make_curve(self, column: str, label: str, *, color: int) -> Curve | None:
        """Make the curve of a metric; None if the run has no such number."""
        values = self.column(column)
        if not np.isfinite(values).any() or (column == "skipped_updates" and not np.nan_to_num(values).any()):
            return None
        return Curve(name=text(label, 80), values=values.tolist(), along=self.along, run=self.number, color=color)


def number_runs(stored: Sequence[StoredRun], *, points: int) -> list[ShownRun]:
    """Give runs distinct names, numbers and colours. Runs that form several groups have the colours of their groups."""
    names = Counter(run.name for run in stored)
    try:
        groups = group_runs(stored)
    except AmagoError:  # none was evaluated
        groups = []
    colors = {run.path: place for place, run in enumerate(stored)}
    if 1 < len(groups) < len(stored):
        colors = {run.path: place for place, group in enumerate(groups) for run in group.runs}
    return [
        ShownRun(run, run.name if names[run.name] == 1 else str(run.path), place, points, colors.get(run.path, 0))
        for place, run in enumerate(stored)
    ]


def text(value: Any, longest: int = 300) -> str:
    """Convert a value of an untrusted file to text of bounded length."""
    found = value if isinstance(value, str) else "" if value is None else str(value)
    return found if len(found) <= longest else found[:longest] + "..."
