"""Evaluations play each kind of task, such as a game, as often as any other."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.config.settings import EvaluateSettings
from pipelines.envs.gymnasium_env import GymnasiumEnv
from pipelines.envs.make import make
from pipelines.envs.task_env import NOTHING, SOLVED, TaskEnv, repeat_attempts
from pipelines.envs.workers import WorkerEnv
from pipelines.learning import checkpoint as checkpoints
from pipelines.rollout.environment import make_evaluation_env
from pipelines.rollout.plan import EvaluationPlan
from pipelines.stages import collect, evaluate, train
from tests.stages.recipes import tiny
from tests.tiers import examples

GAMES = tuple("abcdefg")


class ManyGames(TaskEnv):
    """One of seven games, drawn, and a level, drawn too. An episode is two steps."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)
    horizon = 2
    kinds = GAMES

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        drawn, level = GAMES[self.np_random.integers(len(GAMES))], int(self.np_random.integers(1_000_000))
        self.task, self.outcome, self._time = f"{(options or {}).get('kind', drawn)}/{level}", NOTHING, 0
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._time += 1
        self.outcome = SOLVED if self._time == 2 else NOTHING
        return np.ones(2, np.float32), float(action), self._time == 2, False, {}


def many_games() -> gymnasium.Env:
    """Return two attempts at a game, as a user's module names it."""
    return repeat_attempts(ManyGames(), 2)


def tasks_of(env: Any, episodes: int) -> list[str]:
    """Return the tasks of the first episodes, in their order."""
    found: list[str] = []
    while len(found) < episodes:
        env.reset()
        found += env.tasks(np.arange(env.num_envs))
    env.close()
    return found[:episodes]


def build(actors: int, seed: int = 0, split: str = "test") -> GymnasiumEnv:
    return GymnasiumEnv("games", many_games, num_envs=actors, seed=seed, split=split)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 99))
@examples(20)
def test_each_kind_is_played_as_often_as_any_other(episodes: int, actors: int, seed: int) -> None:
    """With fewer episodes than kinds, none is played twice; levels are those that the seed draws in any case."""
    even = build(actors, seed)
    even.play_evenly()
    found = tasks_of(even, episodes)
    counts = Counter(task.partition("/")[0] for task in found)
    times = [counts[game] for game in GAMES]
    assert max(times) - min(times) <= 1
    drawn = tasks_of(build(actors, seed), episodes)
    assert [task.partition("/")[2] for task in found] == [task.partition("/")[2] for task in drawn]


def test_the_order_follows_from_seed_and_split_alone() -> None:
    def order(actors: int, seed: int, split: str = "test") -> list[str]:
        env = build(actors, seed, split)
        env.play_evenly()
        return tasks_of(env, 14)

    assert order(1, 5) == order(4, 5)
    assert len({tuple(order(1, seed, split)) for seed in range(3) for split in ("train", "test")}) == 6


def test_named_tasks_and_training_are_left_as_they_are() -> None:
    assert len(Counter(task[0] for task in tasks_of(build(1), 14))) < 7  # drawn with replacement
    plain = make("tmaze", num_envs=4, seed=3)
    even = make("tmaze", num_envs=4, seed=3)
    even.play_evenly()
    assert tasks_of(plain, 12) == tasks_of(even, 12)


@pytest.mark.system
def test_workers_play_evenly_too() -> None:
    name = "tests.envs.test_play_evenly:many_games"
    there = WorkerEnv(name, num_envs=6, workers=2, seed=5, split="test", params={})
    there.play_evenly()
    here = make(name, num_envs=6, seed=5, split="test")
    here.play_evenly()
    assert tasks_of(there, 18) == tasks_of(here, 18)


@pytest.mark.system
def test_an_evaluation_and_its_videos_play_evenly(tmp_path: Path) -> None:
    env = {"name": "tests.envs.test_play_evenly:many_games"}
    settings = tiny(env=env, collect={"steps": 64}, evaluate={"episodes": 14, "actors": 3})
    collect.run(settings, run=tmp_path / "run")
    train.run(settings, run=tmp_path / "run", lakes=[(tmp_path / "run/lake", 1.0)])
    every = settings.model_copy(update={"evaluate": settings.evaluate.model_copy(update={"tasks": ""})})
    report = evaluate.play(EvaluationPlan(settings=every, checkpoint=checkpoints.load(tmp_path / "run/checkpoints")))
    assert report["metrics"]["episodes"] == 14
    judged = make_evaluation_env(settings.env, EvaluateSettings(), actors=3)
    assert set(Counter(task[0] for task in tasks_of(judged, 14)).values()) == {2}
