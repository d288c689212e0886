"""A batch of windows, and the reused memory of batches: allocating fresh pages costs as much as the copy into them.

B windows, L steps of loss, L + 1 rows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.lake.schema import Column

_KEPT = 4


@dataclass(frozen=True)
class Batch:
    """Windows of one batch. `columns`: (B, L + 1, *shape) in the lake's dtypes, zero-padded on the right; `lengths`
    (B,) int64: valid rows, 2 to L + 1; `start` (B,) int64: time of a window's row 0 in its episode.

    `trajectory` (B,) int64: row of the view's table; `lake` (B,) int64: index of the lake in a mixture. `importance`
    (B,) float64: importance weights of the windows' losses under prioritized replay, up to a factor. `warm_up` (B,)
    int64: first steps of a window that do not count in the losses; None: all count. `cut_off` (B, L) bool: steps after
    which an episode was truncated and another follows in the window, so that what they led to is not known; None: none.

    The arrays belong to the holder of the batch; the sampler reuses their memory only once no reference is left.
    """

    columns: Mapping[str, np.ndarray]
    lengths: np.ndarray
    start: np.ndarray
    trajectory: np.ndarray | None = None
    lake: np.ndarray | None = None
    importance: np.ndarray | None = None
    warm_up: np.ndarray | None = None
    cut_off: np.ndarray | None = None

    @property
    def mask(self) -> np.ndarray:
        """(B, L) bool: step t counts in the loss iff row t + 1 is valid."""
        rows = next(iter(self.columns.values())).shape[1]
        return np.arange(1, rows) < self.lengths[:, None]

    def __len__(self) -> int:
        return len(self.lengths)


class Buffers:
    """Pool of arrays (size, rows, *shape) for `columns`."""

    def __init__(self, columns: Sequence[Column], rows: int) -> None:
        self._columns, self._rows = columns, rows
        self._pool: list[dict[str, np.ndarray]] = []

    def take(self, size: int) -> dict[str, np.ndarray]:
        """Return an uninitialised array for each column, to which no other reference exists."""
        for buffers in self._pool:
            if all(len(b) == size and sys.getrefcount(b) <= _HELD for b in buffers.values()):
                return buffers
        buffers = {c.name: np.empty((size, self._rows, *c.shape), dtype=c.dtype) for c in self._columns}
        self._pool = [*self._pool[-(_KEPT - 1) :], buffers]
        return buffers


def _held() -> int:
    """Count the references to an unreferenced array during a loop over its dictionary's values."""
    buffers = {"x": np.empty(1)}
    return max(sys.getrefcount(b) if len(b) else 0 for b in buffers.values())


_HELD = _held()
