"""Drawing in proportion to weights that change all the time: a tree of sums with 64 children per node.

A draw or a change of n weights costs n times 64 additions per level, three levels for a quarter of a million weights
and four for sixteen million; a flat cumulative sum costs all N additions after every change. A node is always
recomputed from its children, in order: the tree depends only on the current weights, not on their history.
"""

from __future__ import annotations

import numpy as np

FAN = 64


class SumTree:
    """Sum tree over non-negative weights (N,) float64."""

    def __init__(self, weights: np.ndarray) -> None:
        self.size = len(weights)
        self._levels = [_padded(np.asarray(weights, dtype=np.float64))]
        while len(self._levels[-1]) > FAN:
            sums = _sums(self._levels[-1].reshape(-1, FAN))
            self._levels.append(_padded(sums))

    @property
    def weights(self) -> np.ndarray:
        """Weights (N,), read-only."""
        return self._levels[0][: self.size]

    @property
    def total(self) -> float:
        return float(_sums(self._levels[-1][None])[0])

    def set(self, places: np.ndarray, weights: np.ndarray) -> None:
        """Change the weights at `places`, which are distinct."""
        self._levels[0][places] = weights
        for level, above in zip(self._levels[:-1], self._levels[1:], strict=True):
            places = np.unique(places // FAN)
            above[places] = _sums(level.reshape(-1, FAN)[places])

    def find(self, points: np.ndarray) -> np.ndarray:
        """Return the places (n,) int64 of the weights into which `points` of [0, total) fall; never one of weight 0."""
        rest, place = np.array(points, dtype=np.float64), np.zeros(len(points), dtype=np.int64)
        for level in reversed(self._levels):
            children = level.reshape(-1, FAN)[place]
            ends = np.cumsum(children, axis=1)
            child = (ends <= rest[:, None]).sum(axis=1)
            # Rounding may leave a point beyond the last child with a weight.
            last = FAN - 1 - np.argmax(children[:, ::-1] > 0, axis=1)
            child = np.minimum(child, last)
            rows = np.arange(len(child))
            rest = rest - (ends[rows, child] - children[rows, child])
            place = place * FAN + child
        return place


def _padded(values: np.ndarray) -> np.ndarray:
    padded = np.zeros(max(-(-len(values) // FAN), 1) * FAN)
    padded[: len(values)] = values
    return padded


def _sums(children: np.ndarray) -> np.ndarray:
    return np.cumsum(children, axis=1)[:, -1]
