"""A batch of windows. B windows, L steps of loss, L + 1 rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Batch:
    """Windows of one batch. `columns`: (B, L + 1, *shape) in the lake's dtypes, zero-padded on the right; `lengths`
    (B,) int64: valid rows, 2 to L + 1; `start` (B,) int64: time index of a window's row 0 in its trajectory.

    `trajectory` (B,) int64: row of the view's table; `lake` (B,) int64: index of the lake in a mixture. `importance`
    (B,) float64: importance weights of the windows' losses under prioritized replay, up to a factor.

    The arrays belong to the holder of the batch; the sampler reuses their memory only once no reference is left.
    """

    columns: Mapping[str, np.ndarray]
    lengths: np.ndarray
    start: np.ndarray
    trajectory: np.ndarray | None = None
    lake: np.ndarray | None = None
    importance: np.ndarray | None = None

    @property
    def mask(self) -> np.ndarray:
        """(B, L) bool: step t counts in the loss iff row t + 1 is valid."""
        rows = next(iter(self.columns.values())).shape[1]
        return np.arange(1, rows) < self.lengths[:, None]

    @property
    def time_index(self) -> np.ndarray:
        """(B, L + 1) int64: time of every row in its trajectory."""
        rows = next(iter(self.columns.values())).shape[1]
        return self.start[:, None] + np.arange(rows)

    def __len__(self) -> int:
        return len(self.lengths)
