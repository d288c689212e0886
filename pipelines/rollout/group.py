"""Actors that step together, and what is known of their unfinished episodes."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pipelines.envs.env import ActorsFailed, Env, Failure, StepResult
from pipelines.errors import AmagoError
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import zeros
from pipelines.rollout.recorder import Recorder

_FIRST_ROWS = 1024


class Group:
    """The actors of one part of an environment, which are at `place` among all actors of a rollout.

    `time` counts the steps of each actor's episode, 0 where there is nothing to lose. `strikes`: failures in a row of
    each actor's environment. `pending`: executed actions whose step has begun, and the exploration rate in them.
    """

    def __init__(self, env: Env, place: slice, *, recorded: bool) -> None:
        self.env, self.place = env, place
        n, spaces = env.num_envs, env.spec.spaces
        self.recorder: Recorder | None = None
        if recorded:
            rows = min(2 * (env.spec.horizon or _FIRST_ROWS) + 2, _FIRST_ROWS)
            self.recorder = Recorder(Schema(spaces), n, rows=rows)
        self.observation: Mapping[str, np.ndarray] | None = None
        self.action = zeros(spaces.action, (n,))
        self.reward = np.zeros(n, dtype=np.float32)
        self.time = np.zeros(n, dtype=np.int64)
        self.total, self.epsilon, self.began = np.zeros((3, n))
        self.attempts: list[list[bool]] = [[] for _ in range(n)]
        self.strikes = np.zeros(n, dtype=np.int64)
        self.pending: tuple[np.ndarray, np.ndarray | float] | None = None
        self._floats = [name for name, space in spaces.observation.items() if space.dtype.startswith("float")]

    def tried(self, call: Callable[[], Any], mask: np.ndarray | None = None) -> tuple[Any, ActorsFailed | None]:
        """What `call` of the environment brings and what failed. An exception of the environment as a whole is a
        failure of all actors (in `mask`), who bring nothing.
        """
        try:
            return call(), None
        except ActorsFailed as error:
            return error.brought, error
        except AmagoError:
            raise
        except Exception as error:
            actors = range(self.env.num_envs) if mask is None else np.flatnonzero(mask).tolist()
            message = f"environment '{self.env.spec.name}' failed: {type(error).__name__}: {error}"
            trace = "".join(traceback.format_exception(error))
            failed = ActorsFailed([Failure(actors=tuple(actors), message=message, trace=trace)])
            failed.__cause__ = error
            return None, failed

    def begin(self, actors: np.ndarray, observation: Mapping[str, np.ndarray]) -> None:
        """Episodes of `actors` (m,) begin with their rows of `observation` (N, ...)."""
        self.observation = observation
        if self.recorder is not None:
            self.recorder.begin(actors, observation)
        self.action, self.reward = self.action.copy(), self.reward.copy()  # the policy may have kept them
        for state in (self.action, self.reward, self.time, self.total, self.epsilon):
            state[actors] = 0
        self.began[actors] = time.time()
        for actor in actors.tolist():
            self.attempts[actor] = []

    def add(self, actions: np.ndarray, result: StepResult, epsilon: np.ndarray | float) -> None:
        """A step of everybody."""
        if self.recorder is not None:
            self.recorder.add(
                result.observation, actions, result.reward, result.terminated, result.truncated, result.reset
            )
        self.observation, self.action, self.reward = result.observation, actions, result.reward
        self.time += 1
        self.total += result.reward
        self.epsilon += epsilon
        for actor in np.flatnonzero(result.attempt_end).tolist():
            self.attempts[actor].append(bool(result.success[actor]))

    def drop(self, actors: np.ndarray) -> int:
        """Forget the episodes of `actors`; how many steps they had."""
        lost = int(self.time[actors].sum())
        self.time[actors] = 0
        return lost

    def not_finite(self, result: StepResult) -> list[Failure]:
        """Rewards and observations that are no numbers."""
        found = []
        columns = {"reward": result.reward} | {name: result.observation[name] for name in self._floats}
        for name, column in columns.items():
            if np.isfinite(column).all():
                continue
            for actor in np.flatnonzero(~np.isfinite(column.reshape(len(column), -1)).all(1)).tolist():
                value = column[actor] if column.ndim == 1 else "that is not finite"
                message = (
                    f"environment '{self.env.spec.name}' gave {name} {value} (actor {self.place.start + actor}, "
                    f"step {self.time[actor] + 1} of episode {self.env.episodes.current[actor]})"
                )
                found.append(Failure(actors=(actor,), message=message))
        return found


class Joined:
    """What a policy sees of several groups at once."""

    def __init__(self, groups: Sequence[Group]) -> None:
        names = list(groups[0].observation or ())
        self.observation: Mapping[str, np.ndarray] | None = {
            name: np.concatenate([group.observation[name] for group in groups if group.observation is not None])
            for name in names
        }
        self.action, self.reward, self.time = (
            np.concatenate([getattr(group, name) for group in groups]) for name in ("action", "reward", "time")
        )
