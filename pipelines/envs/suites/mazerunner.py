"""MazeRunner: visit goals in order, in an unseen maze of which only the next walls are seen.

Maze, start and goals are new in every episode; the goals are distinct free cells. Actions: 0 west, 1 north, 2 east,
3 south, 4 stay, or an order of these that is hidden and new in every episode. A step into a wall stays. Arriving at the
goal whose turn it is pays 1; the last one ends the episode. At the time limit it ends terminated and truncated alike.
Where a step leads does not depend on the goals. Observation, all float32: `obs.observation` (7,) is row / side,
column / side, the free cells to the west, north, east and south / side, and time / limit; `obs.achieved` (1, 2) is the
present cell's row / side, column / side; `obs.goals` (k, 2) are the goals', -1, -1 once they have been reached.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field, model_validator

from pipelines.config.base import SettingsModel
from pipelines.envs.env import EnvSpec, NativeEnv, StepResult
from pipelines.envs.goals import GoalSequenceRule
from pipelines.envs.protocol import ProtocolSettings
from pipelines.envs.suites.goal_frozen_lake import same_cell
from pipelines.envs.suites.grid import coordinates, distances, transitions
from pipelines.envs.suites.mazes import MazeSource, fewest_free, free_runs, start_of
from pipelines.lake.spaces import Box, Discrete, Spaces

MOVES = ((0, -1), (-1, 0), (0, 1), (1, 0), (0, 0))
MAZE, GOALS, ORDER = range(3)  # purposes of random draws
GOAL_RULE = GoalSequenceRule(reached=same_cell)


class MazeRunnerSettings(ProtocolSettings):
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
    def _have_room(self) -> MazeRunnerSettings:
        if self.goals > fewest_free(self.side):
            raise ValueError(f"goals can be at most {fewest_free(self.side)} in a maze of size {self.side}")
        return self

    @property
    def side(self) -> int:
        return self.size // 2 * 2 + 1


class MazeRunner(NativeEnv):
    """N mazes. State: `walls` (N, cells), `goals` (N, k) cells, `reached` (N,) goals so far, `cell`, `time`."""

    def __init__(self, name: str, settings: MazeRunnerSettings, *, num_envs: int, seed: int, split: str) -> None:
        super().__init__(_spec(name, settings), num_envs=num_envs, seed=seed, split=split)
        self.settings, self.side = settings, settings.side
        self._mazes = MazeSource(self.side, self.draws, MAZE, holdout=settings.holdout, split=split)
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
        order[:, start_of(self.side)] = 2.0
        self._build(indices, walls, np.argsort(order, axis=1)[:, : self.settings.goals])
        if self.settings.shuffle_actions:
            self.meaning[indices] = self.draws.permutations(episodes, ORDER, len(MOVES))

    def _build(self, indices: np.ndarray, walls: np.ndarray, goals: np.ndarray) -> None:
        self.walls[indices], self.goals[indices] = walls, goals
        self._runs[indices] = free_runs(walls, self.side)
        self._shown[indices] = self._coordinates[goals]
        self.cell[indices] = start_of(self.side)
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
        if len(goals) != self.settings.goals or walls[goals].any() or walls[start_of(self.side)]:
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

    def tasks(self, indices: np.ndarray) -> list[str]:
        """Rows of the maze, `#` wall and `.` free; goals as row,column; the order of the moves where it is shuffled."""
        names = []
        for i in indices.tolist():
            marks = "".join("#" if wall else "." for wall in self.walls[i].tolist())
            rows = "/".join(marks[k : k + self.side] for k in range(0, len(marks), self.side))
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


def settings_model(name: str) -> type[SettingsModel]:
    return MazeRunnerSettings


def make(name: str, settings: MazeRunnerSettings, *, num_envs: int, seed: int, split: str) -> MazeRunner:
    return MazeRunner(name, settings, num_envs=num_envs, seed=seed, split=split)


def _spec(name: str, s: MazeRunnerSettings) -> EnvSpec:
    return EnvSpec(
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
