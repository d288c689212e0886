"""A single environment that knows about tasks, attempts and success.

gymnasium's interface cannot express three things that meta-reinforcement learning depends on: the task of an episode,
the end of an attempt (and its success) within the episode, and the agent's instructions. A suite writes one `TaskEnv`;
`GymnasiumEnv` makes a batch of them. `Attempts` makes one episode of several attempts at one task.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np

from pipelines.config.base import SettingsModel
from pipelines.envs.env import Score
from pipelines.errors import UsageError


@dataclass(frozen=True, slots=True)
class Outcome:
    """The meaning of a step. `reset`: the observation shows a start inside the same episode; `attempt_end`: an attempt
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

    `num_attempts`: attempts in every episode (None: their number varies). `horizon`: most steps of an episode. `task`:
    name of the current episode's task. `goal_text`: the instruction, in words; None: the first observed text. `kinds`:
    kinds of tasks that are drawn equally often, such as games; `reset` with the option `kind` draws a task of that one.
    `outcome`: of the latest step; `reset` must set it to NOTHING. An environment with `has_success` ends its last
    attempt with its episode. `achievements`: what an episode may achieve; `achieved`: which of it this episode has.
    `score`: see `EnvSpec`. One of our suites declares the model of its parameters, `Settings`, and makes a batch of
    itself in `make`, as `Env.make` does.
    """

    Settings: ClassVar[type[SettingsModel]]
    num_attempts: int | None = 1
    has_success: bool = False
    horizon: int | None = None
    about: str = ""
    splits: str = "separate seeds"
    achievements: tuple[str, ...] = ()
    score: Score | None = None
    kinds: tuple[str, ...] = ()

    split: str
    task: str
    goal_text: str | None = ""
    outcome: Outcome = NOTHING
    achieved: Sequence[bool] = ()

    def drawn(self, mode: str) -> Any:
        """Return the drawing of the present state in a mode of gymnasium ("rgb_array", "ansi"); None if there is none.
        By default that of `render`, in its one `render_mode`.
        """
        return self.render() if self.render_mode == mode else None

    @abstractmethod
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode of the task that `seed` draws, or of the one that `play` named. Call this one first: it
        seeds `self.np_random`.
        """
        return super().reset(seed=seed)

    def retry(self, seed: int) -> Any:
        """Begin another attempt at the current task; return its first observation. `seed` is that of the episode."""
        return self.reset(seed=seed)[0]

    def play(self, task: str) -> None:
        """Play the task of this name from the next reset on, whatever the seed; other draws still follow the seed.

        ValueError where there is no such task; NotImplementedError where tasks cannot be named.
        """
        raise NotImplementedError


def repeat_attempts(
    env: gymnasium.Env, attempts: int, *, pause: bool = False, terminates: bool = True
) -> gymnasium.Env:
    """Wrap `env` in `Attempts`; one attempt is `env` itself."""
    return env if attempts == 1 else Attempts(env, attempts, pause=pause, terminates=terminates)


