"""HalfCheetah-Vel: run at a velocity that is not told, but for the reward (Finn et al., ICML 2017, section 5.2).

gymnasium's HalfCheetah-v5 with another reward: -`velocity_weight` |v - v*| - `control_cost` |action|^2, where v is the
velocity of a step, in m/s. The hidden v* is uniform over [0, `max_velocity`] and the same in all attempts of an
episode; with `holdout` it is drawn from 24 of 30 equal bands in training and from every fifth, the third of
each five, in test. An attempt ends by its step limit alone. Observation, float32 (17,): the joints, without x.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv
from gymnasium.spaces import Box
from pydantic import Field

from pipelines.config.base import SettingsModel
from pipelines.envs.attempts import with_attempts
from pipelines.envs.env import Env
from pipelines.envs.gymnasium_env import GymnasiumEnv
from pipelines.envs.protocol import ProtocolSettings
from pipelines.envs.task_env import FAILED, NOTHING, TaskEnv

BANDS, EVERY, TEST_BAND = 30, 5, 2
_PARTS = 1_000_000  # velocities are whole numbers of these in a unit, so that their names are exact


class HalfCheetahVelSettings(ProtocolSettings):
    """Parameters of `half-cheetah-vel`."""

    PAPER: ClassVar = {"holdout": False}  # every velocity of U(0, max_velocity), in training and in test

    attempts: int = Field(1, ge=1)
    """Attempts at one velocity, in one episode; each begins at rest."""
    attempt_steps: int = Field(1000, ge=1)
    """Steps of an attempt; a step is 0.05 s."""
    max_velocity: float = Field(3.0, gt=0, le=100)
    """Highest velocity that is asked for, in m/s."""
    velocity_weight: float = Field(1.0, ge=0)
    """Cost of a difference of 1 m/s to the velocity that is asked for."""
    control_cost: float = Field(0.05, ge=0)
    """Cost of the squared action."""
    holdout: bool = True
    """Keep a fifth of the velocities, in six bands, for `split = "test"`; false: all of them on both sides."""


class HalfCheetahVel(TaskEnv):
    """One attempt of one cheetah; `retry` begins another at the same velocity."""

    about = "Run at a hidden velocity that only the reward tells"

    def __init__(self, settings: HalfCheetahVelSettings) -> None:
        self.settings = settings
        self.horizon = settings.attempt_steps
        self.splits = "a fifth of the velocities is held out" if settings.holdout else "all velocities on both sides"
        self._cheetah = HalfCheetahEnv()
        space = self._cheetah.observation_space
        self.observation_space = Box(-np.inf, np.inf, space.shape, np.float32)
        self.action_space = self._cheetah.action_space
        self.velocity, self._named, self._time = 0.0, None, 0  # type: float, float | None, int

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        drawn = draw_velocity(self.np_random, self.settings, self.split)
        self.velocity = drawn if self._named is None else self._named
        self.task = _name(self.velocity)
        self.outcome, self._time = NOTHING, 0
        observation, info = self._cheetah.reset(seed=int(self.np_random.integers(2**31)))
        return observation, info

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        s = self.settings
        observation, _, terminated, _, info = self._cheetah.step(action)
        error = abs(info["x_velocity"] - self.velocity)
        reward = -s.velocity_weight * error - s.control_cost * float(np.square(action).sum())
        self._time += 1
        over = self._time == s.attempt_steps
        self.outcome = FAILED if over else NOTHING
        return observation, reward, terminated, over, {"velocity_error": error, **info}

    def retry(self, seed: int) -> Any:
        self._time = 0
        return self._cheetah.reset()[0]

    def play(self, task: str) -> None:
        key, _, value = task.partition("=")
        if key != "velocity" or not 0 <= float(value) <= self.settings.max_velocity or task != _name(float(value)):
            raise ValueError("tasks are called velocity=0.123456")
        self._named = float(value)

    def close(self) -> None:
        self._cheetah.close()


def draw_velocity(rng: np.random.Generator, settings: HalfCheetahVelSettings, split: str) -> float:
    """The velocity of one episode, of one side of the split."""
    highest = int(settings.max_velocity * _PARTS)
    if not settings.holdout:
        return int(rng.integers(highest + 1)) / _PARTS
    bands = [band for band in range(BANDS) if (band % EVERY == TEST_BAND) == (split == "test")]
    band = bands[int(rng.integers(len(bands)))]
    return int(rng.integers(highest * band // BANDS, highest * (band + 1) // BANDS)) / _PARTS


def _name(velocity: float) -> str:
    return f"velocity={velocity:.6f}"


def settings_model(name: str) -> type[SettingsModel]:
    return HalfCheetahVelSettings


def make(name: str, settings: HalfCheetahVelSettings, *, num_envs: int, seed: int, split: str) -> Env:
    return GymnasiumEnv(
        name,
        lambda: with_attempts(HalfCheetahVel(settings), settings.attempts, terminates=False),
        num_envs=num_envs,
        seed=seed,
        split=split,
    )
