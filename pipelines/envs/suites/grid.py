"""Square grids as tables: cells are numbered row * size + column, moves off the grid leave the agent in
place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def transitions(size: int, moves: Sequence[tuple[int, int]]) -> np.ndarray:
    """(len(moves), size * size) int64: the cell that `moves[a]` = (row change, column change) leads to."""
    row, column = np.divmod(np.arange(size * size), size)
    return np.stack(
        [np.clip(row + rows, 0, size - 1) * size + np.clip(column + columns, 0, size - 1) for rows, columns in moves]
    )


def coordinates(size: int) -> np.ndarray:
    """(size * size, 2) float32: (row, column) of each cell, divided by size."""
    return np.stack(np.divmod(np.arange(size * size), size), axis=1).astype(np.float32) / np.float32(size)


def distances(blocked: np.ndarray, target: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """(m, cells) float64: fewest moves to `target` (m,) around `blocked` (m, cells); inf where there is no
    way.

    `moves` is a table of `transitions`.
    """
    steps = np.full(blocked.shape, np.inf)
    steps[np.arange(len(target)), target] = 0
    while True:
        nearer = steps[:, moves].min(axis=1) + 1
        nearer[blocked] = np.inf
        shorter = np.minimum(steps, nearer)
        if np.array_equal(shorter, steps):
            return steps
        steps = shorter
