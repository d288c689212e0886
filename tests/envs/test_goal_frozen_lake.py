"""Goal-FrozenLake equals a literal one; goals can be reached; moves do not depend on them."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.envs.make import make
from tests.envs.literal import LiteralGoalFrozenLake, assert_equal
from tests.tiers import crossed


def literal_of(env):
    def one(i):
        name = env.tasks(np.array([i]))[0]
        rows = name.split("/")
        goal = next((r, row.index("G")) for r, row in enumerate(rows) if "G" in row)
        return LiteralGoalFrozenLake([row.replace("G", ".") for row in rows], goal, limit=env.spec.horizon)

    return one


@pytest.mark.system
@pytest.mark.parametrize(
    ("params", "good"), crossed([{"size": 3}, {"size": 4, "max_episode_steps": 6}, {"size": 6}], [0.7, 0.0]), ids=str
)
def test_equals_the_literal_lake(params, good):
    env = make("goal-frozen-lake", num_envs=12, seed=2, params=params)
    assert assert_equal(env, literal_of(env), steps=120, good=good) > 12


def test_every_goal_can_be_reached():
    env = make("goal-frozen-lake", num_envs=300, seed=0, params={"size": 5})
    env.reset()
    open_episodes = np.ones(300, dtype=bool)
    for _ in range(25):
        result = env.step(env.expert())
        assert not (result.terminated & open_episodes & ~result.success).any()
        open_episodes &= ~result.success
    assert not open_episodes.any()


def test_goals_are_uniform_over_the_cells_in_reach():
    env = make("goal-frozen-lake", num_envs=6000, seed=0, params={"size": 2, "holdout": 0})
    env.reset()
    full = ~env.holes.any(axis=1)
    counts = np.bincount(env.goal[full], minlength=4) / full.sum()
    assert counts[0] == 0
    np.testing.assert_allclose(counts[1:], 1 / 3, atol=0.04)
