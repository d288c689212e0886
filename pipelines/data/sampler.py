"""Drawing windows. A trajectory of T actions has T + 1 rows; a window of L steps is rows [s, s + L + 1) of
it.

Placement "any" puts the start s uniformly on 0 .. T - 1, every start that keeps one step of loss, so that
each time step is equally often the first, and windows near the end are padded on the right. Placement "full"
uses the starts 0 .. max(T - L, 0) alone: windows are as long as the trajectory allows. The number of starts
is what a trajectory offers, and its weight under "timestep"; under "trajectory" each has the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from pipelines.data.batch import Batch
from pipelines.data.gather import Gatherer, SegmentLost
from pipelines.data.view import View
from pipelines.errors import InputMissing

Weighting = Literal["timestep", "trajectory"]
Placement = Literal["any", "full"]


class WindowSampler:
    """Draws batches of windows of `length` steps from a view, the same ones for the same seed and view."""

    def __init__(
        self,
        view: View,
        *,
        length: int,
        seed: int,
        weighting: Weighting = "timestep",
        placement: Placement = "any",
    ) -> None:
        self.view, self.length = view, length
        self.weighting, self.placement = weighting, placement
        self._rng = np.random.default_rng(seed)
        self._gatherer = Gatherer(view, length + 1)
        self._version = -1
        self._cumulative = np.zeros(0)

    def sample(self, batch_size: int) -> Batch:
        """`batch_size` windows: independent draws, ordered by segment. InputMissing if there is nothing to
        draw from.
        """
        while True:
            chosen, start = self.draw(batch_size)
            try:
                return self._gatherer.gather(chosen, start)
            except SegmentLost as lost:
                self.view.drop(lost.number, str(lost))

    def draw(self, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the view's table and starts of the windows, both (batch_size,) int64."""
        cumulative = self._weights()
        if not len(cumulative) or not cumulative[-1] > 0:
            raise InputMissing(
                f"lake '{self.view.lake.name}' has no trajectories to draw from",
                hint="collect some first, or widen the selection",
            )
        point = self._rng.random(batch_size) * cumulative[-1]
        chosen = np.minimum(np.searchsorted(cumulative, point, side="right"), len(cumulative) - 1)
        starts = self._starts(self.view.table["length"][chosen].astype(np.int64))
        start = (self._rng.random(batch_size) * starts).astype(np.int64)
        return chosen, np.minimum(start, starts - 1)

    def _starts(self, length: np.ndarray) -> np.ndarray:
        """Number of windows that trajectories of `length` actions offer."""
        return length if self.placement == "any" else np.maximum(length - self.length, 0) + 1

    def _weights(self) -> np.ndarray:
        if self._version != self.view.version:
            table = self.view.table
            weight = table["weight"].astype(np.float64)
            if self.weighting == "timestep":
                weight *= self._starts(table["length"].astype(np.int64))
            self._cumulative, self._version = np.cumsum(weight), self.view.version
        return self._cumulative

    def state_dict(self) -> dict[str, Any]:
        """The generator's state, as JSON carries it. The view has its own `snapshot`."""
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rng.bit_generator.state = state["rng"]
