"""How trajectories are weighed against each other, and where windows begin.

A window of L steps is rows [s, s + L + 1) of a trajectory of T actions (T + 1 rows). Placement "any" puts the start s
uniformly on 0 .. T - 1, every start that keeps one step of loss, so that each time step is equally often the first,
and windows near the end are padded on the right. Placement "full" uses the starts 0 .. max(T - L, 0) alone: windows
are as long as the trajectory allows. The number of starts is what a trajectory offers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipelines.data.view import PRIORITY, TASK

PIECE = 1 << 16
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
        """(N,) float64, without the priorities. Piece by piece: beside it, a million rows cost no memory."""
        mass = np.empty(len(table))
        offered = self._offered(table, window) if self.weighting == "task" else None
        newest = _steps_to_the_newest(table) if self.half_life else 0.0
        passed = 0.0
        for part, own in zip(pieces(table), pieces(mass), strict=True):
            own[:] = part["weight"]
            if self.weighting != "trajectory":
                starts = self.starts(part["length"].astype(np.int64), window)
                own *= starts if offered is None else starts / offered[part["task"]]
            if self.half_life:
                steps = passed + np.cumsum(part["length"], dtype=np.float64)
                passed, chosen = steps[-1], own > 0
                # Counted from the newest that may be drawn: the ratios are the same, and one of them is never 0.
                own[chosen] *= np.exp2((steps[chosen] - newest) / self.half_life)
        return mass

    def _offered(self, table: np.ndarray, window: int) -> np.ndarray:
        """Starts of all selected trajectories, by task; 1 where there are none."""
        offered = np.zeros(int(table["task"].max(initial=0)) + 1)
        for part in pieces(table):
            starts = self.starts(part["length"].astype(np.int64), window) * (part["weight"] > 0)
            offered += np.bincount(part["task"], weights=starts, minlength=len(offered))
        return np.maximum(offered, 1)


def pieces(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Views of some rows after the other."""
    return (rows[start : start + PIECE] for start in range(0, len(rows), PIECE))


def _steps_to_the_newest(table: np.ndarray) -> float:
    """Steps of the trajectories up to the last selected one."""
    selected = table["weight"] > 0
    stop = len(table) - int(np.argmax(selected[::-1])) if selected.any() else 0
    return float(table["length"][:stop].sum(dtype=np.float64))
