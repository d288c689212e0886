"""Environments with chosen tasks: the same as when they had drawn them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipelines.envs.env import Env
from pipelines.envs.make import make
from pipelines.errors import InputMissing

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("meta-frozen-lake", {"size": 4, "attempts": 2}),
    ("meta-frozen-lake", {"size": 5, "attempts": 2, "hard": True}),
    ("goal-frozen-lake", {"size": 4}),
    ("dark-key-door", {"size": 5, "horizon": 40}),
    ("dark-key-door", {"size": 4, "horizon": 40, "shuffle_actions": True}),
    ("tmaze", {"corridor": 4}),
    ("tmaze", {"corridor": 4, "variant": "active"}),
    ("mazerunner", {"size": 9}),
    ("mazerunner", {"size": 9, "goals": 1, "shuffle_actions": True}),
    ("alchemy", {"trials": 2}),
]
KIND = pytest.mark.parametrize(("name", "params"), KINDS)


def built(name: str, params: dict[str, Any], *, num_envs: int = 4, seed: int = 0) -> Env:
    return make(name, num_envs=num_envs, seed=seed, params=params)


@KIND
def test_tasks_are_played_in_turn(name: str, params: dict[str, Any]) -> None:
    drawn = built(name, params, num_envs=8, seed=3)
    drawn.reset()
    wanted = list(dict.fromkeys(drawn.tasks(np.arange(8))))[:3]
    told = built(name, params, num_envs=5, seed=9)
    told.play_only(wanted)
    for first in (0, 5):
        told.reset()
        assert told.tasks(np.arange(5)) == [wanted[(first + actor) % len(wanted)] for actor in range(5)]


@KIND
def test_a_task_that_was_named_is_the_one_that_was_drawn(name: str, params: dict[str, Any]) -> None:
    """The same actions have the same consequences (what is random in a step depends on seed and episode alone)."""
    drawn = built(name, params)
    told = built(name, params)
    drawn.reset()
    told.play_only(drawn.tasks(np.arange(4)))
    drawn = built(name, params)
    left, right = drawn.reset(), told.reset()
    rng = np.random.default_rng(0)
    for _ in range(12):
        for key, values in left.items():
            np.testing.assert_array_equal(right[key], values)
        actions = rng.integers(0, drawn.spec.spaces.action.n, 4)  # type: ignore[union-attr]
        one, two = drawn.step(actions), told.step(actions)
        np.testing.assert_array_equal(one.reward, two.reward)
        np.testing.assert_array_equal(one.success, two.success)
        over = one.terminated | one.truncated
        np.testing.assert_array_equal(over, two.terminated | two.truncated)
        if over.any():
            break
        left, right = one.observation, two.observation


@pytest.mark.parametrize(
    ("name", "params", "task"),
    [
        ("meta-frozen-lake", {"size": 4}, ".../..#/..."),
        ("meta-frozen-lake", {"size": 4}, "..../..../..../.... swapped"),
        ("meta-frozen-lake", {"size": 2}, "#./.."),
        ("goal-frozen-lake", {"size": 2}, "../.."),
        ("dark-key-door", {"size": 3}, "start=0,0 key=1,1 door=3,3"),
        ("dark-key-door", {"size": 3}, "start=0,0 key=1,1"),
        ("dark-key-door", {"size": 3, "shuffle_actions": True}, "start=0,0 key=1,1 door=2,2 moves=00000"),
        ("tmaze", {}, "goal=2"),
        ("tmaze", {}, ""),
        ("mazerunner", {"size": 9}, "#########/#########"),
        ("mazerunner", {"size": 9}, ""),
        ("alchemy", {}, "graph=../../.. stones=+++ turn=4 potions=012+++"),
        ("alchemy", {}, "graph=++/++/++ stones=+++ turn=0 potions=012+++"),
    ],
)
def test_what_is_no_task_is_refused(name: str, params: dict[str, Any], task: str) -> None:
    with pytest.raises(InputMissing, match="not a task of environment"):
        built(name, params).play_only([task])


def test_an_environment_without_named_tasks_says_so() -> None:
    env = built("gym:CartPole-v1", {})
    env.play_only(["gym:CartPole-v1"])
    with pytest.raises(InputMissing, match="does not let its tasks be chosen"):
        env.play_only(["another"])
