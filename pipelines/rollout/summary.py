"""What a rollout tells: of each episode that ended, and of all of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A finished episode. `number` counts over all actors (see `envs.env`); `success`: of the last
    attempt.
    """

    actor: int
    number: int
    task: str
    length: int
    total_reward: float
    success: bool | None
    attempts: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class RolloutStats:
    """What one call of `run` did. Means are over the episodes that ended in it (nan: none did)."""

    steps: int
    trajectories: int
    return_mean: float
    success_mean: float
    seconds: float
    env_seconds: float
    policy_seconds: float
    env_errors: int
    episodes_dropped: int

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.seconds if self.seconds else 0.0
