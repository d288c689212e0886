"""Meta-FrozenLake: find the way over an unseen lake, and walk it again in the attempts that follow.

Actions: 0 stay, 1 row + 1, 2 row - 1, 3 column + 1, 4 column - 1. After an attempt's end the agent is back at the start
in the same step.
"""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import numpy as np
from pydantic import Field

from pipelines.envs.env import EnvSpec, StepResult
from pipelines.envs.native import NativeEnv
from pipelines.envs.scenes import ON_ICE, GridScene, split_rows
from pipelines.envs.suites.grid import coordinates, distances, transitions
from pipelines.envs.suites.lake_maps import MapSource, list_split_maps, name_maps, parse_map
from pipelines.envs.suites.suite import ProtocolSettings
from pipelines.lake.spaces import Box, Discrete, Spaces

MOVES = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
_SWAPPED = np.array([0, 3, 2, 1, 4])  # hard mode: actions 1 and 3 change places
_RECOVER_PENALTY = 0.1
_SWAP_CHANCE, _JITTER_CHANCE, _MELT_CHANCE = 0.5, 0.25, 0.33
# Purposes of random draws; those of a step are counted by the episode's step number.
MAP, _SWAP, SLIP, MELT, JITTER, JITTER_ROW, JITTER_COLUMN = range(7)
_MOVING, _SEEING = np.array([[SLIP], [MELT]]), np.array([[JITTER], [JITTER_ROW], [JITTER_COLUMN]])
# Success by attempt of the Bayes-optimal policy, by (size, steps an attempt, attempts): all maps enumerated. With maps
# held out it is the mean over both sides, of which the held-out maps are a random part.
_FOUR = (0.38, 0.76, 0.93, 1.0, 1.0)
BAYES_OPTIMAL = {(3, 9, 5): (0.58, 0.92, 1.0, 1.0, 1.0), (4, 16, 5): _FOUR, (4, 10, 5): _FOUR}


class FrozenLakeSettings(ProtocolSettings):
    """Parameters of `meta-frozen-lake`."""

    PAPER: ClassVar = {"holdout": 0.0}

    size: int = Field(4, ge=2, le=64)
    """Cells along a side."""
    attempts: int = Field(10, ge=1)
    """Attempts at one map, in one episode."""
    hard: bool = False
    """Swapped actions in half of the tasks, jittered positions, ice that breaks behind the agent, or under one that
    bounced off a hole."""
    recover: bool = False
    """A hole costs 0.1 and leaves the agent where it was, instead of ending the attempt."""
    slip: float = Field(0.0, ge=0, lt=1)
    """Chance that a move becomes a stay."""
    max_episode_steps: int | None = Field(None, ge=1)
    """Steps of an attempt; unset: size * size, doubled in hard mode, divided by 1 - slip."""
    show_progress: bool = True
    """Show attempts finished / attempts in the observation (else 0)."""
    holdout: float | None = Field(None, ge=0, lt=1)
    """Share of maps kept for `split = "test"`; unset: 0.2 from size 4 on, 0 below (only 51 maps of size 3
    exist).
    """

    @property
    def attempt_steps(self) -> int:
        if self.max_episode_steps is not None:
            return self.max_episode_steps
        return int(self.size**2 * (2 if self.hard else 1) / (1 - self.slip))

    @property
    def held_out(self) -> float:
        if self.holdout is not None:
            return self.holdout
        return 0.2 if self.size >= 4 else 0.0


@lru_cache(maxsize=16)
def compute_random_success(size: int, steps: int, holdout: float, split: str) -> float:
    """Compute the exact chance that random actions reach the goal within an attempt, for sizes that are enumerated."""
    holes, weight = list_split_maps(size, holdout, split)
    chance = np.zeros(holes.shape)
    chance[:, 0] = 1.0
    arrived = np.zeros(len(holes))
    moves = transitions(size, MOVES)
    for _ in range(steps):
        following = np.zeros_like(chance)
        for cells in moves:
            for cell, target in enumerate(cells):
                following[:, target] += chance[:, cell] / len(MOVES)
        following[holes] = 0.0
        arrived += following[:, -1]
        following[:, -1] = 0.0
        chance = following
    return float(weight @ arrived)


