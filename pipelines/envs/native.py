"""Built-in environments: all actors' state in arrays, tasks from `Draws`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipelines.envs.env import EnvSpec, EpisodeEnv, StepResult, unknown_task
from pipelines.envs.scenes import Scene


class NativeEnv(EpisodeEnv):
    """Base class of built-ins. Subclasses implement `_begin`, `_assign`, `_observe` and `step`."""

    def __init__(self, spec: EnvSpec, *, num_envs: int, seed: int, split: str) -> None:
        super().__init__(spec.name, num_envs=num_envs, seed=seed, split=split)
        self.spec = spec
        self._named: tuple[str, ...] = ()

    def reset(self, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        indices, episodes = self._advance(mask)
        self._begin(indices, episodes)
        for actor, episode in zip(indices.tolist(), episodes.tolist(), strict=True) if self._named else ():
            self._assign(actor, self._named[episode % len(self._named)])
        return self._observe()

    def play_only(self, tasks: Sequence[str]) -> None:
        self._begin(np.arange(1), np.zeros(1, dtype=np.int64))
        for name in tasks:
            try:
                self._assign(0, name)
                known = self.tasks(np.arange(1))[0]
            except (ValueError, IndexError) as error:
                raise unknown_task(name, self.spec.name) from error
            if known != name:
                raise unknown_task(name, self.spec.name)
        self._named = tuple(tasks)

    @abstractmethod
    def _begin(self, indices: np.ndarray, episodes: np.ndarray) -> None:
        """Draw the tasks of `episodes` (m,) and put the actors `indices` (m,) at their starts."""

    @abstractmethod
    def _assign(self, actor: int, task: str) -> None:
        """Give an actor that has just begun the task of this name. ValueError or IndexError if there is none."""

    def render(self, mode: str = "rgb_array", actor: int = 0) -> Any:
        scene = self._scene(actor)
        return None if scene is None else scene.text() if mode == "ansi" else scene.picture()

    def _scene(self, actor: int) -> Scene | None:
        """Return the drawing of an actor's present state."""
        return None

    @abstractmethod
    def _observe(self) -> dict[str, np.ndarray]:
        """Return observations of all actors, from the state alone, in arrays that are not written again."""


class AttemptsEnv(NativeEnv):
    """Base class of built-ins whose episode is `attempts` attempts of `attempt_steps` steps at one task.

    The last step of an attempt returns the next one's start; the last attempt terminates the episode. Observation,
    float32 (4,): the two numbers of `_place`, 1 at the start of an attempt, finished attempts / attempts. Subclasses
    call `_begin`, and `_finish` at the end of `step`; they implement `_place` and `_restart`. State: `clock` (steps in
    the attempt), `attempt` (finished ones).
    """

    def __init__(
        self, spec: EnvSpec, *, attempts: int, attempt_steps: int, num_envs: int, seed: int, split: str
    ) -> None:
        super().__init__(spec, num_envs=num_envs, seed=seed, split=split)
        self._attempts, self._attempt_steps = attempts, attempt_steps
        self.clock, self.attempt = np.zeros((2, num_envs), dtype=np.int64)
        self._fresh = np.zeros(num_envs, dtype=bool)

    def _begin(self, indices: np.ndarray, episodes: np.ndarray) -> None:
        self.clock[indices] = self.attempt[indices] = 0
        self._fresh[indices] = True

    @abstractmethod
    def _place(self) -> np.ndarray:
        """Return where the actors are: (N, 2)."""

    @abstractmethod
    def _restart(self, mask: np.ndarray) -> None:
        """Put the actors in `mask` (N,) bool back at the start of their task."""

    def _observe(self) -> dict[str, np.ndarray]:
        observation = np.empty((self.num_envs, 4), dtype=np.float32)
        observation[:, :2] = self._place()
        observation[:, 2] = self._fresh
        observation[:, 3] = self.attempt / self._attempts
        return {"obs": observation}

    def _finish(self, reward: np.ndarray, success: np.ndarray) -> StepResult:
        """Count a step in which the actors have moved. `success` (N,): whether their attempts succeed if they end."""
        self.clock += 1
        over = self.clock >= self._attempt_steps
        self.attempt += over
        terminated = self.attempt >= self._attempts
        again = over & ~terminated
        success = over & success
        self._restart(again)
        self.clock[over] = 0
        self._fresh = again.copy()
        return StepResult(
            observation=self._observe(),
            reward=reward.astype(np.float32),
            terminated=terminated,
            truncated=self._nobody,
            reset=again,
            attempt_end=over,
            success=success,
        )
