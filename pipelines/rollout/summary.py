"""What a rollout tells: of each episode that ended, and of all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A finished episode. `number` counts over all actors (see `envs.env`); `success`: of the last attempt.
    `attempts`: success of each, `attempt_returns` the sum of its rewards. `achieved`: which of the environment's
    achievements it had, bool.
    """

    actor: int
    number: int
    task: str
    length: int
    total_reward: float
    success: bool | None
    attempts: tuple[bool, ...]
    attempt_returns: tuple[float, ...] = ()
    achieved: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))


@dataclass(kw_only=True)
class Tally:
    """How many episodes ended, and sums over them."""

    episodes: int = 0
    returns: float = 0.0
    successes: int = 0

    def add(self, more: Tally) -> None:
        self.episodes += more.episodes
        self.returns += more.returns
        self.successes += more.successes

    @property
    def return_mean(self) -> float:
        return self.returns / self.episodes if self.episodes else math.nan

    @property
    def success_mean(self) -> float:
        return self.successes / self.episodes if self.episodes else math.nan


@dataclass(frozen=True, kw_only=True)
class RolloutStats:
    """What one call of `run` did. Means are over the episodes that ended in it (nan: none did); `epsilon` is the mean
    exploration rate over its steps.
    """

    steps: int
    trajectories: int
    return_mean: float
    success_mean: float
    epsilon: float
    seconds: float
    env_seconds: float
    policy_seconds: float
    env_errors: int
    episodes_dropped: int

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.seconds if self.seconds else 0.0
