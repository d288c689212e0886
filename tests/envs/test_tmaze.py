"""The T-Maze equals a literal one; its optimum is what the rules say."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.envs.make import make
from tests.envs.literal import LiteralTMaze, assert_equal


def make_tmaze(num_envs=16, **params):
    return make("tmaze", num_envs=num_envs, seed=5, params=params)


@pytest.mark.parametrize("variant", ["passive", "active"])
@pytest.mark.parametrize(
    "params",
    [
        {"corridor": 1},
        {"corridor": 4, "penalty": -0.25},
        {"corridor": 5, "penalty": -0.25, "penalty_rule": "behind"},
        {"corridor": 7, "goal_reward": 3.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("good", [0.0, 0.7])
def test_equals_the_literal_maze(variant, params, good):
    env = make_tmaze(variant=variant, **params)
    settings = {"goal_reward": 1.0, "penalty": 0.0, "penalty_rule": "action", **params, "variant": variant}
    assert assert_equal(env, lambda i: LiteralTMaze(int(env.side[i]), **settings), steps=60, good=good) > 16


@pytest.mark.parametrize("variant", ["passive", "active"])
@pytest.mark.parametrize("rule", ["action", "behind"])
def test_the_optimum_is_the_goal_reward(variant, rule):
    env = make_tmaze(variant=variant, corridor=20, penalty="auto", penalty_rule=rule)
    env.reset()
    total = np.zeros(16)
    for _ in range(env.spec.horizon):
        result = env.step(env.expert())
        total += result.reward
    assert result.terminated.all()
    assert result.truncated.all()
    assert (total == env.spec.optimal_return).all()


def test_auto_penalty_is_one_over_the_corridor():
    env = make_tmaze(corridor=20, penalty="auto")
    env.reset()
    assert env.step(np.full(16, 2)).reward == pytest.approx(-1 / 20)


def test_horizons():
    assert make_tmaze(corridor=20).spec.horizon == 21
    assert make_tmaze(corridor=20, variant="active").spec.horizon == 23


def test_both_sides_are_drawn():
    env = make_tmaze(num_envs=2000)
    env.reset()
    assert set(env.tasks(np.arange(2000))) == {"goal=+1", "goal=-1"}
    assert env.side.mean() == pytest.approx(0, abs=0.1)


def test_the_sign_can_be_fetched_for_nothing():
    """Back to the sign, along the corridor, into the arm it showed: the last step just reaches it."""
    for rule in ("action", "behind"):
        env = make_tmaze(variant="active", corridor=6, penalty=-1.0, penalty_rule=rule)
        env.reset()
        total = np.zeros(16)
        sign = env.step(np.full(16, 2)).observation["obs"][:, 1]
        assert (sign == env.side).all()
        for _ in range(7):
            total += env.step(np.zeros(16, dtype=int)).reward
        result = env.step(np.where(sign > 0, 1, 3))
        assert result.terminated.all()
        assert (total + result.reward == 1).all()


def test_a_delay_costs_once_or_until_it_is_made_up():
    stay_then_right = [3, 0, 0, 0]
    costs = {}
    for rule in ("action", "behind"):
        env = make_tmaze(corridor=10, penalty=-1.0, penalty_rule=rule)
        env.reset()
        costs[rule] = [env.step(np.full(16, action)).reward[0] for action in stay_then_right]
    assert costs == {"action": [-1, 0, 0, 0], "behind": [-1, -1, -1, -1]}
