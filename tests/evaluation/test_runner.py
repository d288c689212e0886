"""Evaluation counts exactly the episodes asked for, each to its end, and favours none."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.config.settings import ExplorationSettings
from pipelines.envs.exploration import Exploration
from pipelines.envs.make import make
from pipelines.envs.repeated import Repeated
from pipelines.errors import Interrupted, UsageError
from pipelines.evaluation.runner import evaluate, play_episodes
from pipelines.rollout.policies import ExpertPolicy, RandomPolicy


def run(num_envs, episodes, name="meta-frozen-lake", params=None, expert=False, **kwargs):
    env = make(name, num_envs=num_envs, seed=5, split="test", params=params or {"size": 4, "attempts": 2})
    policy = ExpertPolicy(env) if expert else RandomPolicy(env.spec.spaces.action, seed=0)
    return evaluate(env, policy, episodes=episodes, **kwargs)


@pytest.mark.parametrize(("num_envs", "episodes"), [(1, 3), (4, 10), (10, 4), (7, 7)])
def test_exactly_the_episodes_asked_for(num_envs, episodes):
    results = run(num_envs, episodes)
    assert results.episodes == len(results.tasks) == len(results.lengths) == episodes
    assert results.attempts.shape == (episodes, 2)
    np.testing.assert_array_equal(results.success, results.attempts[:, -1])
    np.testing.assert_array_equal(results.returns, results.attempts.sum(axis=1))
    np.testing.assert_array_equal(results.attempt_returns, results.attempts)  # the goal pays 1


def test_a_policy_without_chance_does_alike_whatever_the_number_of_actors():
    one, many = run(1, 12, expert=True), run(5, 12, expert=True)
    assert one.tasks == many.tasks
    np.testing.assert_array_equal(one.lengths, many.lengths)
    assert one.success.all()


@pytest.mark.system
def test_short_episodes_are_not_favoured():
    """With quotas the mean length of random walks equals that of a long run; first-come counting would
    not.
    """
    long = run(1, 600, "gym:CartPole-v1", {"max_episode_steps": 60})
    wide = run(100, 100, "gym:CartPole-v1", {"max_episode_steps": 60})
    error = long.lengths.std() * np.sqrt(1 / 600 + 1 / 100)
    assert abs(long.lengths.mean() - wide.lengths.mean()) < 4 * error


def test_single_attempt_tasks_have_no_attempt_table():
    results = run(3, 6, "tmaze", {"corridor": 3}, expert=True)
    assert results.attempts is None
    assert results.success.all()
    assert run(2, 2, "gym:CartPole-v1", {"max_episode_steps": 3}).success is None


def test_returns_by_attempt_need_no_success():
    env = make("gym:Pendulum-v1", num_envs=2, seed=5, params={"attempts": 3, "max_episode_steps": 20})
    results = evaluate(env, RandomPolicy(env.spec.spaces.action, seed=0), episodes=4)
    assert results.success is None
    assert results.attempts is None
    assert results.attempt_returns.shape == (4, 3)
    np.testing.assert_allclose(results.attempt_returns.sum(axis=1), results.returns, rtol=1e-6)
    assert len(np.unique(results.attempt_returns)) == 12


def test_attempts_that_every_episode_finished_are_kept():
    results = run(4, 8, "dark-key-door", {"size": 3, "horizon": 60}, expert=True)
    assert results.attempts.ndim == 2
    assert results.attempts.shape[0] == 8
    assert results.attempts.all()


class _FromMemory:
    """Acts by what a policy with memory is given besides the observation."""

    def act(self, observation, prev_action, prev_reward, time):
        return (3 * time * time + time // 4 + prev_action + prev_reward.astype(np.int64)) % 5


@pytest.mark.parametrize("attempts", [1, 3], ids=["repeated episodes", "attempts of an episode"])
def test_attempts_without_memory_of_others_are_alike(attempts):
    def play(memory):
        room = make("dark-room", num_envs=4, seed=3, params={"attempts": attempts, "size": 5})
        env = Repeated(room, 3) if attempts == 1 else room
        played = play_episodes(env, _FromMemory(), episodes=16, memory=memory)
        return np.array([episode.attempt_returns for episode in played])

    def are_alike(returns):
        return (returns == returns[:, :1]).all()

    remembered, cleared = play("episode"), play("attempt")
    assert remembered.shape == cleared.shape == (16, 3)
    assert are_alike(cleared)
    assert not are_alike(remembered)
    np.testing.assert_array_equal(cleared[:, 0], remembered[:, 0])
    assert len(np.unique(cleared)) > 1


def test_exploration_applies_where_it_is_given():
    env = make("tmaze", num_envs=50, seed=0, params={"corridor": 3})
    noise = Exploration(ExplorationSettings(start=1, end=1, randomize=False), env.spec.spaces.action, 50)
    assert evaluate(env, ExpertPolicy(env), episodes=50, exploration=noise).success.mean() < 0.7


def test_no_episode_is_a_usage_error_and_stopping_an_interruption():
    with pytest.raises(UsageError):
        run(2, 0)
    with pytest.raises(Interrupted):
        run(2, 5, stop=lambda: True)


def test_progress_reaches_the_total():
    events = []
    run(2, 5, listener=events.append)
    assert (events[-1].done, events[-1].total, events[-1].unit) == (5, 5, "episodes")
