"""`cheetah-dir` and `ant-dir`: run in a direction that only the reward reveals (Finn et al., ICML 2017; Rakelly et al.,
ICML 2019).

gymnasium's HalfCheetah-v5 and Ant-v5 (without contact forces in the observation) whose forward reward is the velocity
along a hidden direction; all other terms of the reward are the library's, but for the cheetah's `control_cost`. The
direction is the same in all attempts of an episode. The cheetah's is forward or backward, on both sides of the split;
the ant's is any angle (`two`: forward or backward), and with `holdout` six of 30 equal bands of angles are kept for
test. An attempt ends by its step limit, the ant's also when it falls. Observation, float32: the joints, 17 or 27.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar, Literal

import numpy as np
from gymnasium.envs.mujoco import MujocoEnv
from gymnasium.envs.mujoco.ant_v5 import AntEnv
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv
from gymnasium.spaces import Box
from pydantic import Field

from pipelines.config.base import SettingsModel
from pipelines.envs.attempts import with_attempts
from pipelines.envs.env import Env
from pipelines.envs.gymnasium_env import GymnasiumEnv
from pipelines.envs.protocol import ProtocolSettings
from pipelines.envs.suites.bands import spread
from pipelines.envs.task_env import FAILED, NOTHING, TaskEnv

ANT = "ant-dir"
_PARTS = 1000  # angles are whole numbers of these in a degree, so that their names are exact
_TWO = {"forward": 0.0, "backward": 180.0}


class CheetahDirSettings(SettingsModel):
    """Parameters of `cheetah-dir`."""

    attempts: int = Field(2, ge=1)
    """Attempts at one direction, in one episode; each begins at rest."""
    attempt_steps: int = Field(200, ge=1)
    """Steps of an attempt; a step is 0.05 s."""
    control_cost: float = Field(0.05, ge=0)
    """Cost of the squared action."""


class AntDirSettings(ProtocolSettings):
    """Parameters of `ant-dir`."""

    PAPER: ClassVar = {"holdout": False}

    directions: Literal["circle", "two"] = "circle"
    """Any angle, or forward and backward alone."""
    attempts: int = Field(2, ge=1)
    """Attempts at one direction, in one episode; each begins at rest."""
    attempt_steps: int = Field(200, ge=1)
    """Most steps of an attempt; a step is 0.05 s."""
    holdout: bool = True
    """Keep a fifth of the angles, in six bands, for `split = "test"`; false: all of them on both sides."""


class Direction(TaskEnv):
    """One attempt of one body in the direction `angle` (degrees); `retry` begins another."""

    _body: MujocoEnv
    angle = 0.0

    def __init__(self, body: MujocoEnv, attempt_steps: int) -> None:
        self._body, self.horizon = body, attempt_steps
        space = body.observation_space
        self.observation_space = Box(-np.inf, np.inf, space.shape, np.float32)
        self.action_space = body.action_space
        self._named: float | None = None
        self._time = 0

    @abstractmethod
    def _drawn(self) -> float:
        """The angle of a new episode."""

    @abstractmethod
    def _reward(self, action: np.ndarray, info: dict[str, Any]) -> float:
        """That of a step, in place of the library's."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        drawn = self._drawn()
        self.angle = drawn if self._named is None else self._named
        self.task = _name(self.angle)
        self.outcome, self._time = NOTHING, 0
        return self._body.reset(seed=int(self.np_random.integers(2**31)))

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, _, terminated, _, info = self._body.step(action)
        self._time += 1
        late = self._time >= (self.horizon or math.inf)
        self.outcome = FAILED if late or terminated else NOTHING
        return observation, self._reward(action, info), bool(terminated), late and not terminated, info

    def retry(self, seed: int) -> Any:
        self._time = 0
        return self._body.reset()[0]

    def play(self, task: str) -> None:
        text = task.removeprefix("direction=")
        angle = _TWO[text] if text in _TWO else float(text)
        if task != _name(angle):
            raise ValueError("tasks are direction=forward, direction=backward or direction=DEGREES, such as 12.345")
        self._named = angle

    def close(self) -> None:
        self._body.close()


class CheetahDir(Direction):
    """A cheetah that runs forward or backward."""

    about = "A cheetah runs forward or backward, which only the reward reveals"
    splits = "the same two directions on both sides"

    def __init__(self, settings: CheetahDirSettings) -> None:
        super().__init__(HalfCheetahEnv(), settings.attempt_steps)
        self._cost = settings.control_cost

    def _drawn(self) -> float:
        return _TWO["forward"] if self.np_random.random() < 0.5 else _TWO["backward"]

    def _reward(self, action: np.ndarray, info: dict[str, Any]) -> float:
        sign = 1.0 if self.angle == _TWO["forward"] else -1.0
        return sign * info["x_velocity"] - self._cost * float(np.square(action).sum())

    def play(self, task: str) -> None:
        super().play(task)
        if self._named not in _TWO.values():
            raise ValueError("tasks are direction=forward and direction=backward")


class AntDir(Direction):
    """An ant that walks at an angle to the x axis."""

    about = "An ant walks in a direction that only the reward reveals"

    def __init__(self, settings: AntDirSettings) -> None:
        super().__init__(AntEnv(include_cfrc_ext_in_observation=False), settings.attempt_steps)
        self._settings = settings
        self.splits = "a fifth of the angles is held out" if settings.holdout else "all angles on both sides"
        if settings.directions == "two":
            self.splits = CheetahDir.splits

    def _drawn(self) -> float:
        share = self.np_random.random()
        if self._settings.directions == "two":
            return _TWO["forward"] if share < 0.5 else _TWO["backward"]
        if self._settings.holdout:
            share = float(spread(np.array(share), self.split))
        return int(share * 360 * _PARTS) / _PARTS

    def _reward(self, action: np.ndarray, info: dict[str, Any]) -> float:
        angle = math.radians(self.angle)
        along = math.cos(angle) * info["x_velocity"] + math.sin(angle) * info["y_velocity"]
        return float(along + info["reward_survive"] + info["reward_ctrl"] + info["reward_contact"])


def _name(angle: float) -> str:
    for word, known in _TWO.items():
        if angle == known:
            return f"direction={word}"
    return f"direction={angle:.3f}" if 0 <= angle < 360 else ""


def settings_model(name: str) -> type[SettingsModel]:
    return AntDirSettings if name == ANT else CheetahDirSettings


def make(name: str, settings: SettingsModel, *, num_envs: int, seed: int, split: str) -> Env:
    def one() -> Any:
        if isinstance(settings, AntDirSettings):
            return with_attempts(AntDir(settings), settings.attempts, terminates=False)
        assert isinstance(settings, CheetahDirSettings)
        return with_attempts(CheetahDir(settings), settings.attempts, terminates=False)

    return GymnasiumEnv(name, one, num_envs=num_envs, seed=seed, split=split)
