"""The rollout records the truth: replaying the stored actions gives the stored observations and rewards."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from pipelines.config.settings import ExplorationSettings
from pipelines.envs.exploration import Exploration
from pipelines.envs.make import make
from pipelines.errors import StageFailed
from pipelines.lake.schema import Schema
from pipelines.rollout.policies import ExpertPolicy, RandomPolicy
from pipelines.rollout.rollout import UNFINISHED, Recording, Rollout
from tests.envs.own import Counting

LAKE = {"size": 3, "attempts": 3}


def make_rollout(
    name="meta-frozen-lake",
    params=LAKE,
    *,
    num_envs=4,
    policy=None,
    exploration=None,
    seed=0,
    keep=False,
    **kwargs,
):
    env = make(name, num_envs=num_envs, seed=seed, params=params)
    stored = []
    action = env.spec.spaces.action
    rollout = Rollout(
        env,
        policy or RandomPolicy(action, seed=seed),
        exploration=exploration and Exploration(exploration, action, num_envs, horizon=env.spec.horizon, seed=seed),
        recording=Recording(
            sink=lambda found: stored.extend((each.columns, each.info) for each in found),
            seed=seed,
            keep_unfinished=keep,
        ),
        **kwargs,
    )
    return rollout, stored


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("meta-frozen-lake", LAKE),
        ("dark-key-door", {"size": 2, "horizon": 20, "attempt_steps": 6}),
        ("tmaze", {"corridor": 4}),
        ("goal-frozen-lake", {"size": 3}),
        ("gym:CartPole-v1", {}),
        ("gym:Pendulum-v1", {"max_episode_steps": 15}),
    ],
)
def test_replaying_what_was_stored_gives_the_same_columns(name, params):
    episodes = []
    rollout, stored = make_rollout(name, params, exploration=ExplorationSettings(), on_episode=episodes.append)
    rollout.run(steps=400)
    assert len(stored) == len(episodes) > 4
    twin = make(name, num_envs=1, seed=0, params=params)
    schema = Schema(twin.spec.spaces)
    for (columns, info), episode in zip(stored, episodes, strict=True):
        assert set(columns) == {column.name for column in schema.columns}
        for column in schema.columns:
            assert columns[column.name].dtype == column.dtype
            assert columns[column.name].shape[1:] == column.shape
        assert (columns["action"][0] == 0).all()
        assert columns["reward"][0] == columns["reset"][0] == 0
        assert not columns["terminated"][:-1].any()
        assert not columns["truncated"][:-1].any()
        assert columns["terminated"][-1] or columns["truncated"][-1]
        assert episode.length == len(columns["reward"]) - 1
        assert episode.total_reward == pytest.approx(columns["reward"].sum(dtype=float))
        assert episode.number % 4 == episode.actor
        _replay(twin, episode.number, columns, info)


def _replay(env, number, columns, info):
    env.load_state_dict({"next_episode": number})
    observation = env.reset()
    assert env.tasks(np.array([0]))[0] == info.task
    successes = []
    for t in range(len(columns["reward"])):
        for name, values in observation.items():
            np.testing.assert_array_equal(values[0], columns[name][t])
        if t + 1 < len(columns["reward"]):
            result = env.step(columns["action"][t + 1 : t + 2])
            observation = result.observation
            assert result.reward[0] == columns["reward"][t + 1]
            assert result.reset[0] == columns["reset"][t + 1]
            assert result.terminated[0] == columns["terminated"][t + 1]
            assert result.truncated[0] == columns["truncated"][t + 1]
            if result.attempt_end[0]:
                successes.append(bool(result.success[0]))
    if env.spec.has_success:
        assert info.success == (successes[-1] if successes else False)
        assert info.attempts == (tuple(successes) if env.spec.num_attempts != 1 else ())


def test_steps_are_counted_over_all_actors():
    rollout, stored = make_rollout()
    stats = rollout.run(steps=401)
    assert stats.steps == 404
    assert stats.trajectories == len(stored)
    assert stats.return_mean == pytest.approx(np.mean([columns["reward"].sum() for columns, _ in stored]))
    assert stats.success_mean == pytest.approx(np.mean([info.success for _, info in stored]))
    assert rollout.run(steps=0).steps == 0
    assert rollout.total_steps == 404
    assert math.isnan(make_rollout()[0].run(steps=1).return_mean)


def test_episodes_go_on_between_calls():
    whole, expected = make_rollout()
    whole.run(steps=400)
    parts, found = make_rollout()
    for _ in range(20):
        parts.run(steps=20)
    assert len(found) == len(expected)
    for (a, _), (b, _) in zip(expected, found, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_the_policy_is_told_what_led_to_the_observation():
    policy = Counting(spaces=None, num_actors=2, seed=0)
    rollout, stored = make_rollout("tmaze", {"corridor": 3, "penalty": -0.5}, num_envs=2, policy=policy)
    rollout.run(steps=2 * 8)
    told = [(a[0], r[0], t[0]) for a, r, t in policy.seen]
    columns = {name: np.concatenate([c[name][:-1] for c, _ in stored[::2]]) for name in ("action", "reward")}
    assert [t for _, _, t in told] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [a for a, _, _ in told] == columns["action"].tolist()
    assert [r for _, r, _ in told] == columns["reward"].tolist()


def test_what_is_said_of_a_trajectory():
    rollout, stored = make_rollout(exploration=ExplorationSettings(start=0.5, end=0.5, randomize=False), seed=3)
    rollout.policy_id, rollout.policy_version = "p", 7
    rollout.run(steps=300)
    _, info = stored[0]
    assert (info.env, info.policy_id, info.policy_version, info.seed) == ("meta-frozen-lake", "p", 7, 3)
    assert info.epsilon == pytest.approx(0.5)
    assert len(info.attempts) == 3
    assert info.t_start <= info.t_end
    assert info.source == "rollout"


def test_an_episode_bears_the_version_that_acted_at_its_end():
    rollout, stored = make_rollout("tmaze", {"corridor": 4})
    rollout.policy_version = 1
    rollout.run(steps=4 * 3)
    rollout.policy_version = 2
    rollout.run(steps=4 * 2)
    assert [info.policy_version for _, info in stored] == [2] * 4


def test_prefixes_are_the_rows_acted_on():
    rollout, _ = make_rollout("tmaze", {"corridor": 6})
    rollout.run(steps=4 * 4)
    for prefix in rollout.prefixes():
        assert len(prefix["reward"]) == 4
        assert prefix["obs"].shape == (4, 2)
    rollout.run(steps=4 * 3)
    assert all(len(prefix["reward"]) == 0 for prefix in rollout.prefixes())


@pytest.mark.parametrize("keep", [False, True])
def test_unfinished_episodes_are_dropped_or_stored_as_truncated(keep):
    rollout, stored = make_rollout("tmaze", {"corridor": 6}, keep=keep)
    rollout.run(steps=4 * 3)
    assert rollout.finish() == (4 if keep else 0)
    assert len(stored) == (4 if keep else 0)
    for columns, info in stored:
        assert len(columns["reward"]) == 4
        assert info.success is None
        assert info.tags == {UNFINISHED: "true"}
        assert columns["truncated"].tolist() == [0, 0, 0, 1]
        assert not columns["terminated"].any()
    assert rollout.finish() == 0


def test_an_episode_is_handed_over_once_even_if_the_sink_is_interrupted():
    rollout, stored = make_rollout("tmaze", {"corridor": 3}, keep=True)
    store = rollout._finished._sink

    def interrupted(found):
        store(found)
        raise KeyboardInterrupt

    rollout._finished._sink = interrupted
    with pytest.raises(KeyboardInterrupt):
        rollout.run(steps=100)
    rollout._finished._sink = store
    rollout.finish()
    assert sum(len(columns["reward"]) - 1 for columns, _ in stored) == rollout.total_steps > 0
    assert len(stored) == 4


def test_short_episodes_are_handed_over_together_and_all_of_them_when_a_run_ends():
    rollout, stored = make_rollout("tmaze", {"corridor": 3})
    batches, store = [], rollout._finished._sink
    rollout._finished._sink = lambda found: (batches.append(len(found)), store(found))
    for run in range(1, 4):
        rollout.run(steps=4 * 4 * 20)
        assert sum(batches) == len(stored) == run * 4 * 20
    assert len(batches) < 3 * 20
    assert all(info.t_start <= info.t_end for _, info in stored)


def test_state_goes_on_with_new_tasks_and_the_same_schedule():
    settings = ExplorationSettings(steps=100)
    rollout, stored = make_rollout(exploration=settings)
    rollout.run(steps=160)
    state = json.loads(json.dumps(rollout.state_dict()))
    again, later = make_rollout(exploration=settings)
    again.load_state_dict(state)
    again.run(steps=160)
    assert again.exploration.steps == 80
    assert later
    assert [info.task for _, info in later[:4]] != [info.task for _, info in stored[:4]]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "ZeroDivisionError: it broke"),
        ("nan-reward", "its reward is nan"),
        ("no-reward", "its reward is None, not a number"),
        ("wide-reward", "its reward is array.*, not a number"),
        ("shape", "has shape"),
        ("old-reset", "its reset returned a ndarray, not an observation and an info"),
        ("old-step", "its step returned 4 values, not an observation, a reward, terminated, truncated and an info"),
    ],
)
def test_faults_of_an_environment_stop_the_rollout_in_clear_words(fault, words):
    rollout, _ = make_rollout("tests.envs.own:Line", {"fault": fault})
    with pytest.raises(StageFailed, match=words) as caught:
        rollout.run(steps=100)
    assert "tests.envs.own:Line" in str(caught.value)
    if fault == "raise":
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_reward_may_be_an_array_of_one_number():
    env = make("tests.envs.own:Line", num_envs=1, seed=0, params={"fault": "array-reward"})
    env.reset()
    assert [env.step(np.zeros(1, np.int32)).reward.tolist() for _ in range(3)] == [[0.0], [0.0], [2.0]]


def test_a_policy_of_another_shape_is_refused():
    class Wrong:
        def act(self, observation, prev_action, prev_reward, time):
            return np.zeros(3)

    rollout, _ = make_rollout(policy=Wrong())
    with pytest.raises(StageFailed, match=r"actions of shape \(3,\)"):
        rollout.run(steps=1)


def test_stop_ends_a_run_between_steps():
    rollout, _ = make_rollout()
    asked = iter([False, False, True])
    assert rollout.run(steps=1000, stop=lambda: next(asked)).steps == 8


def test_progress_is_told_at_the_end():
    rollout, _ = make_rollout()
    events = []
    rollout.run(steps=300, listener=events.append, stage="collect")
    assert (events[-1].done, events[-1].total, events[-1].unit) == (300, 300, "steps")
    assert "return_mean" in events[-1].metrics


def test_the_expert_succeeds_always():
    env = make("meta-frozen-lake", num_envs=8, seed=0, params=LAKE)
    rollout = Rollout(env, ExpertPolicy(env))
    assert rollout.run(steps=8 * 60).success_mean == 1.0


def test_the_mission_an_episode_began_with_is_its_goal_in_words():
    rollout, stored = make_rollout("tests.envs.own:Told", {})
    rollout.run(steps=60)
    assert len(stored) == 12
    for columns, info in stored:
        first = columns["obs.mission"][0, : columns["obs.mission.length"][0]]
        assert info.goal_text == "".join(map(chr, first))
    assert len({info.goal_text for _, info in stored}) > 1
