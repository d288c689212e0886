"""Reused memory of batches: allocating fresh pages costs as much as the copy into them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from pipelines.lake.schema import Column

KEPT = 4


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
        self._pool = [*self._pool[-(KEPT - 1) :], buffers]
        return buffers


def _held() -> int:
    """Count the references to an unreferenced array during a loop over its dictionary's values."""
    buffers = {"x": np.empty(1)}
    return max(sys.getrefcount(b) if len(b) else 0 for b in buffers.values())


_HELD = _held()
