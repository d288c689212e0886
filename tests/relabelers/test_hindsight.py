"""Hindsight is exact: the relabelled trajectory is what the environment gives for that goal and those actions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.config.settings import GoalSettings
from pipelines.envs.goals import GOAL_RULES
from pipelines.errors import InputMissing, UsageError
from pipelines.relabelers.base import Chain, Context
from tests.envs.literal import LiteralGoalFrozenLake
from tests.relabelers.trajectories import applied, collected, derive, laid
from tests.tiers import examples

STRATEGIES = ("final", "future", "random")


@pytest.mark.system
@examples(15)
@given(seed=st.integers(0, 10**6), strategy=st.sampled_from(STRATEGIES))
def test_replay_through_the_goal_rule_and_the_literal_environment(seed, strategy):
    rule = GOAL_RULES.get("goal-frozen-lake")
    schema, found = collected("goal-frozen-lake", seed=seed, size=3, max_episode_steps=12)
    before = [{name: column.copy() for name, column in each.columns.items()} for each in found]
    chain = Chain([f"hindsight:{strategy}"], Context(schema=schema, env="goal-frozen-lake"), seed=seed)
    derived = derive(chain, found)
    for each, columns in zip(found, before, strict=True):
        for name, column in columns.items():
            np.testing.assert_array_equal(each.columns[name], column)
    assert len(derived) > 5
    assert (derived.success == 1).all()
    for number, whole in enumerate(applied(derived, found)):
        base = found[derived.place[number]]
        assert all(len(column) >= 2 and column.dtype == base.columns[name].dtype for name, column in whole.items())
        reward, success = rule.outcome(whole)
        np.testing.assert_array_equal(whole["reward"], reward)
        np.testing.assert_array_equal(whole["terminated"], success)
        assert success.sum() == success[-1] == 1
        assert whole["reward"][0] == 0
        assert not whole["truncated"].any()
        assert (whole["action"][0] == 0).all()
        _replay_literally(base, whole, derived.offset[number])


def _replay_literally(trajectory, whole, offset):
    rows = trajectory.info.task.replace("G", ".").split("/")
    size = len(rows)
    goal = tuple(np.rint(whole["obs.desired_goal"][0] * size).astype(int).tolist())
    lake = LiteralGoalFrozenLake(rows, goal, limit=10**6)
    lake.row, lake.column = np.rint(whole["obs.achieved_goal"][0] * size).astype(int).tolist()
    assert offset > 0 or (lake.row, lake.column) == (0, 0)
    for t in range(1, len(whole["reward"])):
        outcome = lake.step(int(whole["action"][t]))
        for name, values in outcome.observation.items():
            np.testing.assert_array_equal(whole[name][t], np.array(values, np.float32))
        assert whole["reward"][t] == outcome.reward
        assert bool(whole["terminated"][t]) == outcome.terminated


def path(cells, *, goal=(2, 2), terminated=False, size=3):
    """Return a trajectory over `cells` of a 3x3 lake whose actions, 1, 2, 3, ..., identify their steps."""
    achieved = np.array(cells, dtype=np.float32) / size
    count = len(cells)
    return {
        "obs.observation": np.zeros((count, 6), np.float32),
        "obs.achieved_goal": achieved,
        "obs.desired_goal": np.tile(np.array(goal, np.float32) / size, (count, 1)),
        "action": np.arange(count, dtype=np.int32),
        "reward": np.zeros(count, np.float32),
        "terminated": np.array([0] * (count - 1) + [int(terminated)], np.uint8),
        "truncated": np.array([0] * (count - 1) + [int(not terminated)], np.uint8),
        "reset": np.zeros(count, np.uint8),
    }


SCHEMA, _ = collected("goal-frozen-lake", seed=0, size=3)
CONTEXT = Context(schema=SCHEMA, env="goal-frozen-lake")


def relabel(columns, strategy="final", *, copies=1, context=CONTEXT):
    """All `copies` versions of one trajectory."""
    chain = Chain([f"hindsight:{strategy}"], context, seed=0)
    columns, rows = laid([columns] * copies)
    uids = np.array([b"x" * 16] * copies, "S16")
    return chain.derive({name: columns[name] for name in chain.reads}, rows, uids, np.arange(copies))


def test_final_takes_the_last_place_and_cuts_at_its_first_visit():
    result = relabel(path([(0, 0), (0, 1), (1, 1), (0, 1), (0, 1)]))
    assert (result.offset.tolist(), result.rows.tolist(), result.success.tolist()) == ([0], [2], [1])
    assert result.columns["reward"].tolist() == [0, 1]


def test_the_place_of_the_first_row_is_no_goal():
    result = relabel(path([(0, 0), (0, 1), (0, 0)]))
    np.testing.assert_allclose(result.columns["obs.desired_goal"][0], np.array([0, 1]) / 3)
    for strategy in STRATEGIES:
        assert len(relabel(path([(0, 0), (0, 0)]), strategy)) == 0


def test_the_place_of_a_failure_is_no_goal():
    fell = path([(0, 0), (0, 1), (1, 1)], terminated=True)
    for strategy in STRATEGIES:
        result = relabel(fell, strategy, copies=10)
        assert len(result) == 10
        np.testing.assert_allclose(result.columns["obs.desired_goal"], np.tile(np.array([0, 1]) / 3, (20, 1)))
    assert len(relabel(path([(0, 0), (0, 1)], terminated=True))) == 0


def test_a_goal_that_was_reached_may_be_chosen_again():
    won = path([(0, 0), (0, 1), (1, 1)], goal=(1, 1), terminated=True)
    assert relabel(won).rows.tolist() == [3]


def test_future_leaves_out_what_came_before():
    trajectory = path([(0, 0), (0, 1), (0, 2), (1, 2), (2, 2), (2, 1)], goal=(2, 0))
    result = relabel(trajectory, "future", copies=60)
    assert set(result.offset.tolist()) == {0, 1, 2, 3, 4}
    for offset, first, rows in zip(result.offset, result.first, result.rows, strict=True):
        assert result.columns["action"][first : first + rows].tolist() == [0, *range(offset + 1, offset + rows)]


def test_every_version_has_a_goal_where_there_is_one():
    one_move = path([(0, 0)] + [(0, 1)] * 3_000)
    assert relabel(one_move, "future", copies=50).offset.tolist() == [0] * 50


def test_random_reaches_every_place():
    result = relabel(path([(0, 0), (0, 1), (0, 2), (1, 2)]), "random", copies=40)
    assert set(result.rows.tolist()) == {2, 3, 4}


def test_a_tolerance_may_stand_in_for_a_rule_and_goals_need_not_end_an_episode():
    goal = GoalSettings(tolerance=0.34, reward=0.0, step_reward=-1.0, ends=False)
    context = Context(schema=SCHEMA, env="fetch", goal=goal)
    result = relabel(path([(0, 0), (0, 1), (0, 2), (1, 2), (2, 2), (2, 1)]), "final", context=context)
    assert result.rows.tolist() == [6]
    assert result.columns["reward"].tolist() == [0, -1, -1, -1, 0, 0]  # (2, 1): 1/3 away from (2, 2)
    assert "terminated" not in result.columns
    touching = relabel(path([(0, 0), (0, 1), (0, 0)]), "final", context=context)
    assert len(touching) == 0  # all within reach of where it began


def test_environments_without_a_goal_rule_are_refused():
    with pytest.raises(InputMissing, match="'tmaze' has no goal rule"):
        Chain(["hindsight"], Context(schema=SCHEMA, env="tmaze"), seed=0)


def test_missing_goal_columns_are_named():
    tmaze, _ = collected("tmaze", seed=0, steps=1)
    with pytest.raises(InputMissing, match=r"no column 'obs.achieved_goal'.*they have obs"):
        Chain(["hindsight"], Context(schema=tmaze, env="goal-frozen-lake"), seed=0)
    wrong = GoalSettings(goals="obs.observation")
    with pytest.raises(InputMissing, match=r"shape \(2,\) a step and the goals \(6,\)"):
        Chain(["hindsight"], Context(schema=SCHEMA, env="goal-frozen-lake", goal=wrong), seed=0)


def test_unknown_names_are_usage_errors():
    with pytest.raises(UsageError, match="known: final, future, random"):
        Chain(["hindsight:past"], CONTEXT, seed=0)
    with pytest.raises(UsageError, match="did you mean 'hindsight'"):
        Chain(["hindsigt"], CONTEXT, seed=0)
    both = GoalSettings(rule="mazerunner", tolerance=0.1)
    with pytest.raises(UsageError, match="give one"):
        Chain(["hindsight"], Context(schema=SCHEMA, env="x", goal=both), seed=0)
    with pytest.raises(InputMissing, match="not goals in order"):
        Chain(["instruction"], CONTEXT, seed=0)
