"""`half-cheetah-vel` (Finn et al., ICML 2017), `cheetah-dir` and `ant-dir` (Rakelly et al., ICML 2019): bodies of
gymnasium's MuJoCo environments, version 5, whose velocity is rewarded for an objective that only the reward reveals.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
from gymnasium.envs.mujoco import MujocoEnv
from gymnasium.envs.mujoco.ant_v5 import AntEnv
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv
from gymnasium.spaces import Box
from pydantic import Field

from pipelines.config.base import SettingsModel
from pipelines.envs.draws import BANDS, bands_of, spread
from pipelines.envs.env import Env
from pipelines.envs.gymnasium_env import GymnasiumEnv
from pipelines.envs.suites.suite import ProtocolSettings
from pipelines.envs.task_env import FAILED, NOTHING, TaskEnv, repeat_attempts

# Objectives are multiples of these fractions, so that their names are exact.
_DEGREE_PARTS, _VELOCITY_PARTS = 1000, 1_000_000
_TWO = {"forward": 0.0, "backward": 180.0}
_BOTH_DIRECTIONS = "the same two directions on both sides"


class HalfCheetahVelSettings(ProtocolSettings):
    """Parameters of `half-cheetah-vel`."""

    PAPER: ClassVar = {"holdout": False}  # every velocity of U(0, max_velocity), in training and in test

    attempts: int = Field(1, ge=1)
    """Attempts at one velocity, in one episode; each begins at rest."""
    attempt_steps: int = Field(1000, ge=1)
    """Steps of an attempt; a step is 0.05 s."""
    max_velocity: float = Field(3.0, gt=0, le=100)
    """Highest target velocity, in m/s."""
    velocity_weight: float = Field(1.0, ge=0)
    """Cost of a difference of 1 m/s to the target velocity."""
    control_cost: float = Field(0.05, ge=0)
    """Cost of the squared action."""
    holdout: bool = True
    """Keep a fifth of the velocities, in six bands, for `split = "test"`; false: all of them on both sides."""


class _CheetahDirSettings(SettingsModel):
    """Parameters of `cheetah-dir`."""

    attempts: int = Field(2, ge=1)
    """Attempts at one direction, in one episode; each begins at rest."""
    attempt_steps: int = Field(200, ge=1)
    """Steps of an attempt; a step is 0.05 s."""
    control_cost: float = Field(0.05, ge=0)
    """Cost of the squared action."""


class _AntDirSettings(ProtocolSettings):
    """Parameters of `ant-dir`."""

    PAPER: ClassVar = {"holdout": False}

    directions: Literal["circle", "two"] = "circle"
    """Any angle, or only forward and backward."""
    attempts: int = Field(2, ge=1)
    """Attempts at one direction, in one episode; each begins at rest."""
    attempt_steps: int = Field(200, ge=1)
    """Maximum steps of an attempt; a step is 0.05 s."""
    holdout: bool = True
    """Keep a fifth of the angles, in six bands, for `split = "test"`; false: all of them on both sides."""


class _Runner(TaskEnv):
    """One attempt of one body at the hidden number `objective`; `retry` begins another."""

    objective = 0.0

    @classmethod
    def make(cls, name: str, settings: Any, *, num_envs: int, seed: int, split: str) -> Env:
        def make_one() -> gymnasium.Env:
            return repeat_attempts(cls(settings), settings.attempts, terminates=False)  # type: ignore[call-arg]

        return GymnasiumEnv(name, make_one, num_envs=num_envs, seed=seed, split=split)

    def __init__(self, body: MujocoEnv, attempt_steps: int) -> None:
        self._body, self.horizon = body, attempt_steps
        self.observation_space = Box(-np.inf, np.inf, body.observation_space.shape, np.float32)
        self.action_space = body.action_space
        self._named: float | None = None
        self._time = 0

    @abstractmethod
    def _draw(self) -> float:
        """Draw the objective of an episode from `np_random`."""

    @abstractmethod
    def _reward(self, action: np.ndarray, info: dict[str, Any]) -> float:
        """Compute the reward of a step, which replaces the library's."""

    @abstractmethod
    def _name(self, objective: float) -> str:
        """Name the task with this objective; "" if there is none."""

    @abstractmethod
    def _parse(self, task: str) -> float:
        """Parse a task's name to its objective. ValueError if there is none."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        drawn = self._draw()
        self.objective = drawn if self._named is None else self._named
        self.task = self._name(self.objective)
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
        objective = self._parse(task)
        if task != self._name(objective):
            raise ValueError(f"tasks are named like {self._name(self._draw())}")
        self._named = objective

    def drawn(self, mode: str) -> Any:
        return self._body.render() if mode == "rgb_array" else None

    def close(self) -> None:
        self._body.close()


class HalfCheetahVel(_Runner):
    """A cheetah that runs at a target velocity."""

    Settings = HalfCheetahVelSettings
    about = "Run at a hidden velocity that only the reward reveals"

    def __init__(self, settings: HalfCheetahVelSettings) -> None:
        super().__init__(HalfCheetahEnv(render_mode="rgb_array"), settings.attempt_steps)
        self._settings = settings
        self.splits = "a fifth of the velocities is held out" if settings.holdout else "all velocities on both sides"

    def _draw(self) -> float:
        return draw_velocity(self.np_random, self._settings, self.split)

    def _reward(self, action: np.ndarray, info: dict[str, Any]) -> float:
        s = self._settings
        error = abs(info["x_velocity"] - self.objective)
        return -s.velocity_weight * error - s.control_cost * float(np.square(action).sum())

    def _name(self, objective: float) -> str:
        return f"velocity={objective:.6f}"

    def _parse(self, task: str) -> float:
        velocity = float(task.removeprefix("velocity="))
        if not 0 <= velocity <= self._settings.max_velocity:
            raise ValueError(f"velocities are between 0 and {self._settings.max_velocity:g}")
        return velocity


class _Directed(_Runner):
    """A body that runs in a direction, in degrees from the x axis."""

    def _name(self, objective: float) -> str:
        for word, angle in _TWO.items():
            if objective == angle:
                return f"direction={word}"
        return f"direction={objective:.3f}" if 0 <= objective < 360 else ""

    def _parse(self, task: str) -> float:
        text = task.removeprefix("direction=")
        return _TWO[text] if text in _TWO else float(text)


class CheetahDir(_Directed):
    """A cheetah that runs forward or backward."""

    Settings = _CheetahDirSettings
    about = "A cheetah runs forward or backward, which only the reward reveals"
    splits = _BOTH_DIRECTIONS

    def __init__(self, settings: _CheetahDirSettings) -> None:
        super().__init__(HalfCheetahEnv(render_mode="rgb_array"), settings.attempt_steps)
        self._cost = settings.control_cost

    def _draw(self) -> float:
        return _TWO["forward"] if self.np_random.random() < 0.5 else _TWO["backward"]

    def _reward(self, action: np.ndarray, info: dict[str, Any]) -> float:
        sign = 1.0 if self.objective == _TWO["forward"] else -1.0
        return sign * info["x_velocity"] - self._cost * float(np.square(action).sum())

    def _parse(self, task: str) -> float:
        angle = super()._parse(task)
        if angle not in _TWO.values():
            raise ValueError("tasks are direction=forward and direction=backward")
        return angle


class AntDir(_Directed):
    """An ant that walks at an angle to the x axis."""

    Settings = _AntDirSettings
    about = "An ant walks in a direction that only the reward reveals"

    def __init__(self, settings: _AntDirSettings) -> None:
        super().__init__(AntEnv(include_cfrc_ext_in_observation=False, render_mode="rgb_array"), settings.attempt_steps)
        self._settings = settings
        self.splits = "a fifth of the angles is held out" if settings.holdout else "all angles on both sides"
        if settings.directions == "two":
            self.splits = _BOTH_DIRECTIONS

    def _draw(self) -> float:
        share = self.np_random.random()
        if self._settings.directions == "two":
            return _TWO["forward"] if share < 0.5 else _TWO["backward"]
        if self._settings.holdout:
            share = float(spread(np.array(share), self.split))
        return int(share * 360 * _DEGREE_PARTS) / _DEGREE_PARTS

    def _reward(self, action: np.ndarray, info: dict[str, Any]) -> float:
        angle = math.radians(self.objective)
        along = math.cos(angle) * info["x_velocity"] + math.sin(angle) * info["y_velocity"]
        return float(along + info["reward_survive"] + info["reward_ctrl"] + info["reward_contact"])


def draw_velocity(rng: np.random.Generator, settings: HalfCheetahVelSettings, split: str) -> float:
    """Draw the velocity of one episode, from one side of the split."""
    highest = int(settings.max_velocity * _VELOCITY_PARTS)
    if not settings.holdout:
        return int(rng.integers(highest + 1)) / _VELOCITY_PARTS
    bands = bands_of(split)
    band = int(bands[int(rng.integers(len(bands)))])
    return int(rng.integers(highest * band // BANDS, highest * (band + 1) // BANDS)) / _VELOCITY_PARTS
