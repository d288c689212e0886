"""T-Maze: remember a sign seen at the start of a corridor until its end (Ni et al., NeurIPS 2023, section 4).

Cells x = 0..J and two arms at (J, -1) and (J, +1), one of which is the goal. Actions: 0 x + 1, 1 y + 1, 2 x - 1, 3 y -
1; a move into a wall stays. passive: the agent starts at x = 0, J = corridor, and the sign is in its first observation.
active: it starts at x = 1, J = corridor + 1, and must go back to x = 0 to see the sign.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from pipelines.config.base import SettingsModel
from pipelines.envs.env import EnvSpec, StepResult
from pipelines.envs.native import NativeEnv
from pipelines.envs.scenes import GridScene
from pipelines.lake.spaces import Box, Discrete, Spaces

_SIDE = 0  # purpose of the only random draw
_DX = np.array([1, 0, -1, 0])
_DY = np.array([0, 1, 0, -1])


class _TMazeSettings(SettingsModel):
    """Parameters of `tmaze`."""

    variant: Literal["passive", "active"] = "passive"
    """passive: the sign is shown at once; active: it must be fetched."""
    corridor: int = Field(10, ge=1)
    """Length of the corridor: steps over which the sign must be remembered."""
    goal_reward: float = 1.0
    """Paid in the last step for standing in the goal's arm."""
    penalty: Annotated[float, Field(le=0)] | Literal["auto"] = 0.0
    """Reward (<= 0) of a step before the last that does not go right; "auto": -1 / corridor."""
    penalty_rule: Literal["action", "behind"] = "action"
    """What is penalised: an action that does not go right; or being behind where going right would have led."""

    @property
    def oracle(self) -> int:
        """Cells between the start and the sign."""
        return 0 if self.variant == "passive" else 1

    @property
    def junction(self) -> int:
        return self.corridor + self.oracle

    @property
    def episode_steps(self) -> int:
        return self.corridor + 2 * self.oracle + 1

    @property
    def step_penalty(self) -> float:
        return -1.0 / self.corridor if self.penalty == "auto" else self.penalty


class TMaze(NativeEnv):
    """N mazes. State: `x`, `y`, `time`, `side` of the goal (-1 or +1), `seen` (the sign was visited)."""

    Settings = _TMazeSettings

    def __init__(self, name: str, settings: _TMazeSettings, *, num_envs: int, seed: int, split: str) -> None:
        s = self.settings = settings
        spec = EnvSpec(
            name=name,
            spaces=Spaces(observation={"obs": Box(shape=(2,))}, action=Discrete(n=4)),
            horizon=s.episode_steps,
            has_success=True,
            about=f"{s.variant}: recall a sign over a corridor of {s.corridor} steps",
            split="the same two tasks on both sides",
            optimal_return=s.goal_reward,
            optimal_success=(1.0,),
        )
        super().__init__(spec, num_envs=num_envs, seed=seed, split=split)
        self.x, self.y, self.time, self.side = np.zeros((4, num_envs), dtype=np.int64)
        self.seen = np.zeros(num_envs, dtype=bool)
        self._sign = np.zeros(num_envs, dtype=np.int64)

    def _begin(self, indices: np.ndarray, episodes: np.ndarray) -> None:
        self.x[indices] = self.settings.oracle
        self.y[indices] = self.time[indices] = 0
        self.side[indices] = np.where(self.draws.uniform(episodes, _SIDE) < 0.5, -1, 1)
        at_sign = self.settings.oracle == 0
        self.seen[indices] = at_sign
        self._sign[indices] = self.side[indices] if at_sign else 0

    def _assign(self, actor: int, task: str) -> None:
        self.side[actor] = int(task.removeprefix("goal="))
        if self.settings.oracle == 0:
            self._sign[actor] = self.side[actor]

    def _observe(self) -> dict[str, np.ndarray]:
        """`_sign` is the side where the sign is being seen for the first time, else 0; y is 0 off the
        junction.
        """
        observation = np.empty((self.num_envs, 2), dtype=np.float32)
        observation[:, 0] = self.x == self.settings.junction
        observation[:, 1] = self._sign + self.y
        return {"obs": observation}

    def step(self, actions: np.ndarray) -> StepResult:
        s = self.settings
        self.time += 1
        x, y = self.x + _DX[actions], self.y + _DY[actions]
        at_junction = x == s.junction
        in_corridor = (y == 0) & (x >= 0) & (x <= s.junction)
        legal = in_corridor | (at_junction & (y >= -1) & (y <= 1))
        self.x, self.y = np.where(legal, x, self.x), np.where(legal, y, self.y)
        first_visit = (self.x == 0) & ~self.seen
        self._sign = self.side * first_visit
        self.seen |= first_visit
        last = self.time >= s.episode_steps
        success = last & (self.y == self.side)
        if s.penalty_rule == "action":
            costly = (actions != 0) & (self.time > s.oracle) & ~last
        else:
            costly = (self.x < self.time - s.oracle) & ~last
        reward = (s.goal_reward * success + s.step_penalty * costly).astype(np.float32)
        return StepResult(
            observation=self._observe(),
            reward=reward,
            terminated=last,
            truncated=last,
            reset=self._nobody,
            attempt_end=last,
            success=success,
        )

    def _scene(self, actor: int) -> GridScene:
        junction, up = self.settings.junction, self.side[actor] > 0
        arms = ["#" * (junction + 1) + mark + "#" for mark in ("G." if up else ".G")]
        corridor = f"#{'^' if up else 'v'}{'.' * junction}#"
        wall = "#" * (junction + 3)
        return GridScene(
            rows=[wall, arms[0], corridor, arms[1], wall],
            agent=(2 - int(self.y[actor]), 1 + int(self.x[actor])),
            note="" if self.seen[actor] else "the sign is yet to be seen",
        )

    def tasks(self, indices: np.ndarray) -> list[str]:
        return ["goal=+1" if self.side[i] > 0 else "goal=-1" for i in indices]

    def expert(self) -> np.ndarray:
        """Right all the way, into the goal's arm with the last step."""
        turn = self.time == self.settings.episode_steps - 1
        return np.where(turn, np.where(self.side > 0, 1, 3), 0).astype(np.int32)
