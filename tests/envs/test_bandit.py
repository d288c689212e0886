"""Bandits: rewards follow the hidden means, whatever was pulled before."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.envs.make import make
from pipelines.errors import InputMissing
from tests.envs import contract

NAME = "bandit"


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("rewards", ["bernoulli", "gaussian"])
def test_it_keeps_the_contract(check, rewards):
    check(NAME, params={"arms": 3, "steps": 15, "rewards": rewards})


@pytest.mark.parametrize(("rewards", "deviation"), [("bernoulli", (0.3 * 0.7) ** 0.5), ("gaussian", 0.5)])
def test_an_arm_pays_its_mean(rewards, deviation):
    params = {"arms": 2, "steps": 40, "rewards": rewards, "noise": 0.5}
    env = make(NAME, num_envs=500, seed=0, params=params)
    env.play_only(["means=0.300000,0.900000"])
    env.reset()
    paid = np.stack([env.step(np.zeros(500, dtype=np.int32)).reward for _ in range(40)])
    assert paid.mean() == pytest.approx(0.3, abs=4 * deviation / 20000**0.5)
    assert paid.std() == pytest.approx(deviation, abs=0.02)
    if rewards == "bernoulli":
        assert set(np.unique(paid)) == {0.0, 1.0}
    assert abs(np.corrcoef(paid[:-1].ravel(), paid[1:].ravel())[0, 1]) < 0.03  # steps are independent


def test_an_episode_shows_its_time_and_terminates():
    env = make(NAME, num_envs=2, seed=0, params={"steps": 4})
    assert env.reset()["obs"].tolist() == [[0.0], [0.0]]
    rows = [env.step(np.ones(2, dtype=np.int32)) for _ in range(4)]
    assert [row.observation["obs"][0, 0] for row in rows] == [0.25, 0.5, 0.75, 1.0]
    assert [bool(row.terminated[0]) for row in rows] == [False, False, False, True]


def test_means_are_uniform_and_random_play_gets_half():
    env = make(NAME, num_envs=2000, seed=0, params={"arms": 5})
    env.reset()
    means = env.means / 1e6
    assert means.mean() == pytest.approx(0.5, abs=0.01)
    assert means.min() < 0.01 < 0.99 < means.max()
    assert env.spec.random_return == pytest.approx(50, abs=1e-4)


def test_names_are_exact_and_wrong_ones_refused():
    env = make(NAME, num_envs=1, seed=0, params={"arms": 3})
    env.reset()
    (name,) = env.tasks(np.arange(1))
    again = make(NAME, num_envs=1, seed=9, params={"arms": 3})
    again.play_only([name])
    again.reset()
    np.testing.assert_array_equal(again.means, env.means)
    assert again.expert()[0] == env.means[0].argmax()
    for wrong in ("means=0.1,0.2", "means=0.100000,0.200000,1.500000", "arms"):
        with pytest.raises(InputMissing, match="is not a task"):
            again.play_only([wrong])
