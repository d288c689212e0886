"""Hindsight is exact: the relabelled trajectory is what the environment gives for that goal and those
actions.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.envs.goals import goal_rule
from pipelines.envs.make import make
from pipelines.errors import InputMissing, UsageError
from pipelines.lake.trajectory import Trajectory, TrajectoryInfo
from pipelines.relabelers.base import generator_for, make_relabeler
from pipelines.relabelers.hindsight import Hindsight
from pipelines.rollout.actor import Rollout
from pipelines.rollout.policy_client import RandomPolicy
from tests.envs.literal import LiteralGoalFrozenLake

STRATEGIES = ("final", "future", "random")


def collect(seed, size=3, steps=400):
    env = make("goal-frozen-lake", num_envs=4, seed=seed, params={"size": size, "max_episode_steps": 12})
    found = []

    def sink(ended):
        found.extend(Trajectory(each.columns, each.info, uid=str(len(found) + i)) for i, each in enumerate(ended))

    Rollout(env, RandomPolicy(env.spec.spaces.action, seed=seed), sink=sink).run(steps=steps)
    return found


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), strategy=st.sampled_from(STRATEGIES))
def test_replay_through_the_goal_rule_and_the_literal_environment(seed, strategy):
    rule, relabeler = goal_rule("goal-frozen-lake"), make_relabeler("hindsight", strategy=strategy)
    relabelled = 0
    for trajectory in collect(seed):
        base = {name: column.copy() for name, column in trajectory.columns.items()}
        result = relabeler.relabel(trajectory, generator_for(seed, trajectory.uid))
        for name, column in base.items():
            np.testing.assert_array_equal(trajectory.columns[name], column)
        if result is None:
            continue
        relabelled += 1
        assert set(result.columns) == set(relabeler.columns)
        whole = result.apply(base)
        assert all(len(column) == result.length + 1 >= 2 for column in whole.values())
        assert all(whole[name].dtype == base[name].dtype for name in base)
        reward, success = rule.outcome(whole)
        np.testing.assert_array_equal(whole["reward"], reward)
        np.testing.assert_array_equal(whole["terminated"], success)
        assert success.sum() == success[-1] == 1
        assert whole["reward"][0] == 0
        assert not whole["truncated"].any()
        assert (whole["action"][0] == 0).all()
        _replay_literally(trajectory, whole, result.offset)
    assert relabelled


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
    """A trajectory over `cells` of a 3x3 lake; actions are 1, 2, 3, ... so that they can be told apart."""
    achieved = np.array(cells, dtype=np.float32) / size
    count = len(cells)
    columns = {
        "obs.observation": np.zeros((count, 6), np.float32),
        "obs.achieved_goal": achieved,
        "obs.desired_goal": np.tile(np.array(goal, np.float32) / size, (count, 1)),
        "action": np.arange(count, dtype=np.int32),
        "reward": np.zeros(count, np.float32),
        "terminated": np.array([0] * (count - 1) + [int(terminated)], np.uint8),
        "truncated": np.array([0] * (count - 1) + [int(not terminated)], np.uint8),
        "reset": np.zeros(count, np.uint8),
    }
    return Trajectory(columns, TrajectoryInfo(env="goal-frozen-lake"), uid="x")


def relabel(trajectory, strategy="final", seed=0):
    return Hindsight(strategy).relabel(trajectory, np.random.default_rng(seed))


def test_final_takes_the_last_place_and_cuts_at_its_first_visit():
    result = relabel(path([(0, 0), (0, 1), (1, 1), (0, 1), (0, 1)]))
    assert (result.offset, result.length, result.success) == (0, 1, True)
    assert result.columns["reward"].tolist() == [0, 1]


def test_the_place_of_the_first_row_is_no_goal():
    result = relabel(path([(0, 0), (0, 1), (0, 0)]))
    np.testing.assert_allclose(result.columns["obs.desired_goal"][0], np.array([0, 1]) / 3)
    assert relabel(path([(0, 0), (0, 0)])) is None
    assert relabel(path([(0, 0), (0, 0)]), "future") is None


def test_the_place_of_a_failure_is_no_goal():
    fell = path([(0, 0), (0, 1), (1, 1)], terminated=True)
    for seed in range(10):
        for strategy in STRATEGIES:
            np.testing.assert_allclose(
                relabel(fell, strategy, seed).columns["obs.desired_goal"][0], np.array([0, 1]) / 3
            )
    assert relabel(path([(0, 0), (0, 1)], terminated=True)) is None


def test_a_goal_that_was_reached_may_be_chosen_again():
    won = path([(0, 0), (0, 1), (1, 1)], goal=(1, 1), terminated=True)
    assert relabel(won).length == 2


def test_future_leaves_out_what_came_before():
    trajectory = path([(0, 0), (0, 1), (0, 2), (1, 2), (2, 2), (2, 1)], goal=(2, 0))
    offsets = set()
    for seed in range(60):
        result = relabel(trajectory, "future", seed)
        offsets.add(result.offset)
        assert result.columns["action"].tolist() == [
            0,
            *range(result.offset + 1, result.offset + result.length + 1),
        ]
    assert offsets == {0, 1, 2, 3, 4}


def test_random_reaches_every_place():
    trajectory = path([(0, 0), (0, 1), (0, 2), (1, 2)])
    assert {relabel(trajectory, "random", seed).length for seed in range(40)} == {1, 2, 3}


def test_the_same_seed_the_same_goal_whatever_the_order():
    draws = [generator_for(3, uid, copy).integers(1 << 40) for uid in ("a", "b") for copy in (0, 1)]
    assert len(set(draws)) == 4
    assert generator_for(3, "a", 1).integers(1 << 40) == draws[1]


def test_environments_without_a_goal_rule_are_refused():
    trajectory = Trajectory(path([(0, 0), (0, 1)]).columns, TrajectoryInfo(env="tmaze"))
    with pytest.raises(InputMissing, match="'tmaze' has no goal rule"):
        relabel(trajectory)


def test_missing_goal_columns_are_named():
    columns = {k: v for k, v in path([(0, 0), (0, 1)]).columns.items() if k != "obs.desired_goal"}
    with pytest.raises(InputMissing, match=r"no column 'obs.desired_goal'"):
        relabel(Trajectory(columns, TrajectoryInfo(env="goal-frozen-lake")))


def test_unknown_names_are_usage_errors():
    with pytest.raises(UsageError, match="known: final, future, random"):
        make_relabeler("hindsight", strategy="past")
    with pytest.raises(UsageError, match="did you mean 'hindsight'"):
        make_relabeler("hindsigt")
