"""MazeRunner: visit goals in order in an unseen maze, of which only the nearest walls are observed.

A maze of odd side s begins as a border. From int(0.75 (s // 2)^2) random cells with even coordinates, the border's
included, a wall grows: int(0.75 * 10 s) times, one of the cells two steps away inside the maze is chosen, and if it is
free, it and the cell between become wall and growth goes on there. Walls only grow into free cells, so they close no
room in, and every free cell can be reached from every other. Then rows s - 5 to s - 2 are cleared and two walls put on
either side of the middle column in rows s - 4 to s - 2: the start, at their lower end, is in a short dead end. A maze
belongs to the held-out part by a hash of its walls, so the split does not depend on the seed. Where a step leads does
not depend on the goals.
"""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import numpy as np
from pydantic import Field, model_validator

from pipelines.envs.draws import Draws
from pipelines.envs.env import EnvSpec, StepResult
from pipelines.envs.goals import GoalSequenceRule, is_same
from pipelines.envs.native import NativeEnv
from pipelines.envs.scenes import GridScene, split_rows
from pipelines.envs.suites.grid import coordinates, distances, transitions
from pipelines.envs.suites.lake_maps import is_held_out, name_maps
from pipelines.envs.suites.suite import ProtocolSettings
from pipelines.errors import UsageError
from pipelines.lake.spaces import Box, Discrete, Spaces

_DENSITY = _COMPLEXITY = 0.75
_AHEAD = 64  # mazes made at a time, at least: many cost little more than one
_MAX_CANDIDATES = 400
_NUMBERS = "123456789+"  # of goals in drawings


def find_start(side: int) -> int:
    """Find the cell where everyone starts; cells are numbered row * side + column."""
    return (side - 2) * side + side // 2


def count_free(side: int) -> int:
    """Count the cells that are free in every maze, whatever has grown, but for the start."""
    return 4 * (side - 2) - 6 + (side - 5) // 2 * (side // 2) - 1


@lru_cache(maxsize=8)
def _find_neighbours(side: int) -> tuple[np.ndarray, np.ndarray]:
    """Find, for each cell with even coordinates, how many cells two steps away are in the maze, and which: west, east,
    north, south; the rest of the four repeat the first.
    """
    count, cells = np.zeros(side * side, dtype=np.int64), np.zeros((side * side, 4), dtype=np.int64)
    for row in range(0, side, 2):
        for column in range(0, side, 2):
            there = [(row, column - 2), (row, column + 2), (row - 2, column), (row + 2, column)]
            inside = [r * side + c for r, c in there if 0 <= r < side and 0 <= c < side]
            count[row * side + column] = len(inside)
            cells[row * side + column] = inside + inside[:1] * (4 - len(inside))
    return count, cells


