"""`robotics:ID` keeps the contract; goals, horizons and success are as the rules say."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gymnasium_robotics")

from pipelines.envs.goals import GoalReward
from pipelines.envs.make import make
from pipelines.envs.suites import robotics, suite
from pipelines.errors import InputMissing, UsageError
from tests.envs import contract


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    ("name", "params"),
    [("FetchReach-v4", {"max_episode_steps": 12}), ("PointMaze_UMaze-v3", {"max_episode_steps": 12})],
)
def test_the_contract(name, params, check):
    check(f"robotics:{name}", params=params)


@pytest.mark.slow
@pytest.mark.parametrize("name", robotics.list_names())
def test_every_id_can_be_played(name):
    contract.observations_are_what_the_spec_says(f"robotics:{name}", num_envs=1, steps=3)


@pytest.mark.parametrize(
    ("name", "horizon", "observation", "goal", "actions"),
    [
        ("FetchReach-v4", 50, 10, 3, 4),
        ("FetchPickAndPlace-v4", 50, 25, 3, 4),
        ("PointMaze_UMaze-v3", 300, 4, 2, 2),
        ("PointMaze_Medium-v3", 600, 4, 2, 2),
        ("PointMaze_Large-v3", 800, 4, 2, 2),
        ("AntMaze_UMaze-v4", 700, 27, 2, 8),
        ("AntMaze_Large-v5", 1000, 105, 2, 8),
    ],
)
def test_goals_and_horizons(name, horizon, observation, goal, actions):
    env = make(f"robotics:{name}", num_envs=1, seed=0)
    spaces = env.spec.spaces
    assert env.spec.horizon == horizon
    assert env.spec.has_success
    assert {column: space.shape for column, space in spaces.observation.items()} == {
        "obs.observation": (observation,),
        "obs.achieved_goal": (goal,),
        "obs.desired_goal": (goal,),
    }
    assert spaces.action.shape == (actions,)


@pytest.mark.parametrize(
    ("name", "observation", "actions"),
    [("Door", 39, 28), ("Pen", 45, 24), ("Hammer", 46, 26), ("Relocate", 39, 30)],
)
def test_adroit(name, observation, actions):
    env = make(f"robotics:AdroitHand{name}-v1", num_envs=1, seed=0)
    assert env.spec.horizon == 200
    assert env.spec.spaces.observation["obs"].shape == (observation,)
    assert env.spec.spaces.action.shape == (actions,)


def reach(env, observation):
    """Straight to the goal: Fetch's actions are changes of place, 1 for 5 cm."""
    change = observation["obs.desired_goal"] - observation["obs.achieved_goal"]
    gripper = np.zeros((env.num_envs, 1), dtype=np.float32)
    return np.concatenate([np.clip(change / 0.05, -1, 1), gripper], axis=1).astype(np.float32)


def test_reaching_succeeds_at_the_last_step_and_does_not_end_the_episode():
    env = make("robotics:FetchReach-v4", num_envs=2, seed=0)
    observation = env.reset()
    for step in range(50):
        result = env.step(reach(env, observation))
        observation = result.observation
        near = np.linalg.norm(observation["obs.achieved_goal"] - observation["obs.desired_goal"], axis=1) < 0.05
        np.testing.assert_array_equal(result.reward, np.where(near, 0, -1))
        assert not result.terminated.any()
        assert (result.truncated == (step == 49)).all()
        assert not (result.success & (step < 49)).any()
    assert result.success.all()


def towards(observation):
    """Push a point straight to its goal."""
    change = observation["obs.desired_goal"] - observation["obs.achieved_goal"]
    return np.clip(4 * change - observation["obs.observation"][:, 2:], -1, 1).astype(np.float32)


@pytest.mark.parametrize(
    ("given", "continuing"),
    [({}, True), ({"continuing_task": False}, False), ({"protocol": "paper"}, False)],
)
def test_a_maze_goes_on_after_its_goal_if_wanted(given, continuing):
    params = {**given, "max_episode_steps": 150}
    env = make("robotics:PointMaze_Open-v3", num_envs=3, seed=0, params=params)
    observation = env.reset()
    over, solved = np.zeros((2, 3), dtype=bool)
    ended = np.full(3, 150)
    for step in range(150):
        result = env.step(towards(observation))
        observation = result.observation
        ended[(result.terminated | result.truncated) & ~over] = step + 1
        solved |= result.success & ~over
        over |= result.terminated | result.truncated
    assert solved.all()
    assert (ended == 150).all() if continuing else (ended < 150).all()


@pytest.mark.parametrize(
    ("name", "given", "goal_reward"),
    [
        ("FetchReach-v4", {}, GoalReward(tolerance=0.05, reward=0.0, step_reward=-1.0, ends=False)),
        ("FetchReach-v4", {"reward_type": "dense"}, None),
        ("PointMaze_UMaze-v3", {}, GoalReward(tolerance=0.45, reward=1.0, step_reward=0.0, ends=False)),
        (
            "PointMaze_UMaze-v3",
            {"continuing_task": False},
            GoalReward(tolerance=0.45, reward=1.0, step_reward=0.0, ends=True),
        ),
        ("AdroitHandDoor-v1", {}, None),
    ],
)
def test_goal_rewards_are_those_of_compute_reward(name, given, goal_reward):
    assert make(f"robotics:{name}", num_envs=1, seed=0, params=given).spec.goal_reward == goal_reward


def test_a_dense_reward_can_be_asked_for():
    env = make("robotics:FetchReach-v4", num_envs=1, seed=0, params={"reward_type": "dense"})
    env.reset()
    result = env.step(np.zeros((1, 4), dtype=np.float32))
    distance = np.linalg.norm(result.observation["obs.achieved_goal"] - result.observation["obs.desired_goal"])
    assert result.reward[0] == pytest.approx(-distance, rel=1e-4)


def test_train_and_test_have_other_goals():
    goals = [make("robotics:FetchReach-v4", num_envs=4, seed=0, split=s).reset() for s in ("train", "test")]
    assert not np.isin(goals[0]["obs.desired_goal"], goals[1]["obs.desired_goal"]).any()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("FetchReech-v4", "did you mean 'robotics:FetchReach-v4'"),
        ("FetchReach-v1", "did you mean 'robotics:FetchReach-v4'"),
        ("FrankaKitchen-v1", "gym:gymnasium_robotics:FrankaKitchen-v1"),
    ],
)
def test_unknown_names_are_refused(name, hint):
    with pytest.raises(UsageError, match="unknown environment") as caught:
        make(f"robotics:{name}", num_envs=1, seed=0)
    assert hint in caught.value.hint


def test_a_version_that_fails_later_is_refused_before(monkeypatch):
    monkeypatch.setattr(suite.metadata, "version", lambda package: "3.12.0")
    with pytest.raises(InputMissing, match=r'pip install "mujoco<3.12"'):
        make("robotics:FetchReach-v4", num_envs=1, seed=0)
