"""Weights of trajectories relative to each other, and placement of windows.

A window of L steps covers steps [start, stop) of a trajectory of T actions, rows start .. stop of its T + 1. The loss
is a mean over steps, so each step must appear equally often. Where T <= L the window is the whole trajectory. Longer
ones, by `placement`:

uniform  starts -(L - 1) .. T - 1, cut to the trajectory: each step is in L of the T + L - 1 windows.
         Windows at the ends are shorter.
full     starts 0 .. T - L: every window has L steps, but steps near the ends of a trajectory appear less often.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipelines.data.view import PRIORITY, TASK

_PIECE = 1 << 16
_Weighting = Literal["timestep", "trajectory", "task"]
Placement = Literal["uniform", "full"]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Sampling strategy. The mass of a trajectory, in proportion to which it is drawn, is the product of

    - its weight in the view (`--weight`),
    - by `weighting`: the windows in which each of its steps appears once on average ("timestep"), 1 ("trajectory"), or
      these windows divided by those of all selected trajectories of its environment and task ("task": every task has
      the same share, and within it every step),
    - with a `half_life` (steps): 0.5 ** (age / half_life), its age being the steps of the trajectories after it,
    - with `per_alpha`: (a moving average of its TD errors) ** `per_alpha`. A window then has the importance weight
      priority ** (-`per_alpha` * `per_beta`), divided by the maximum of its update (Schaul et al. 2016, arXiv
      1511.05952).
    """

    weighting: _Weighting = "timestep"
    placement: Placement = "uniform"
    half_life: float = 0.0
    per_alpha: float = 0.0
    per_beta: float = 0.4

    @property
    def extra(self) -> tuple[tuple[str, str], ...]:
        """Fields that the view's table must have."""
        return ((TASK,) if self.weighting == "task" else ()) + (PRIORITY if self.per_alpha else ())

    def windows(self, length: np.ndarray, window: int) -> np.ndarray:
        """Return how many draws (N,) show each step of trajectories of `length` actions once on average: steps over the
        mean steps of a window."""
        hanging = window - 1 if self.placement == "uniform" else 0
        return np.where(length > window, (length + hanging) / window, 1.0)

    def place(self, length: np.ndarray, window: int, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Place a window in each trajectory by uniforms (N,): steps [start, stop), (N,) int64."""
        hanging = window - 1 if self.placement == "uniform" else 0
        first = np.where(length > window, -hanging, 0)
        last = np.where(length > window, length - window + hanging, 0)
        start = np.minimum(first + (uniform * (last - first + 1)).astype(np.int64), last)
        return np.maximum(start, 0), np.minimum(start + window, length)

    def mass(self, table: np.ndarray, window: int, windows: np.ndarray | None = None) -> np.ndarray:
        """Compute masses (N,) float64, without priorities. In pieces, so that a million rows need no extra memory.
        `windows` (N,): replaces those that are computed from lengths; where it is 0, so is the mass."""
        mass = np.empty(len(table))
        offered = self._count_windows_by_task(table, window, windows) if self.weighting == "task" else None
        newest = passed = 0.0
        if self.half_life:
            selected = table["weight"] > 0
            stop = len(table) - int(np.argmax(selected[::-1])) if selected.any() else 0
            newest = float(table["length"][:stop].sum(dtype=np.float64))
        for number, (part, own) in enumerate(zip(pieces(table), pieces(mass), strict=True)):
            own[:] = part["weight"]
            shown = self._count_windows(part, number, window, windows)
            if self.weighting != "trajectory":
                own *= shown if offered is None else shown / offered[part["task"]]
            elif windows is not None:
                own *= shown > 0
            if self.half_life:
                steps = passed + np.cumsum(part["length"], dtype=np.float64)
                passed, chosen = steps[-1], own > 0
                # Age counts from the newest selected trajectory: same ratios, and they cannot all underflow to 0.
                own[chosen] *= np.exp2((steps[chosen] - newest) / self.half_life)
        return mass

    def _count_windows(self, part: np.ndarray, number: int, window: int, windows: np.ndarray | None) -> np.ndarray:
        if windows is None:
            return self.windows(part["length"].astype(np.int64), window)
        return windows[number * _PIECE :][: len(part)]

    def _count_windows_by_task(self, table: np.ndarray, window: int, windows: np.ndarray | None) -> np.ndarray:
        """Count windows of all selected trajectories, by task; 1 where there are none."""
        offered = np.zeros(int(table["task"].max(initial=0)) + 1)
        for number, part in enumerate(pieces(table)):
            shown = self._count_windows(part, number, window, windows) * (part["weight"] > 0)
            offered += np.bincount(part["task"], weights=shown, minlength=len(offered))
        return np.maximum(offered, 1)


def pieces(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield consecutive views of some rows."""
    return (rows[start : start + _PIECE] for start in range(0, len(rows), _PIECE))
