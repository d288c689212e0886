"""Mazes whose walls grow from random places, and which of them belong to the held-out part.

A maze of odd side s begins as a border. From int(0.75 (s // 2)^2) random cells with even coordinates, the border's
included, a wall grows: int(0.75 * 10 s) times, one of the cells two steps away inside the maze is chosen, and if it is
free, it and the cell between become wall and growth goes on there. Walls only grow into free cells, so they close no
room in, and every free cell can be reached from every other. Then rows s - 5 to s - 2 are cleared and two walls put on
either side of the middle column in rows s - 4 to s - 2: the start, at their lower end, is in a short dead end. A maze
belongs to the held-out part by a hash of its walls, so the split does not depend on the seed.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from pipelines.envs.draws import Draws
from pipelines.envs.suites.lake_maps import held_out
from pipelines.errors import UsageError

DENSITY = COMPLEXITY = 0.75
_AHEAD = 64  # mazes made at a time, at least: many cost little more than one
_MAX_CANDIDATES = 400


def seeds_of(side: int) -> int:
    return int(DENSITY * (side // 2) ** 2)


def tries_of(side: int) -> int:
    return int(COMPLEXITY * 5 * (side + side))


def start_of(side: int) -> int:
    """The cell where everyone starts; cells are numbered row * side + column."""
    return (side - 2) * side + side // 2


def fewest_free(side: int) -> int:
    """Cells that are free in every maze, whatever has grown, but for the start."""
    return 4 * (side - 2) - 6 + (side - 5) // 2 * (side // 2) - 1


@lru_cache(maxsize=8)
def _neighbours(side: int) -> tuple[np.ndarray, np.ndarray]:
    """For each cell with even coordinates: how many cells two steps away are in the maze, and which (west, east, north,
    south; the rest of the four repeat the first).
    """
    count, cells = np.zeros(side * side, dtype=np.int64), np.zeros((side * side, 4), dtype=np.int64)
    for row in range(0, side, 2):
        for column in range(0, side, 2):
            there = [(row, column - 2), (row, column + 2), (row - 2, column), (row + 2, column)]
            inside = [r * side + c for r, c in there if 0 <= r < side and 0 <= c < side]
            count[row * side + column] = len(inside)
            cells[row * side + column] = inside + inside[:1] * (4 - len(inside))
    return count, cells


def grown(draws: Draws, stream: int, episodes: np.ndarray, candidates: np.ndarray, side: int) -> np.ndarray:
    """(m, side * side) bool, True at walls: candidate number `candidates` (m,) of each of `episodes` (m,)."""
    count, neighbours = _neighbours(side)
    seeds, tries = seeds_of(side), tries_of(side)
    board = np.zeros((side, side), dtype=bool)
    board[[0, -1]] = board[:, [0, -1]] = True
    walls = np.tile(board.reshape(-1), (len(episodes), 1))
    base = candidates * (seeds * (2 + tries))
    half = side // 2 + 1
    for seed in range(seeds):
        first = base + seed * (2 + tries)
        place = draws.uniform(episodes[:, None], stream, first[:, None] + np.arange(2))
        row, column = (2 * (place * half).astype(np.int64)).T
        active = np.arange(len(episodes))
        cell = row * side + column
        walls[active, cell] = True
        for attempt in range(tries):
            growing = ~walls[active[:, None], neighbours[cell]].all(axis=1)  # who is stuck stays so
            active, cell = active[growing], cell[growing]
            if not len(active):
                break
            u = draws.uniform(episodes[active], stream, first[active] + 2 + attempt)
            ahead = neighbours[cell, (u * count[cell]).astype(np.int64)]
            free = ~walls[active, ahead]
            walls[active[free], ahead[free]] = True
            walls[active[free], (cell[free] + ahead[free]) // 2] = True
            cell = np.where(free, ahead, cell)
    boards = walls.reshape(-1, side, side)
    boards[:, side - 5 : side - 1, 1 : side - 1] = False
    boards[:, side - 4 : side - 1, [side // 2 - 1, side // 2 + 1]] = True
    return walls


def free_runs(walls: np.ndarray, side: int) -> np.ndarray:
    """(m, side * side, 4) uint8: free cells to the west, north, east and south of each cell."""
    free = ~walls.reshape(-1, side, side)
    runs = np.zeros((*free.shape, 4), dtype=np.uint8)
    for i in range(1, side):
        j = side - 1 - i
        runs[:, :, i, 0] = (runs[:, :, i - 1, 0] + 1) * free[:, :, i - 1]
        runs[:, i, :, 1] = (runs[:, i - 1, :, 1] + 1) * free[:, i - 1, :]
        runs[:, :, j, 2] = (runs[:, :, j + 1, 2] + 1) * free[:, :, j + 1]
        runs[:, j, :, 3] = (runs[:, j + 1, :, 3] + 1) * free[:, j + 1, :]
    return runs.reshape(len(walls), side * side, 4)


class MazeSource:
    """The mazes of episodes, of one side of the split; made ahead, for they are cheaper by the hundred."""

    def __init__(self, side: int, draws: Draws, stream: int, *, holdout: float, split: str) -> None:
        self._side, self._draws, self._stream = side, draws, stream
        self._holdout, self._test, self._split = holdout, split == "test", split
        share = holdout if self._test and holdout else 1 - holdout
        self._at_a_time = min(8, int(np.ceil(1 / share)))
        self._ready: dict[int, np.ndarray] = {}

    def draw(self, episodes: np.ndarray, upcoming: np.ndarray, stride: int) -> np.ndarray:
        """(m, side * side) bool. `upcoming` (N,) are the episodes that all actors play next; whoever plays an episode
        plays that number + `stride` after it.
        """
        if any(episode not in self._ready for episode in episodes.tolist()):
            further = -(-_AHEAD // len(upcoming))
            wanted = np.union1d(episodes, upcoming[:, None] + stride * np.arange(further)).tolist()
            self._ready = {episode: self._ready[episode] for episode in wanted if episode in self._ready}
            missing = [episode for episode in wanted if episode not in self._ready]
            self._ready |= zip(missing, self._made(np.array(missing)), strict=True)
        return np.stack([self._ready.pop(episode) for episode in episodes.tolist()])

    def _made(self, episodes: np.ndarray) -> np.ndarray:
        chosen = np.zeros((len(episodes), self._side**2), dtype=bool)
        pending, first, n = np.arange(len(episodes)), 0, self._at_a_time
        while len(pending):
            if first > _MAX_CANDIDATES:
                raise UsageError(
                    f"holdout = {self._holdout} leaves hardly a {self._split} maze of size {self._side}",
                    hint="choose another holdout, or 0 for none",
                )
            numbers = np.tile(first + np.arange(n), len(pending))
            walls = grown(self._draws, self._stream, np.repeat(episodes[pending], n), numbers, self._side)
            good = np.ones(len(walls), dtype=bool)
            if self._holdout:
                good = held_out(walls, self._holdout) == self._test
            by_episode = good.reshape(-1, n)
            found = by_episode.any(axis=1)
            chosen[pending[found]] = walls[np.flatnonzero(found) * n + by_episode.argmax(axis=1)[found]]
            pending = pending[~found]
            first += n
        return chosen