class FrozenLake(NativeEnv):
    """N lakes. State: `cell`, `clock` (steps in the attempt), `attempt` (finished), `time` (steps in the
    episode).
    """

    Settings = FrozenLakeSettings

    def __init__(self, name: str, settings: FrozenLakeSettings, *, num_envs: int, seed: int, split: str) -> None:
        s = self.settings = settings
        limit, plain = s.attempt_steps, not (s.hard or s.recover or s.slip)
        chance = None
        if plain and s.size <= 4:
            chance = (compute_random_success(s.size, limit, s.held_out, split),) * s.attempts
        best = BAYES_OPTIMAL.get((s.size, limit, s.attempts)) if plain else None
        spec = EnvSpec(
            name=name,
            spaces=Spaces(observation={"obs": Box(shape=(4,))}, action=Discrete(n=5)),
            horizon=limit * s.attempts,
            num_attempts=s.attempts,
            has_success=True,
            about=f"{s.size}x{s.size} lake, {s.attempts} attempts of {limit} steps at one unseen map",
            split=f"{s.held_out:.0%} of the maps are held out" if s.held_out else "all maps on both sides",
            random_success=chance,
            random_return=sum(chance) if chance else None,
            optimal_success=best,
            optimal_return=sum(best) if best else None,
        )
        super().__init__(spec, num_envs=num_envs, seed=seed, split=split)
        self.limit = limit
        self._moves = transitions(s.size, MOVES)
        self._coordinates = coordinates(s.size)
        self._maps = MapSource(s.size, self.draws, MAP, holdout=s.held_out, split=split)
        self._shown = np.arange(s.attempts + 1, dtype=np.float32) / np.float32(s.attempts)
        if not s.show_progress:
            self._shown[:] = 0
        cells = s.size**2
        self._goal = cells - 1
        self._row = np.arange(num_envs) * cells
        self.task_holes = np.zeros((num_envs, cells), dtype=bool)
        self.holes = self.task_holes.copy() if s.hard else self.task_holes
        self.swapped = np.zeros(num_envs, dtype=bool)
        self.cell, self.clock, self.attempt, self.time, self._lagging = np.zeros((5, num_envs), dtype=np.int64)
        self._fresh = np.ones(num_envs, dtype=bool)

    def _begin(self, indices: np.ndarray, episodes: np.ndarray) -> None:
        self.task_holes[indices] = self._maps.draw(episodes)
        if self.settings.hard:
            self.holes[indices] = self.task_holes[indices]
            self.swapped[indices] = self.draws.uniform(episodes, _SWAP) < _SWAP_CHANCE
        for state in (self.cell, self.clock, self.attempt, self.time, self._lagging):
            state[indices] = 0
        self._fresh[indices] = True

    def _assign(self, actor: int, task: str) -> None:
        rows, _, order = task.partition(" ")
        self.task_holes[actor] = parse_map(rows, self.settings.size)
        if self.settings.hard:
            self.holes[actor] = self.task_holes[actor]
            self.swapped[actor] = order == "swapped"

    def _observe(self) -> dict[str, np.ndarray]:
        observation = np.empty((self.num_envs, 4), dtype=np.float32)
        observation[:, :2] = self._coordinates.take(self._seen_cell(), axis=0)
        observation[:, 2] = self._fresh
        observation[:, 3] = self._shown.take(self._lagging)
        return {"obs": observation}

    def _seen_cell(self) -> np.ndarray:
        """The cell the agent believes to be in: in hard mode, sometimes a neighbour of the true one."""
        if not self.settings.hard:
            return self.cell
        size, episode = self.settings.size, self.episodes.chance
        chance, down, right = self.draws.uniform(episode, _SEEING, self.time)
        row, column = np.divmod(self.cell, size)
        row = np.clip(row + (down * 3).astype(np.int64) - 1, 0, size - 1)
        column = np.clip(column + (right * 3).astype(np.int64) - 1, 0, size - 1)
        return np.where(chance < _JITTER_CHANCE, row * size + column, self.cell)

    def step(self, actions: np.ndarray) -> StepResult:
        s = self.settings
        self.time += 1
        self.clock += 1
        if s.slip or s.hard:
            slips, melts = self.draws.uniform(self.episodes.chance, _MOVING, self.time)
            actions = np.where(slips < s.slip, 0, actions)
        if s.hard:
            actions = np.where(self.swapped, _SWAPPED[actions], actions)
        reached = self._moves[actions, self.cell]
        fell = self.holes.take(self._row + reached)
        goal = reached == self._goal
        reward = goal.astype(np.float32)
        over = goal | (self.clock >= self.limit)
        left = reached != self.cell  # also when the agent bounces off a hole: the ice breaks under it
        if s.recover:
            reached = np.where(fell, self.cell, reached)
            reward -= np.float32(_RECOVER_PENALTY) * fell
        else:
            over |= fell
        if s.hard:
            broken = (melts < _MELT_CHANCE) & left
            self.holes[broken, self.cell[broken]] = True
            self.holes[over] = self.task_holes[over]
        self.cell = np.where(over, 0, reached)
        self.clock[over] = 0
        self._fresh = over
        self._lagging = self.attempt.copy()
        self.attempt += over
        return StepResult(
            observation=self._observe(),
            reward=reward,
            terminated=self.attempt >= s.attempts,
            truncated=self._nobody,
            reset=over,
            attempt_end=over,
            success=goal,
        )

    def _scene(self, actor: int) -> GridScene:
        size = self.settings.size
        cells = np.where(self.holes[actor], "#", ".")
        cells[self._goal] = "G"
        row, column = divmod(int(self.cell[actor]), size)
        note = "actions 1 and 3 are swapped" if self.swapped[actor] else ""
        return GridScene(rows=split_rows(cells, size), agent=(row, column), tiles=ON_ICE, note=note)

    def tasks(self, indices: np.ndarray) -> list[str]:
        """Rows of the map, `.` ice and `#` hole; ` swapped` where actions 1 and 3 are."""
        marks = np.where(self.task_holes[indices], ord("#"), ord(".")).astype(np.uint8)
        named = zip(name_maps(marks, self.settings.size), self.swapped[indices].tolist(), strict=True)
        return [f"{rows} swapped" if swapped else rows for rows, swapped in named]

    def expert(self) -> np.ndarray:
        """The first move of a shortest way to the goal, by one who sees the map (stay where there is
        none).
        """
        steps = distances(self.holes, np.full(self.num_envs, self._goal), self._moves)
        ahead = steps[np.arange(self.num_envs), self._moves[:, self.cell]]
        actions = ahead.argmin(axis=0)
        return np.where(self.swapped, _SWAPPED[actions], actions).astype(np.int32)
