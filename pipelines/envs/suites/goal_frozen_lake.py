"""Goal-FrozenLake: walk to a cell that is shown, over ice whose holes are visible only from adjacent cells.

One attempt on a map of the distribution of `meta-frozen-lake`, from cell (0, 0); actions as there. The goal is drawn
uniformly from the other cells that can be reached. Where a move leads does not depend on the goal.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from pipelines.config.base import SettingsModel
from pipelines.envs.env import EnvSpec, StepResult
from pipelines.envs.goals import GoalRule, is_same
from pipelines.envs.native import NativeEnv
from pipelines.envs.scenes import ON_ICE, GridScene, split_rows
from pipelines.envs.suites.frozen_lake import MOVES
from pipelines.envs.suites.grid import coordinates, distances, transitions
from pipelines.envs.suites.lake_maps import MapSource, name_maps, parse_map
from pipelines.lake.spaces import Box, Discrete, Spaces

MAP, GOAL = range(2)  # purposes of random draws


GOAL_RULE = GoalRule(reached=is_same)  # of float32 quotients, which are the same if the cells are


class _GoalFrozenLakeSettings(SettingsModel):
    """Parameters of `goal-frozen-lake`."""

    size: int = Field(4, ge=2, le=64)
    """Cells along a side."""
    max_episode_steps: int | None = Field(None, ge=1)
    """Steps after which the episode is truncated; unset: size * size."""
    holdout: float = Field(0.2, ge=0, lt=1)
    """Share of maps kept for `split = "test"`; 0: all maps on both sides."""

    @property
    def episode_steps(self) -> int:
        return self.size**2 if self.max_episode_steps is None else self.max_episode_steps


class GoalFrozenLake(NativeEnv):
    """N lakes. State: `holes` (N, cells), `goal`, `cell`, `time`."""

    Settings = _GoalFrozenLakeSettings

    def __init__(self, name: str, settings: _GoalFrozenLakeSettings, *, num_envs: int, seed: int, split: str) -> None:
        s = self.settings = settings
        spec = EnvSpec(
            name=name,
            spaces=Spaces(
                observation={
                    "obs.observation": Box(shape=(6,)),
                    "obs.achieved_goal": Box(shape=(2,)),
                    "obs.desired_goal": Box(shape=(2,)),
                },
                action=Discrete(n=len(MOVES)),
            ),
            horizon=s.episode_steps,
            has_success=True,
            about=f"{s.size}x{s.size} lake, {s.episode_steps} steps to a goal that is shown",
            split=f"{s.holdout:.0%} of the maps are held out" if s.holdout else "all maps on both sides",
        )
        super().__init__(spec, num_envs=num_envs, seed=seed, split=split)
        cells = s.size**2
        self._moves = transitions(settings.size, MOVES)
        self._bits = (self._moves[1:] != np.arange(cells)) * np.array([[1], [2], [4], [8]], dtype=np.uint8)
        self._coordinates = coordinates(settings.size)
        # Observations (cells * 16, 6) float32: row c * 16 + b is for cell c, and bits b of its adjacent holes.
        near = np.unpackbits(np.arange(16, dtype=np.uint8)[:, None], axis=1, count=4, bitorder="little")
        by_cell = np.repeat(self._coordinates, 16, axis=0), np.tile(near, (cells, 1))
        self._shown = np.hstack(by_cell, dtype=np.float32)
        self._maps = MapSource(settings.size, self.draws, MAP, holdout=settings.holdout, split=split)
        self.holes = np.zeros((num_envs, cells), dtype=bool)
        self._near = np.zeros((num_envs, cells), dtype=np.uint8)  # bit k: move k + 1 from there leads into a hole
        self.goal, self.cell, self.time = np.zeros((3, num_envs), dtype=np.int64)
        self._first = np.arange(num_envs) * cells

    def _begin(self, indices: np.ndarray, episodes: np.ndarray) -> None:
        holes, open_cells = self._maps.draw_reachable(episodes)
        open_cells[:, 0] = False
        chosen = self.draws.integers(episodes, GOAL, open_cells.sum(axis=1))
        self.goal[indices] = (np.cumsum(open_cells, axis=1) > chosen[:, None]).argmax(axis=1)
        self._dig(indices, holes)
        self.cell[indices] = self.time[indices] = 0

    def _dig(self, indices: np.ndarray, holes: np.ndarray) -> None:
        """Give the actors `indices` (m,) their maps, and find what is seen from each cell, once for all steps."""
        self.holes[indices] = holes
        self._near[indices] = np.bitwise_or.reduce(holes[:, self._moves[1:]] * self._bits, axis=1)

    def _assign(self, actor: int, task: str) -> None:
        self.goal[actor] = task.replace("/", "").index("G")
        self._dig(np.array([actor]), parse_map(task.replace("G", "."), self.settings.size)[None])

    def _observe(self) -> dict[str, np.ndarray]:
        near = self._near.take(self._first + self.cell)
        return {
            "obs.observation": self._shown.take(self.cell * 16 + near, axis=0),
            "obs.achieved_goal": self._coordinates.take(self.cell, axis=0),
            "obs.desired_goal": self._coordinates.take(self.goal, axis=0),
        }

    def step(self, actions: np.ndarray) -> StepResult:
        self.time += 1
        self.cell = self._moves[actions, self.cell]
        success = self.cell == self.goal
        terminated = success | self.holes.take(self._first + self.cell)
        truncated = (self.time >= self.settings.episode_steps) & ~terminated
        return StepResult(
            observation=self._observe(),
            reward=success.astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            reset=self._nobody,
            attempt_end=terminated | truncated,
            success=success,
        )

    def _scene(self, actor: int) -> GridScene:
        size = self.settings.size
        cells = np.where(self.holes[actor], "#", ".")
        cells[self.goal[actor]] = "G"
        row, column = divmod(int(self.cell[actor]), size)
        return GridScene(rows=split_rows(cells, size), agent=(row, column), tiles=ON_ICE)

    def tasks(self, indices: np.ndarray) -> list[str]:
        """Rows of the map, `.` ice and `#` hole and `G` the goal."""
        marks = np.where(self.holes[indices], ord("#"), ord(".")).astype(np.uint8)
        marks[np.arange(len(indices)), self.goal[indices]] = ord("G")
        return name_maps(marks, self.settings.size)

    def expert(self) -> np.ndarray:
        """The first move of a shortest way to the goal, by one who sees the map."""
        steps = distances(self.holes, self.goal, self._moves)
        return steps.take(self._first + self._moves[:, self.cell]).argmin(axis=0).astype(np.int32)
