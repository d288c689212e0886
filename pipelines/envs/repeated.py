"""Several episodes at one task, as one episode: how an agent is tried that learns from episode to episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipelines.envs.env import ActorsFailed, Env, EpisodeCounter, Opponent, Opponents, StepResult, Trial, try_call


class Repeated(Env):
    """Repeats each episode of `env` so that it has been played `attempts` times, as one episode of several attempts.

    An attempt repeats the number of the episode, and with it its task, seed and start. Chance within it, such as the
    rewards of a bandit or the draws of an opponent, is another one, unless it follows from the seed of an environment
    that is not built in. The step that ends an attempt shows the start of the next one (`reset`); flags of the last one
    end the episode. What `env` reports about an episode, such as its achievements, is that of the last attempt.
    """

    def __init__(self, env: Env, attempts: int) -> None:
        self._env, self._attempts, self.num_envs = env, attempts, env.num_envs  # episodes are counted by `env`
        spec = env.spec
        self.spec = replace(
            spec,
            horizon=None if spec.horizon is None else attempts * spec.horizon,
            num_attempts=None if spec.num_attempts is None else attempts * spec.num_attempts,
            about=f"{spec.about}, {attempts} times",
            random_return=None if spec.random_return is None else attempts * spec.random_return,
            random_success=None if spec.random_success is None else attempts * spec.random_success,
            # The best policy remembers the attempts before, so what it reaches is not known.
            optimal_return=None,
            optimal_success=None,
        )
        self._finished = np.zeros(env.num_envs, dtype=np.int64)

    @property
    def episodes(self) -> EpisodeCounter:
        return self._env.episodes

    @episodes.setter
    def episodes(self, counter: EpisodeCounter) -> None:
        self._env.episodes = counter

    def reset(self, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        chosen = slice(None) if mask is None else mask
        self._finished[chosen] = self.episodes.repetition[chosen] = 0
        return self._env.reset(mask)

    def step(self, actions: np.ndarray) -> StepResult:
        result, error = try_call(self._env, lambda: self._env.step(actions))
        if result is None:
            assert error is not None
            raise error
        failed = np.zeros(self.num_envs, dtype=bool)
        if error is not None:
            failed[[actor for failure in error.failures for actor in failure.actors]] = True
        over = (result.terminated | result.truncated) & ~failed
        self._finished += over
        again = over & (self._finished < self._attempts)
        observation = result.observation
        if again.any():
            self.episodes.current[again] -= self.episodes.total
            self.episodes.repetition[again] = self._finished[again]
            begun, problem = try_call(self._env, lambda: self._env.reset(again), again)
            observation = observation if begun is None else begun
            if problem is not None:
                earlier = () if error is None else error.failures
                error = ActorsFailed([*earlier, *problem.failures])
                error.__cause__ = problem.__cause__
        result = replace(
            result,
            observation=observation,
            terminated=result.terminated & ~again,
            truncated=result.truncated & ~again,
            reset=result.reset | again,
            attempt_end=result.attempt_end | over,
        )
        if error is not None:
            raise ActorsFailed(error.failures, result) from error.__cause__
        return result

    def tasks(self, indices: np.ndarray) -> list[str]:
        return self._env.tasks(indices)

    def goal_texts(self, indices: np.ndarray) -> list[str]:
        return self._env.goal_texts(indices)

    def seeds(self, indices: np.ndarray) -> Sequence[int | None]:
        return self._env.seeds(indices)

    def achieved(self, indices: np.ndarray) -> np.ndarray:
        return self._env.achieved(indices)

    def play_against(self, opponents: Opponents) -> None:
        self._env.play_against(opponents)

    def make_rule_opponent(self, name: str) -> Opponent | None:
        return self._env.make_rule_opponent(name)

    def opponents(self, indices: np.ndarray) -> list[str]:
        return self._env.opponents(indices)

    def outcomes(self, indices: np.ndarray) -> np.ndarray:
        return self._env.outcomes(indices)

    def play_only(self, tasks: Sequence[str]) -> None:
        self._env.play_only(tasks)

    def play_evenly(self) -> None:
        self._env.play_evenly()

    @property
    def steps_one_by_one(self) -> bool:
        return self._env.steps_one_by_one

    def try_out(self, longest: float = 0.0) -> Trial | None:
        return self._env.try_out(longest)

    def render(self, mode: str = "rgb_array", actor: int = 0) -> Any:
        return self._env.render(mode, actor)

    @property
    def has_expert(self) -> bool:
        return self._env.has_expert

    def expert(self) -> np.ndarray | None:
        return self._env.expert()

    def close(self) -> None:
        self._env.close()
