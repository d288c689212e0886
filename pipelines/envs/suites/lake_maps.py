"""Maps of a frozen lake: each cell but start and goal is a hole with probability 0.2, given that a way
exists.

The distribution is that of gymnasium's `generate_random_map(size, p=0.8)`. Up to 4x4 all maps are enumerated
with their probabilities; larger ones are drawn until one is solvable. A map belongs to the held-out part by a
hash of its holes, so the split does not depend on the seed, and a held-out map is never drawn in training.

Cells are numbered row * size + column; maps are (m, size * size) bool, True at a hole.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from pipelines.envs.draws import Draws, mix, unit
from pipelines.errors import UsageError

_HOLE_CHANCE = 0.2
_ENUMERATED_UP_TO = 4
_CANDIDATES = 8  # maps drawn at a time and episode when sampling by rejection


def find_reachable(holes: np.ndarray, size: int) -> np.ndarray:
    """Find the cells (m, size * size) that can be reached from cell 0 by steps to the four neighbours around holes."""
    free = ~holes.reshape(-1, size, size)
    reach = np.zeros_like(free)
    reach[:, 0, 0] = True
    count = -1
    while (count_now := int(np.count_nonzero(reach))) != count:
        count = count_now
        reach[:, 1:] |= reach[:, :-1] & free[:, 1:]
        reach[:, :-1] |= reach[:, 1:] & free[:, :-1]
        reach[:, :, 1:] |= reach[:, :, :-1] & free[:, :, 1:]
        reach[:, :, :-1] |= reach[:, :, 1:] & free[:, :, :-1]
    return reach.reshape(len(holes), -1)


def is_held_out(holes: np.ndarray, fraction: float) -> np.ndarray:
    """Whether maps belong to the held-out part of size `fraction`, (m,) bool."""
    code = np.zeros(len(holes), dtype=np.uint64)
    for byte in np.packbits(holes, axis=1).T:
        code = mix(code * np.uint64(257) + byte.astype(np.uint64) + np.uint64(1))
    return unit(code) < fraction


@lru_cache(maxsize=8)
def list_maps(size: int) -> tuple[np.ndarray, np.ndarray]:
    """List every solvable map and its probability (summing to 1), for sizes up to 4."""
    inner = size * size - 2
    bits = (np.arange(2**inner)[:, None] >> np.arange(inner)) & 1
    holes = np.zeros((2**inner, size * size), dtype=bool)
    holes[:, 1:-1] = bits
    holes = holes[find_reachable(holes, size)[:, -1]]
    count = holes.sum(axis=1)
    weight = _HOLE_CHANCE**count * (1 - _HOLE_CHANCE) ** (inner - count)
    return holes, weight / weight.sum()


def list_split_maps(size: int, holdout: float, split: str) -> tuple[np.ndarray, np.ndarray]:
    """List the enumerated maps of one side of the split and their probabilities. UsageError if that side is empty."""
    holes, weight = list_maps(size)
    if holdout:
        chosen = is_held_out(holes, holdout) == (split == "test")
        holes, weight = holes[chosen], weight[chosen]
    if not len(holes):
        raise UsageError(
            f"holdout = {holdout} leaves no {split} map of size {size}",
            hint="choose another holdout, or 0 for none",
        )
    return holes, weight / weight.sum()


def parse_map(rows: str, size: int) -> np.ndarray:
    """Parse rows of `.` and `#` between slashes: (size * size,) bool. ValueError for a map of another size, or none."""
    lines = rows.split("/")
    if len(lines) != size or any(len(line) != size or set(line) - set(".#") for line in lines):
        raise ValueError(f"'{rows}' is not a map of {size} x {size} cells")
    holes = np.array([[mark == "#" for mark in line] for line in lines]).reshape(-1)
    if holes[0]:
        raise ValueError(f"the start of '{rows}' is a hole")
    return holes


def name_maps(marks: np.ndarray, size: int) -> list[str]:
    """Write the rows of each map between slashes, as `parse_map` reads them, from characters (m, size * size) uint8."""
    lines = np.full((len(marks), size, size + 1), ord("/"), dtype=np.uint8)
    lines[:, :, :size] = marks.reshape(-1, size, size)
    text, whole = lines.tobytes().decode("ascii"), size * (size + 1)
    return [text[start : start + whole - 1] for start in range(0, len(text), whole)]


class MapSource:
    """Draws the map of an episode. With `holdout` 0 both splits draw from all maps."""

    def __init__(self, size: int, draws: Draws, stream: int, *, holdout: float, split: str) -> None:
        self._size, self._draws, self._stream = size, draws, stream
        self._holdout, self._test = holdout, split == "test"
        self._maps: np.ndarray | None = None
        if size <= _ENUMERATED_UP_TO:
            self._maps, weight = list_split_maps(size, holdout, split)
            self._reachable = find_reachable(self._maps, size)
            self._cumulative = np.cumsum(weight)[:-1]

    def draw(self, episodes: np.ndarray) -> np.ndarray:
        """Draw the maps of `episodes` (m,): (m, size * size) bool."""
        if self._maps is not None:
            return self._maps[self._draw_rows(episodes)]
        return self._reject(episodes)

    def draw_reachable(self, episodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw the maps of `episodes`, and which cells can be reached from the first: (m, cells), (m, cells)."""
        if self._maps is not None:
            chosen = self._draw_rows(episodes)
            return self._maps[chosen], self._reachable[chosen]
        holes = self._reject(episodes)
        return holes, find_reachable(holes, self._size)

    def _draw_rows(self, episodes: np.ndarray) -> np.ndarray:
        """Draw rows of the enumerated maps."""
        return np.searchsorted(self._cumulative, self._draws.uniform(episodes, self._stream), side="right")

    def _reject(self, episodes: np.ndarray) -> np.ndarray:
        """Draw maps until one of each episode has a way and belongs to this side of the split."""
        cells = self._size**2
        chosen = np.zeros((len(episodes), cells), dtype=bool)
        pending = np.arange(len(episodes))
        first = 0
        while len(pending):
            counter = np.arange(first, first + _CANDIDATES * cells)
            u = self._draws.uniform(episodes[pending, None], self._stream, counter)
            holes = (u < _HOLE_CHANCE).reshape(-1, cells)
            holes[:, [0, -1]] = False
            good = find_reachable(holes, self._size)[:, -1]
            if self._holdout:
                good &= is_held_out(holes, self._holdout) == self._test
            good = good.reshape(-1, _CANDIDATES)
            found = good.any(axis=1)
            pick = np.flatnonzero(found) * _CANDIDATES + good.argmax(axis=1)[found]
            chosen[pending[found]] = holes[pick]
            pending = pending[~found]
            first += _CANDIDATES * cells
        return chosen
