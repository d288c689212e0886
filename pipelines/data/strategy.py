"""How trajectories are weighed against each other, and where windows begin.

A window of L steps is rows [s, s + L + 1) of a trajectory of T actions (T + 1 rows). Placement "any" puts the start s
uniformly on 0 .. T - 1, every start that keeps one step of loss, so that each time step is equally often the first,
and windows near the end are padded on the right. Placement "full" uses the starts 0 .. max(T - L, 0) alone: windows
are as long as the trajectory allows. The number of starts is what a trajectory offers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipelines.data.view import PRIORITY, TASK

Weighting = Literal["timestep", "trajectory", "task"]
Placement = Literal["any", "full"]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """The mass of a trajectory, in proportion to which it is drawn, is the product of

    - its weight in the view (`--weight`),
    - by `weighting`: the starts it offers ("timestep"), 1 ("trajectory"), or the starts it offers divided by those of
      all selected trajectories of its environment and task ("task": every task has the same share),
    - with a `half_life` (steps): 0.5 ** (age / half_life), its age being the steps of the trajectories after it,
    - with `priority` (alpha): (a moving average of its TD errors) ** alpha. A window then has the importance
      priority ** (-alpha * `beta`), divided by the largest of its batch (Schaul et al. 2016, arXiv 1511.05952).
    """

    weighting: Weighting = "timestep"
    placement: Placement = "any"
    half_life: float = 0.0
    priority: float = 0.0
    beta: float = 0.4

    @property
    def extra(self) -> tuple[tuple[str, str], ...]:
        """Fields that the view's table must have."""
        return ((TASK,) if self.weighting == "task" else ()) + (PRIORITY if self.priority else ())

    def starts(self, length: np.ndarray, window: int) -> np.ndarray:
        """Number of windows of `window` steps that trajectories of `length` actions offer."""
        return length if self.placement == "any" else np.maximum(length - window, 0) + 1

    def mass(self, table: np.ndarray, window: int) -> np.ndarray:
        """(N,) float64, without the priorities."""
        mass = table["weight"].astype(np.float64)
        if self.weighting != "trajectory":
            starts = self.starts(table["length"].astype(np.int64), window)
            if self.weighting == "task":
                offered = np.bincount(table["task"], weights=starts * (mass > 0))
                starts = starts / np.maximum(offered, 1)[table["task"]]
            mass *= starts
        if self.half_life:
            steps = np.cumsum(table["length"], dtype=np.float64)
            chosen = np.flatnonzero(mass)
            # Counted from the newest that may be drawn: the ratios are the same, and one of them is never 0.
            mass[chosen] *= np.exp2((steps[chosen] - steps[chosen[-1:]]) / self.half_life)
        return mass
