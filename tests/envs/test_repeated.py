"""Episodes that are repeated at their task, compared with an environment that has attempts of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pipelines.envs.env import ActorsFailed, Env, EnvFailure, EnvSpec, StepResult
from pipelines.envs.make import make
from pipelines.envs.repeated import Repeated
from pipelines.envs.workers import WorkerEnv
from pipelines.lake.spaces import Discrete, Spaces

ROOM = {"name": "dark-room", "size": 5, "attempt_steps": 4, "attempts": 1}


@contextlib.contextmanager
def repeated(times: int, *, name: str, workers: int = 0, **params: Any) -> Iterator[Env]:
    options: dict[str, Any] = {"num_envs": 6, "seed": 3, "params": params, "attempts": times}
    env = WorkerEnv(name, workers=workers, **options) if workers else make(name, **options)
    with contextlib.closing(env):
        yield env


@pytest.mark.system
@pytest.mark.parametrize("workers", [0, 2])
def test_it_plays_as_an_environment_with_attempts_of_its_own(workers: int) -> None:
    own = make("dark-room", num_envs=6, seed=3, params={"size": 5, "attempt_steps": 4, "attempts": 3})
    with repeated(3, workers=workers, **ROOM) as env:
        assert (env.spec.horizon, env.spec.num_attempts) == (own.spec.horizon, own.spec.num_attempts) == (12, 3)
        assert env.spec.random_return == pytest.approx(own.spec.random_return)
        assert env.spec.random_success == pytest.approx(own.spec.random_success)
        rng = np.random.default_rng(0)
        for _ in range(2):
            np.testing.assert_array_equal(env.reset()["obs"], own.reset()["obs"])
            assert env.tasks(np.arange(6)) == own.tasks(np.arange(6))
            for _ in range(12):
                actions = rng.integers(5, size=6)
                found, expected = env.step(actions), own.step(actions)
                np.testing.assert_array_equal(found.observation["obs"][:, :2], expected.observation["obs"][:, :2])
                for field in ("reward", "terminated", "truncated", "reset", "attempt_end", "success"):
                    np.testing.assert_array_equal(getattr(found, field), getattr(expected, field), err_msg=field)


@pytest.mark.system
def test_chance_is_another_one_in_each_attempt() -> None:
    found = []
    for workers in (0, 2):
        with repeated(3, name="bandit", workers=workers, arms=2, steps=40) as env:
            for _ in range(2):
                env.reset()
                tasks = env.tasks(np.arange(6))
                found.append(np.stack([env.step(np.zeros(6, dtype=np.int32)).reward for _ in range(120)]))
                assert env.tasks(np.arange(6)) == tasks
    np.testing.assert_array_equal(found[:2], found[2:])  # workers change nothing
    attempts = [attempt for episode in found[:2] for attempt in np.split(episode, 3)]
    assert len({attempt.tobytes() for attempt in attempts}) == 6
    with repeated(1, name="bandit", arms=2, steps=40) as env:  # the first attempt is the episode itself
        env.reset()
        np.testing.assert_array_equal(attempts[0], [env.step(np.zeros(6, dtype=np.int32)).reward for _ in range(40)])


def play(env: Env, episodes: int) -> list[tuple[str, list[int], float]]:
    """Task, lengths of the attempts and return of each episode of actor 0, by a fixed plan of actions."""
    env.reset()
    played: list[tuple[str, list[int], float]] = []
    lengths, clock, total = list[int](), 0, 0.0
    while len(played) < episodes:
        result = env.step(np.full(env.num_envs, clock % 3))
        clock, total = clock + 1, total + float(result.reward[0])
        if result.attempt_end[0]:
            lengths, clock = [*lengths, clock], 0
        over = result.terminated | result.truncated
        if over[0]:
            played.append((env.tasks(np.array([0]))[0], lengths, total))
            lengths, total = [], 0.0
        if over.any():
            env.reset(over)
    return played


@pytest.mark.system
@pytest.mark.parametrize("workers", [0, 2])
def test_attempts_repeat_their_episode_and_the_next_episode_is_another(workers: int) -> None:
    name = "tests.envs.breaking:Walk"
    with repeated(1, name=name, workers=workers) as env:
        once = play(env, 4)
    with repeated(3, name=name, workers=workers) as env:
        thrice = play(env, 4)
    assert [(task, 3 * lengths, pytest.approx(3 * total)) for task, lengths, total in once] == thrice


def test_named_tasks_are_repeated() -> None:
    with repeated(2, **ROOM) as env:
        env.play_only(["goal=0,1", "goal=4,4"])
        env.reset()
        for _ in range(3):
            assert env.tasks(np.arange(6)) == ["goal=0,1", "goal=4,4"] * 3
            for _ in range(8):
                result = env.step(np.zeros(6, dtype=np.int32))
            env.reset(result.terminated)


class Counter(Env):
    """Three actors that count up to 2; `broken` calls of `reset` fail for actor 1."""

    spec = EnvSpec(name="counter", spaces=Spaces(observation={"n": Discrete(n=3)}, action=Discrete(n=2)), horizon=2)
    broken: tuple[int, ...] = ()
    resets = 0
    count = np.zeros(3, dtype=np.int32)

    def reset(self, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        indices = np.arange(3) if mask is None else np.flatnonzero(mask)
        self.episodes.advance(indices)
        self.count = self.count.copy()
        self.count[indices] = 0
        self.resets += 1
        if self.resets in self.broken:
            raise ActorsFailed([EnvFailure(actors=(1,), message="cannot begin")], {"n": self.count})
        return {"n": self.count}

    def step(self, actions: np.ndarray) -> StepResult:
        self.count = self.count + 1
        nobody, over = np.zeros(3, dtype=bool), self.count == 2
        result = StepResult({"n": self.count}, np.ones(3, "f4"), nobody, over, nobody, nobody, nobody)
        if self.resets == -1:
            raise ActorsFailed([EnvFailure(actors=(2,), message="broke")], result)
        return result

    def tasks(self, indices: np.ndarray) -> list[str]:
        return [str(self.episodes.current[i]) for i in indices]


def test_an_attempt_that_cannot_begin_costs_only_its_actor() -> None:
    inner = Counter(num_envs=3)
    inner.broken = (2,)
    env = Repeated(inner, 2)
    env.reset()
    env.step(np.zeros(3))
    with pytest.raises(ActorsFailed, match="cannot begin") as caught:
        env.step(np.zeros(3))
    assert [failure.actors for failure in caught.value.failures] == [(1,)]
    brought = caught.value.brought
    assert brought.reset[[0, 2]].all()
    assert brought.attempt_end.all()
    assert not brought.truncated[[0, 2]].any()
    env.reset(np.array([False, True, False]))
    assert env.tasks(np.arange(3)) == ["0", "4", "2"]
    env.step(np.zeros(3))
    result = env.step(np.zeros(3))
    assert result.truncated.tolist() == [True, False, True]
    assert result.reset.tolist() == [False, True, False]


def test_an_actor_that_fails_in_a_step_does_not_begin_another_attempt() -> None:
    inner = Counter(num_envs=3)
    env = Repeated(inner, 2)
    env.reset()
    env.step(np.zeros(3))
    inner.resets = -1
    with pytest.raises(ActorsFailed, match="broke") as caught:
        env.step(np.zeros(3))
    assert caught.value.brought.reset.tolist() == [True, True, False]
    assert inner.count.tolist() == [0, 0, 2]
