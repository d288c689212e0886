"""A single environment that knows about tasks, attempts and success.

gymnasium's interface has no words for the three things that meta-reinforcement learning turns on: which task an
episode is in, that an attempt ended (and how) while the episode goes on, and what the agent was told to do. Suites
write one `TaskEnv`; `GymnasiumEnv` makes a batch of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium

from pipelines.envs.env import Score


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step meant. `reset`: the observation shows a start inside the same episode; `attempt_end`: an attempt
    ended with this step; `success`: and it succeeded.
    """

    reset: bool = False
    attempt_end: bool = False
    success: bool = False


NOTHING = Outcome()
FAILED = Outcome(attempt_end=True)
SOLVED = Outcome(attempt_end=True, success=True)


class TaskEnv(gymnasium.Env):
    """One environment with tasks. `reset(seed=s)` draws the task from s and from `self.split` alone, then plays it.

    `num_attempts`: attempts in every episode (None: their number varies). `horizon`: most steps of an episode.
    `task`: name of the present episode's task. `goal_text`: what is asked, in words; None: the first text that is
    observed. `outcome`: of the latest step; `reset` must set it to NOTHING. An environment with `has_success` ends its
    last attempt with its episode. `achievements`: what an episode may achieve; `achieved`: which of it this episode
    has. `score`: see `EnvSpec`.
    """

    num_attempts: int | None = 1
    has_success: bool = False
    horizon: int | None = None
    about: str = ""
    splits: str = "separate seeds"
    achievements: tuple[str, ...] = ()
    score: Score | None = None

    split: str
    task: str
    goal_text: str | None = ""
    outcome: Outcome = NOTHING
    achieved: Sequence[bool] = ()

    @abstractmethod
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode of the task that `seed` draws, or of the one that `play` named. Call this one first: it
        seeds `self.np_random`.
        """
        return super().reset(seed=seed)

    def retry(self, seed: int) -> Any:
        """Begin another attempt at the present task; its first observation. `seed` is that of the episode (see
        `envs.attempts`, which makes k attempts of an environment that has one).
        """
        return self.reset(seed=seed)[0]

    def play(self, task: str) -> None:
        """From the next reset on play the task of this name, whatever the seed; its other draws come from the seed.

        ValueError where there is no such task; NotImplementedError where tasks cannot be named.
        """
        raise NotImplementedError
