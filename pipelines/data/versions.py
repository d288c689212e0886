"""Versions of trajectories that are made as windows of them are drawn, and stored nowhere.

A version is what a function of the trajectory, its uid and the number of the copy says, so that it is the same whenever
it is drawn, and the same that would have been stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pipelines.lake.overlays import OverlayBatch


class Derivation(Protocol):
    """What makes versions from the columns `reads` of whole trajectories."""

    @property
    def reads(self) -> tuple[str, ...]: ...
    def derive(
        self, columns: Mapping[str, np.ndarray], rows: np.ndarray, uids: np.ndarray, copies: np.ndarray
    ) -> OverlayBatch: ...


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Which windows show versions: `share` of those of trajectories that `evaluate` chooses (uids "S16" -> bool), drawn
    alike from `copies` each. `derivation` is asked for once there are trajectories.
    """

    derivation: Callable[[], Derivation]
    evaluate: Callable[[np.ndarray], np.ndarray]
    share: float
    copies: int


class Drawn:
    """Versions of some windows of a batch: `windows` (m,), the places of those that show one of them."""

    def __init__(self, windows: np.ndarray, derived: OverlayBatch) -> None:
        self.windows, self.derived = windows[derived.place], derived

    def lengths(self, length: np.ndarray) -> np.ndarray:
        """(B,) actions of what each window is from; `length` (B,) those of the originals."""
        length = length.copy()
        length[self.windows] = self.derived.rows - 1
        return length

    def located(self, table: np.ndarray) -> np.ndarray:
        """Rows (B,) of a view's table, changed to the stretches of the originals that the versions are of."""
        table = table.copy()
        table["length"][self.windows] = self.derived.rows - 1
        for name in ("row0", "base_row0"):
            table[name][self.windows] += self.derived.offset.astype(np.uint64)
        return table

    def lay(self, start: np.ndarray, order: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Put what differs into the windows `out` (B, rows, ...), which stand in `order`; `start` (B,) in that order
        too.
        """
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        spans = zip(place[self.windows].tolist(), self.derived.first.tolist(), self.derived.rows.tolist(), strict=True)
        for window, first, rows in spans:
            begin = int(start[window])
            for name, values in self.derived.columns.items():
                count = min(rows - begin, out[name].shape[1])
                out[name][window, :count] = values[first + begin : first + begin + count]