class Attempts(TaskEnv):
    """An episode of `attempts` episodes of `env`, all at the task that the seed draws.

    A `TaskEnv` begins each further attempt by `retry`; any other environment is reset with the episode's seed, which is
    its task, named `LABEL/SEED`. The step that ends an attempt shows the start of the next one; with `pause`, it shows
    its own end, and one more step, whose action is ignored, shows that start. The last attempt's end terminates the
    episode, or has the flags of `env` itself (not `terminates`).

    `show`: adds an observation `attempt` of two numbers, 1 at the start of an attempt (else 0) and the share of
    attempts finished. `success_key`, `limit` (of steps) and `about`: of an environment that is not a TaskEnv.
    """

    def __init__(
        self,
        env: gymnasium.Env,
        attempts: int,
        *,
        pause: bool = False,
        terminates: bool = True,
        show: bool = False,
        label: str = "",
        success_key: str | None = None,
        limit: int | None = None,
        about: str = "",
    ) -> None:
        self.env, self.num_attempts, self._attempts = env, attempts, attempts
        self._pause, self._terminates, self._show = pause, terminates, show
        self._label, self._success_key = label, success_key
        self._seed, self._finished, self._between = 0, 0, False
        self._named: int | None = None
        self.action_space = env.action_space
        self.observation_space = space = env.observation_space
        if show:
            parts = dict(space.spaces) if isinstance(space, gymnasium.spaces.Dict) else {"observation": space}
            if "attempt" in parts:
                raise UsageError(
                    f"environment '{label}': its observation already has a part 'attempt'",
                    hint="rename it, or leave env.attempts",
                )
            parts["attempt"] = gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)
            self.observation_space = gymnasium.spaces.Dict(parts)
        if limit is None:
            limit = env.horizon if isinstance(env, TaskEnv) else env.spec.max_episode_steps if env.spec else None
        self.horizon = None if limit is None else attempts * limit + (attempts - 1) * pause
        if isinstance(env, TaskEnv):
            self.has_success, self.splits, self.score, self.kinds = env.has_success, env.splits, env.score, env.kinds
            self.about = env.about
        else:
            self.has_success = success_key is not None
            self.about = f"{about} ({attempts} attempts at each seed)".strip()

    @property
    def split(self) -> str:
        return self._split

    @split.setter
    def split(self, split: str) -> None:
        self._split = split
        if isinstance(self.env, TaskEnv):
            self.env.split = split

    @property
    def task(self) -> str:  # type: ignore[override]
        return self.env.task if isinstance(self.env, TaskEnv) else f"{self._label}/{self._seed}"

    @property
    def goal_text(self) -> str | None:  # type: ignore[override]
        return self.env.goal_text if isinstance(self.env, TaskEnv) else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._seed = int(self.np_random.integers(2**31)) if seed is None else seed
        if self._named is not None:
            self._seed = self._named
        self._finished, self._between, self.outcome = 0, False, NOTHING
        observation, info = self.env.reset(seed=self._seed, options=options)
        return self._add_attempt(observation, begins=True), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._between:
            self._between, self.outcome = False, Outcome(reset=True)
            return self._add_attempt(self._retry(), begins=True), 0.0, False, False, {}
        observation, paid, terminated, truncated, info = self.env.step(action)
        if not (terminated or truncated):
            self.outcome = NOTHING
            return self._add_attempt(observation), float(paid), False, False, info
        success = self._read_success(info)
        self._finished += 1
        last = self._finished == self._attempts
        again = not (last or self._pause)
        self._between = self._pause and not last
        self.outcome = Outcome(reset=again, attempt_end=True, success=success)
        shown = self._add_attempt(self._retry() if again else observation, begins=again)
        return shown, float(paid), bool(last and (terminated or self._terminates)), bool(last and truncated), info

    def play(self, task: str) -> None:
        if isinstance(self.env, TaskEnv):
            self.env.play(task)
            return
        label, _, seed = task.rpartition("/")
        if label != self._label or not seed.isdecimal():
            raise ValueError(f"tasks are {self._label}/SEED")
        self._named = int(seed)

    def drawn(self, mode: str) -> Any:
        return draw(self.env, mode)

    def close(self) -> None:
        self.env.close()

    def _retry(self) -> Any:
        """Begin the next attempt; return its first observation."""
        if isinstance(self.env, TaskEnv):
            return self.env.retry(self._seed)
        return self.env.reset(seed=self._seed)[0]

    def _read_success(self, info: Mapping[str, Any]) -> bool:
        if isinstance(self.env, TaskEnv):
            return self.env.outcome.success
        return self._success_key is not None and read_success(info, self._success_key, name=self._label)

    def _add_attempt(self, observation: Any, *, begins: bool = False) -> Any:
        if not self._show:
            return observation
        attempt = np.array([begins, self._finished / self._attempts], dtype=np.float32)
        parts = (
            observation
            if isinstance(self.env.observation_space, gymnasium.spaces.Dict)
            else {"observation": observation}
        )
        return {**parts, "attempt": attempt}


def draw(env: gymnasium.Env, mode: str) -> Any:
    """Draw `env` in a mode of gymnasium; None where it has no such drawing."""
    if isinstance(env, TaskEnv):
        return env.drawn(mode)
    return env.render() if env.render_mode == mode else None


def read_success(info: Mapping[str, Any], key: str, *, name: str) -> bool:
    """Read `info[key]` of an attempt's last step. UsageError where there is no such key."""
    if key not in info:
        raise UsageError(
            f"environment '{name}': info has no key '{key}' at an episode's end",
            hint=f"keys there: {', '.join(map(str, info)) or 'none'}; see env.success_key",
        )
    return bool(info[key])
