"""Relabelled versions of trajectories, made as windows of them are drawn and stored nowhere.

A version is a function of the trajectory, its uid and the number of the copy: the same whenever it is drawn, and the
same that `amago relabel` would store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pipelines.data.view import PIECE
from pipelines.lake.overlays import OverlayBatch


class Derivation(Protocol):
    """Relabeler that makes versions from the columns `reads` of whole trajectories."""

    @property
    def reads(self) -> tuple[str, ...]: ...
    def derive(
        self, columns: Mapping[str, np.ndarray], rows: np.ndarray, uids: np.ndarray, copies: np.ndarray
    ) -> OverlayBatch: ...


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Choice of windows that show versions: a `share` of those of trajectories that `evaluate` selects, drawn uniformly
    from `copies` each. `evaluate` is given their uids "S16", and those of the first pieces of their episodes, and
    returns bool; one piece selects its episode. `derivation` is called once there are trajectories."""

    derivation: Callable[[], Derivation]
    evaluate: Callable[[np.ndarray, np.ndarray], np.ndarray]
    share: float
    copies: int


class DrawnVersions:
    """Versions drawn for some windows of a batch: `windows` (m,), the indices of those that show one."""

    def __init__(self, windows: np.ndarray, derived: OverlayBatch) -> None:
        self.windows, self.derived = windows[derived.place], derived

    def lengths(self, length: np.ndarray) -> np.ndarray:
        """Return the actions (B,) of each window's trajectory or version; `length` (B,): those of the originals."""
        length = length.copy()
        length[self.windows] = self.derived.rows - 1
        return length

    def located(self, table: np.ndarray) -> np.ndarray:
        """Return rows (B,) of a view's table, restricted to the part of the originals that each version covers."""
        table = table.copy()
        table["length"][self.windows] = self.derived.rows - 1
        for name in {"row0", "base_row0"}.intersection(table.dtype.names or ()):
            table[name][self.windows] += self.derived.offset.astype(np.uint64)
        if PIECE[0] not in (table.dtype.names or ()):
            return table  # without pieces, each version is an episode of its own
        if self.derived.pieces is not None:
            table["first_step"][self.windows] = [piece.first_step for piece in self.derived.pieces]
        else:  # a version that begins later than its original is an episode of its own
            table["first_step"][self.windows[self.derived.offset > 0]] = 0
        return table

    def write_into(self, start: np.ndarray, order: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Write the changed columns into the windows `out` (B, rows, ...), which are in `order`; `start` (B,) in that
        order too."""
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        spans = zip(place[self.windows].tolist(), self.derived.first.tolist(), self.derived.rows.tolist(), strict=True)
        for window, first, rows in spans:
            begin = int(start[window])
            for name, values in self.derived.columns.items():
                count = min(rows - begin, out[name].shape[1])
                out[name][window, :count] = values[first + begin : first + begin + count]
