"""Dark Room: find a hidden cell in attempt after attempt (Laskin et al., ICLR 2023, "Algorithm Distillation").

Actions: 0 (0, -1), 1 (-1, 0), 2 (0, +1), 3 (+1, 0) on (x, y), clipped at the walls, and 4 stay.
"""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from pipelines.envs.draws import mix, unit
from pipelines.envs.env import EnvSpec, StepResult
from pipelines.envs.native import AttemptsEnv
from pipelines.envs.scenes import GridScene, split_rows
from pipelines.envs.suites.grid import coordinates, transitions
from pipelines.envs.suites.suite import ProtocolSettings
from pipelines.errors import UsageError
from pipelines.lake.spaces import Box, Discrete, Spaces

MOVES = ((0, -1), (-1, 0), (0, 1), (1, 0), (0, 0))
GOAL = 0  # purpose of the only random draw
_MOST_CELLS = 20 * 20  # of rooms whose random play is computed, in well under a second


class DarkRoomSettings(ProtocolSettings):
    """Parameters of `dark-room`."""

    PAPER: ClassVar = {"holdout": 0.0}

    size: int = Field(9, ge=2, le=64)
    """Cells along a side of the room."""
    attempts: int = Field(10, ge=1)
    """Attempts at one goal, in one episode."""
    attempt_steps: int = Field(20, ge=1)
    """Steps of an attempt."""
    sparse: bool = False
    """Pay the first step on the goal in each attempt alone, not every one."""
    start: Literal["center", "corner"] = "center"
    """Cell where each attempt begins; corner: (0, 0)."""
    holdout: float = Field(0.2, ge=0, lt=1)
    """Share of goal cells kept for `split = "test"`; 0: all cells on both sides."""

    @property
    def start_cell(self) -> int:
        return self.size // 2 * (self.size + 1) if self.start == "center" else 0


class DarkRoom(AttemptsEnv):
    """N rooms. State: `goal` and `cell` (x * size + y), `found` (the goal was reached in this attempt)."""

    Settings = DarkRoomSettings

    def __init__(self, name: str, settings: DarkRoomSettings, *, num_envs: int, seed: int, split: str) -> None:
        s = self.settings = settings
        chance, paid = compute_random_play(s, split) if s.size**2 <= _MOST_CELLS else (None, None)
        spec = EnvSpec(
            name=name,
            spaces=Spaces(observation={"obs": Box(shape=(4,))}, action=Discrete(n=len(MOVES))),
            horizon=s.attempts * s.attempt_steps,
            num_attempts=s.attempts,
            has_success=True,
            about=f"{s.size}x{s.size} room, {s.attempts} attempts of {s.attempt_steps} steps at one hidden cell",
            split=f"{s.holdout:.0%} of the goal cells are held out" if s.holdout else "all goal cells on both sides",
            random_success=None if chance is None else (chance,) * s.attempts,
            random_return=None if paid is None else paid * s.attempts,
        )
        super().__init__(
            spec, attempts=s.attempts, attempt_steps=s.attempt_steps, num_envs=num_envs, seed=seed, split=split
        )
        self._moves = transitions(settings.size, MOVES)
        self._coordinates = coordinates(settings.size)
        self._goals = list_goal_cells(settings, split)
        self.goal, self.cell = np.zeros((2, num_envs), dtype=np.int64)
        self.found = np.zeros(num_envs, dtype=bool)

    def _begin(self, indices: np.ndarray, episodes: np.ndarray) -> None:
        super()._begin(indices, episodes)
        self.goal[indices] = self._goals[self.draws.integers(episodes, GOAL, len(self._goals))]
        self.cell[indices] = self.settings.start_cell
        self.found[indices] = False

    def _assign(self, actor: int, task: str) -> None:
        x, y = map(int, task.removeprefix("goal=").split(","))
        cell = x * self.settings.size + y
        if not (0 <= x < self.settings.size and 0 <= y < self.settings.size) or cell == self.settings.start_cell:
            raise ValueError("the goal is outside the room, or at the start")
        self.goal[actor] = cell

    def _place(self) -> np.ndarray:
        return self._coordinates.take(self.cell, axis=0)

    def _restart(self, mask: np.ndarray) -> None:
        self.cell[mask] = self.settings.start_cell
        self.found[mask] = False

    def step(self, actions: np.ndarray) -> StepResult:
        self.cell = self._moves[actions, self.cell]
        at_goal = self.cell == self.goal
        paid = at_goal & ~self.found if self.settings.sparse else at_goal
        self.found |= at_goal
        return self._finish(paid, self.found)

    def _scene(self, actor: int) -> GridScene:
        size = self.settings.size
        cells = np.full(size**2, ".")
        cells[self.settings.start_cell] = "S"
        cells[self.goal[actor]] = "G"
        row, column = divmod(int(self.cell[actor]), size)
        return GridScene(rows=split_rows(cells, size), agent=(row, column))

    def tasks(self, indices: np.ndarray) -> list[str]:
        """The goal's cell."""
        return ["goal={},{}".format(*divmod(int(self.goal[i]), self.settings.size)) for i in indices]

    def expert(self) -> np.ndarray:
        """A shortest way to the goal, by one who knows it; then stay."""
        x, y = np.divmod(self.cell, self.settings.size)
        goal_x, goal_y = np.divmod(self.goal, self.settings.size)
        steps = [y > goal_y, x > goal_x, y < goal_y, x < goal_x]
        return np.select(steps, [0, 1, 2, 3], default=4).astype(np.int32)


def list_goal_cells(s: DarkRoomSettings, split: str) -> np.ndarray:
    """Choose the cells that may be the goal on one side of the split. UsageError where there is none."""
    cells = np.delete(np.arange(s.size**2), s.start_cell)
    if s.holdout:
        test = unit(mix(cells.astype(np.uint64) + np.uint64(1))) < s.holdout
        cells = cells[test == (split == "test")]
    if not len(cells):
        raise UsageError(f"no goal is left for split '{split}'", hint="set env.holdout to 0, or env.size higher")
    return cells


@lru_cache(maxsize=16)
def compute_random_play(s: DarkRoomSettings, split: str) -> tuple[float, float]:
    """Compute the exact chance that an attempt of uniformly random actions finds the goal, and its expected return."""
    goals, moves = list_goal_cells(s, split), transitions(s.size, MOVES)
    cells = s.size**2
    step = np.zeros((cells, cells))
    for target in moves:
        step[np.arange(cells), target] += 1 / len(MOVES)
    where, unfound = np.zeros((2, len(goals), cells))
    where[:, s.start_cell] = unfound[:, s.start_cell] = 1.0
    row, paid = np.arange(len(goals)), 0.0
    for _ in range(s.attempt_steps):
        where, unfound = where @ step, unfound @ step
        unfound[row, goals] = 0.0
        paid += float(where[row, goals].mean())
    chance = 1.0 - float(unfound.sum(axis=1).mean())
    return chance, chance if s.sparse else paid
