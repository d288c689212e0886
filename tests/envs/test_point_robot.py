"""Point-Robot against its rules, step by step, and its split by bands of angles."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipelines.envs.draws import BANDS, bands_of, spread
from pipelines.envs.make import make
from pipelines.errors import InputMissing
from tests.envs import contract

NAME = "point-robot"


def goal_of(name):
    return tuple(map(float, name.removeprefix("goal=").split(",")))


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(check):
    check(NAME, params={"attempts": 2, "attempt_steps": 6})


@pytest.mark.parametrize("sparse", [False, True])
def test_it_follows_its_rules(sparse):
    env = make(NAME, num_envs=1, seed=4, params={"sparse": sparse, "attempts": 2, "attempt_steps": 14})
    assert env.reset()["obs"].tolist() == [[0.0, 0.0, 1.0, 0.0]]
    goal = goal_of(env.tasks(np.arange(1))[0])
    assert math.hypot(*goal) == pytest.approx(1.0, abs=1e-5)
    assert goal[1] >= 0
    rng, place, finished, paid = np.random.default_rng(0), [0.0, 0.0], 0, 0
    for t in range(1, 29):
        action = env.expert() if t > 14 else rng.uniform(-1.5, 1.5, (1, 2)).astype(np.float32)
        result = env.step(action)
        place = [old + 0.1 * min(max(float(move), -1.0), 1.0) for old, move in zip(place, action[0], strict=True)]
        distance = math.dist(place, goal)
        expected = (1 - distance if distance <= 0.2 else 0.0) if sparse else -distance
        assert result.reward[0] == pytest.approx(expected, abs=1e-5)
        paid += sparse and expected > 0
        over, last = t % 14 == 0, t == 28
        assert (result.attempt_end[0], result.terminated[0], result.reset[0]) == (over, last, over and not last)
        assert result.success[0] == (over and distance <= 0.2)
        finished += over
        if over and not last:
            place = [0.0, 0.0]
        shown = [*place, float(over and not last), finished / 2]
        np.testing.assert_allclose(result.observation["obs"][0], shown, atol=1e-6)
    assert result.success[0]
    assert not sparse or paid


@pytest.mark.parametrize("goals", ["half-circle", "circle", "square"])
def test_bands_of_test_are_never_trained_on(goals):
    seen = {}
    for split in ("train", "test"):
        names = contract.first_tasks(NAME, 2000, seed=0, split=split, params={"goals": goals})
        x, y = np.array([goal_of(name) for name in names]).T
        whole = {"half-circle": np.pi, "circle": 2 * np.pi}
        share = (x + 1) / 2 if goals == "square" else np.arctan2(y, x) % (2 * np.pi) / whole[goals]
        inside = np.abs(share * BANDS - np.rint(share * BANDS)) > 1e-3  # not rounded over a border
        seen[split] = set(np.floor(share[inside] * BANDS).astype(int).tolist())
    assert seen == {split: set(bands_of(split).tolist()) for split in seen}


def test_all_goals_are_on_both_sides_in_the_papers_protocol():
    names = contract.first_tasks(NAME, 1000, seed=0, split="test", params={"protocol": "paper"})
    angles = np.array([math.atan2(*reversed(goal_of(name))) for name in names])
    assert set(np.floor(angles / np.pi * BANDS).clip(0, BANDS - 1).astype(int)) == set(range(BANDS))


def test_shares_are_spread_evenly_over_the_bands_of_a_side():
    found = spread((np.arange(60_000) + 0.5) / 60_000, "test")
    counts = np.bincount((found * BANDS).astype(int), minlength=BANDS)
    assert counts[bands_of("test")].tolist() == [10_000] * 6
    assert counts.sum() == 60_000


def test_wrong_goals_are_refused():
    env = make(NAME, num_envs=1, seed=0)
    for wrong in ("goal=2.000000,0.000000", "goal=0.1", "goal=0.10,0.20", "here"):
        with pytest.raises(InputMissing, match="is not a task"):
            env.play_only([wrong])