def grow(draws: Draws, stream: int, episodes: np.ndarray, candidates: np.ndarray, side: int) -> np.ndarray:
    """Grow candidate number `candidates` (m,) of each of `episodes` (m,): (m, side * side) bool, True at walls."""
    count, neighbours = _find_neighbours(side)
    seeds, tries = int(_DENSITY * (side // 2) ** 2), int(_COMPLEXITY * 5 * (side + side))
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


def _count_runs(walls: np.ndarray, side: int) -> np.ndarray:
    """Count the free cells to the west, north, east and south of each cell: (m, side * side, 4) uint8."""
    free = ~walls.reshape(-1, side, side)
    runs = np.zeros((*free.shape, 4), dtype=np.uint8)
    for i in range(1, side):
        j = side - 1 - i
        runs[:, :, i, 0] = (runs[:, :, i - 1, 0] + 1) * free[:, :, i - 1]
        runs[:, i, :, 1] = (runs[:, i - 1, :, 1] + 1) * free[:, i - 1, :]
        runs[:, :, j, 2] = (runs[:, :, j + 1, 2] + 1) * free[:, :, j + 1]
        runs[:, j, :, 3] = (runs[:, j + 1, :, 3] + 1) * free[:, j + 1, :]
    return runs.reshape(len(walls), side * side, 4)


class _MazeSource:
    """The mazes of episodes, of one side of the split. They are made ahead, since mazes are cheaper by the hundred."""

    def __init__(self, side: int, draws: Draws, stream: int, *, holdout: float, split: str) -> None:
        self._side, self._draws, self._stream = side, draws, stream
        self._holdout, self._test, self._split = holdout, split == "test", split
        share = holdout if self._test and holdout else 1 - holdout
        self._at_a_time = min(8, int(np.ceil(1 / share)))
        self._ready: dict[int, np.ndarray] = {}

    def draw(self, episodes: np.ndarray, upcoming: np.ndarray, stride: int) -> np.ndarray:
        """Draw (m, side * side) bool. `upcoming` (N,) are the episodes that all actors play next; an actor plays
        every `stride`-th.
        """
        if any(episode not in self._ready for episode in episodes.tolist()):
            further = -(-_AHEAD // len(upcoming))
            wanted = np.union1d(episodes, upcoming[:, None] + stride * np.arange(further)).tolist()
            self._ready = {episode: self._ready[episode] for episode in wanted if episode in self._ready}
            missing = [episode for episode in wanted if episode not in self._ready]
            self._ready |= zip(missing, self._make(np.array(missing)), strict=True)
        return np.stack([self._ready.pop(episode) for episode in episodes.tolist()])

    def _make(self, episodes: np.ndarray) -> np.ndarray:
        chosen = np.zeros((len(episodes), self._side**2), dtype=bool)
        pending, first, n = np.arange(len(episodes)), 0, self._at_a_time
        while len(pending):
            if first > _MAX_CANDIDATES:
                raise UsageError(
                    f"holdout = {self._holdout} leaves hardly a {self._split} maze of size {self._side}",
                    hint="choose another holdout, or 0 for none",
                )
            numbers = np.tile(first + np.arange(n), len(pending))
            walls = grow(self._draws, self._stream, np.repeat(episodes[pending], n), numbers, self._side)
            good = np.ones(len(walls), dtype=bool)
            if self._holdout:
                good = is_held_out(walls, self._holdout) == self._test
            by_episode = good.reshape(-1, n)
            found = by_episode.any(axis=1)
            chosen[pending[found]] = walls[np.flatnonzero(found) * n + by_episode.argmax(axis=1)[found]]
            pending = pending[~found]
            first += n
        return chosen


MOVES = ((0, -1), (-1, 0), (0, 1), (1, 0), (0, 0))
MAZE, GOALS, ORDER = range(3)  # purposes of random draws
GOAL_RULE = GoalSequenceRule(reached=is_same)  # of float32 quotients, which are the same if the cells are


class _MazeRunnerSettings(ProtocolSettings):
    """Parameters of `mazerunner`."""

    PAPER: ClassVar = {"holdout": 0.0}

    size: int = Field(11, ge=9, le=101)
    """Cells along a side, walls included; one more if even."""
    goals: int = Field(3, ge=1)
    """Cells to be visited, in order."""
    max_episode_steps: int = Field(250, ge=1)
    """Steps of an episode."""
    shuffle_actions: bool = False
    """Give the five actions another meaning in every episode."""
    holdout: float = Field(0.2, ge=0, lt=1)
    """Share of mazes kept for `split = "test"`; 0: all mazes on both sides."""

    @model_validator(mode="after")
    def _have_room(self) -> _MazeRunnerSettings:
        if self.goals > count_free(self.side):
            raise ValueError(f"goals can be at most {count_free(self.side)} in a maze of size {self.side}")
        return self

    @property
    def side(self) -> int:
        return self.size // 2 * 2 + 1


class MazeRunner(NativeEnv):
    """N mazes. State: `walls` (N, cells), `goals` (N, k) cells, `reached` (N,) goals so far, `cell`, `time`."""

    Settings = _MazeRunnerSettings

    def __init__(self, name: str, settings: _MazeRunnerSettings, *, num_envs: int, seed: int, split: str) -> None:
        s = self.settings = settings
        spec = EnvSpec(
            name=name,
            spaces=Spaces(
                observation={
                    "obs.observation": Box(shape=(7,)),
                    "obs.achieved": Box(shape=(1, 2)),
                    "obs.goals": Box(shape=(s.goals, 2)),
                },
                action=Discrete(n=len(MOVES)),
            ),
            horizon=s.max_episode_steps,
            has_success=True,
            about=f"{s.side}x{s.side} maze, {s.goals} goals in order within {s.max_episode_steps} steps",
            split=f"{s.holdout:.0%} of the mazes are held out" if s.holdout else "all mazes on both sides",
        )
        super().__init__(spec, num_envs=num_envs, seed=seed, split=split)
        self.side = s.side
        self._mazes = _MazeSource(self.side, self.draws, MAZE, holdout=settings.holdout, split=split)
        self._coordinates = coordinates(self.side)
        self._change = np.array([rows * self.side + columns for rows, columns in MOVES])
        cells = self.side**2
        self.walls = np.ones((num_envs, cells), dtype=bool)
        self.goals = np.zeros((num_envs, settings.goals), dtype=np.int64)
        self._shown = np.zeros((num_envs, settings.goals, 2), dtype=np.float32)
        self._runs = np.zeros((num_envs, cells, 4), dtype=np.uint8)
        self.cell, self.time, self.reached = np.zeros((3, num_envs), dtype=np.int64)
        self.meaning = np.tile(np.arange(len(MOVES)), (num_envs, 1))
        self._row = np.arange(num_envs)

    def _begin(self, indices: np.ndarray, episodes: np.ndarray) -> None:
        counter = self.episodes
        walls = self._mazes.draw(episodes, counter.current + counter.total, counter.total)
        order = self.draws.uniform(episodes[:, None], GOALS, np.arange(self.side**2))
        order[walls] = 2.0
        order[:, find_start(self.side)] = 2.0
        self._build(indices, walls, np.argsort(order, axis=1)[:, : self.settings.goals])
        if self.settings.shuffle_actions:
            self.meaning[indices] = self.draws.permutations(episodes, ORDER, len(MOVES))

    def _build(self, indices: np.ndarray, walls: np.ndarray, goals: np.ndarray) -> None:
        self.walls[indices], self.goals[indices] = walls, goals
        self._runs[indices] = _count_runs(walls, self.side)
        self._shown[indices] = self._coordinates[goals]
        self.cell[indices] = find_start(self.side)
        self.time[indices] = self.reached[indices] = 0

    def _assign(self, actor: int, task: str) -> None:
        rows, _, rest = task.partition(" ")
        given = dict(part.split("=", 1) for part in rest.split(" "))
        lines = rows.split("/")
        if len(lines) != self.side or any(len(line) != self.side or set(line) - set("#.") for line in lines):
            raise ValueError(f"no maze of {self.side} x {self.side} cells")
        walls = np.array([mark == "#" for line in lines for mark in line])
        if not walls.reshape(self.side, -1)[[0, -1]].all() or not walls.reshape(self.side, -1)[:, [0, -1]].all():
            raise ValueError("a maze has walls all around")
        places = [tuple(map(int, place.split(","))) for place in given.get("goals", "").split(";")]
        goals = np.array([row * self.side + column for row, column in places])
        if len(goals) != self.settings.goals or walls[goals].any() or walls[find_start(self.side)]:
            raise ValueError("start and goals are free cells")
        self._build(np.array([actor]), walls[None], goals[None])
        if self.settings.shuffle_actions:
            order = [int(digit) for digit in given.get("moves", "")]
            if sorted(order) != list(range(len(MOVES))):
                raise ValueError("moves are an order of all of them")
            self.meaning[actor] = order

    def _observe(self) -> dict[str, np.ndarray]:
        here = self._coordinates[self.cell]
        seen = np.empty((self.num_envs, 7), dtype=np.float32)
        seen[:, :2] = here
        seen[:, 2:6] = self._runs[self._row, self.cell]
        seen[:, 2:6] /= self.side
        seen[:, 6] = self.time / self.settings.max_episode_steps
        return {"obs.observation": seen, "obs.achieved": here[:, None], "obs.goals": self._shown.copy()}

    def step(self, actions: np.ndarray) -> StepResult:
        self.time += 1
        if self.settings.shuffle_actions:
            actions = self.meaning[self._row, actions]
        ahead = self.cell + self._change[actions]
        self.cell = np.where(self.walls[self._row, ahead], self.cell, ahead)
        active = self.goals[self._row, np.minimum(self.reached, self.settings.goals - 1)]
        arrived = (self.cell == active) & (self.reached < self.settings.goals)
        arrivals = np.flatnonzero(arrived)
        self._shown[arrivals, self.reached[arrivals]] = GOAL_RULE.done
        self.reached += arrived
        success = arrived & (self.reached == self.settings.goals)
        late = self.time >= self.settings.max_episode_steps
        over = success | late
        return StepResult(
            observation=self._observe(),
            reward=arrived.astype(np.float32),
            terminated=over,
            truncated=late,
            reset=self._nobody,
            attempt_end=over,
            success=success,
        )

    def _scene(self, actor: int) -> GridScene:
        cells = np.where(self.walls[actor], "#", ".")
        cells[find_start(self.side)] = "S"
        for number, goal in enumerate(self.goals[actor].tolist()):
            cells[goal] = "*" if number < self.reached[actor] else _NUMBERS[min(number, len(_NUMBERS) - 1)]
        row, column = divmod(int(self.cell[actor]), self.side)
        return GridScene(rows=split_rows(cells, self.side), agent=(row, column))

    def tasks(self, indices: np.ndarray) -> list[str]:
        """Rows of the maze, `#` wall and `.` free; goals as row,column; the order of the moves where it is shuffled."""
        names, marks = [], np.where(self.walls[indices], ord("#"), ord(".")).astype(np.uint8)
        for i, rows in zip(indices.tolist(), name_maps(marks, self.side), strict=True):
            places = (divmod(goal, self.side) for goal in self.goals[i].tolist())
            name = f"{rows} goals={';'.join(f'{row},{column}' for row, column in places)}"
            order = "".join(map(str, self.meaning[i])) if self.settings.shuffle_actions else ""
            names.append(f"{name} moves={order}" if order else name)
        return names

    def expert(self) -> np.ndarray:
        """The first move of a shortest way to the goal whose turn it is, by one who sees the maze."""
        active = self.goals[self._row, np.minimum(self.reached, self.settings.goals - 1)]
        moves = transitions(self.side, MOVES)
        steps = distances(self.walls, active, moves)
        wanted = steps[self._row, moves[:, self.cell]].argmin(axis=0)
        return (self.meaning == wanted[:, None]).argmax(axis=1).astype(np.int32)
