"""gymnax: nothing is reset unseen, nothing is compiled twice, and each actor's random numbers are its own."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gymnax")

import gymnax
import jax

from pipelines.envs.make import make
from pipelines.errors import InputMissing, StageFailed, UsageError
from pipelines.lake.spaces import Box, Discrete
from tests.envs import contract

OFFLINE = [name for name in gymnax.registered_envs if name != "MNISTBandit-bsuite"]


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ["gymnax:CartPole-v1", "gymnax:Pendulum-v1"])
def test_gymnax_keeps_the_contract(check, name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", OFFLINE)
def test_every_environment_is_what_its_spec_says_and_plays_the_same_again(name):
    contract.observations_are_what_the_spec_says(f"gymnax:{name}", steps=30)
    contract.the_same_seed_plays_the_same(f"gymnax:{name}", steps=20)


def test_an_end_shows_its_true_final_observation_as_stepped_by_hand():
    """CartPole, from the environment's own functions, one actor at a time, without its step's reset."""
    env = make("gymnax:CartPole-v1", num_envs=3, seed=0)
    theirs, params = gymnax.make("CartPole-v1")
    observation = env.reset()["obs"]
    states = [jax.tree.map(lambda leaf, i=i: leaf[i], env._state) for i in range(3)]
    ends = 0
    for _ in range(40):
        result = env.step(np.ones(3, dtype=np.int32))
        for i in range(3):
            seen, states[i], reward, over, _ = theirs.step_env(jax.random.PRNGKey(0), states[i], 1, params)
            np.testing.assert_allclose(result.observation["obs"][i], seen, rtol=1e-5, atol=1e-6)
            assert (result.reward[i], result.terminated[i]) == (reward, over)
        if result.terminated.any():
            ends += 1
            final = result.observation["obs"]
            assert (np.abs(final[result.terminated][:, [0, 2]]) > [2.4, 0.2]).any()  # it fell, or left
            begun = env.reset(result.terminated)["obs"]
            assert (np.abs(begun[result.terminated]) <= 0.05).all()
            np.testing.assert_array_equal(begun[~result.terminated], final[~result.terminated])
            states = [jax.tree.map(lambda leaf, i=i: leaf[i], env._state) for i in range(3)]
    assert ends
    assert observation.shape == (3, 4)


def test_time_limits_truncate():
    env = make("gymnax:Pendulum-v1", num_envs=2, seed=0, params={"max_episode_steps": 3})
    assert env.spec.horizon == 3
    env.reset()
    for step in range(1, 4):
        result = env.step(np.zeros((2, 1)))
        assert result.truncated.tolist() == [step == 3] * 2
        assert not result.terminated.any()


def test_a_step_and_a_reset_are_compiled_once_whatever_the_mask():
    for name in ("CartPole-v1", "MetaMaze-misc"):  # the latter's first state has other types than its later ones
        env = make(f"gymnax:{name}", num_envs=5, seed=0)
        env.reset()
        for mask in ([1, 0, 0, 0, 0], [1, 1, 0, 0, 1], [1] * 5):
            env.step(np.zeros(5, dtype=np.int32))
            env.reset(np.array(mask, dtype=bool))
        env.step(np.zeros(5, dtype=np.int32))
        assert (env._step_all._cache_size(), env._reset_all._cache_size()) == (1, 1)


def test_actions_are_stretched_to_the_environments_bounds():
    env = make("gymnax:Pendulum-v1", num_envs=3, seed=0)
    assert env.spec.spaces.action == Box(shape=(1,), low=(-2.0,), high=(2.0,))
    assert env._decode(np.array([[-1.0], [0.0], [0.5]])).tolist() == [[-2.0], [0.0], [1.0]]
    assert make("gymnax:CartPole-v1", num_envs=1, seed=0).spec.spaces.action == Discrete(n=2)


def test_parameters_and_options_reach_the_environment():
    env = make("gymnax:CartPole-v1", num_envs=1, seed=0, params={"params": {"gravity": 1.5}})
    assert env.interface.params.gravity == 1.5
    env = make("gymnax:MetaMaze-misc", num_envs=1, seed=0, params={"options": {"rf_size": 5}})
    assert env.spec.spaces.observation["obs"].shape == (5 * 5 + 4 + 2,)
    with pytest.raises(UsageError, match=r"has no parameter 'gravitation'; its own: .*gravity"):
        make("gymnax:CartPole-v1", num_envs=1, seed=0, params={"params": {"gravitation": 1.0}})
    with pytest.raises(UsageError, match=r"does not take env\.options"):
        make("gymnax:MetaMaze-misc", num_envs=1, seed=0, params={"options": {"colour": 5}})


def test_an_observation_that_is_not_finite_is_told():
    env = make("gymnax:CartPole-v1", num_envs=2, seed=0, params={"params": {"gravity": float("inf")}})
    env.reset()
    with pytest.raises(StageFailed, match=r"observation 'obs' of actor 0 is not finite"):
        [env.step(np.zeros(2, dtype=np.int32)) for _ in range(5)]


def test_seeds_of_training_and_test_are_never_the_same():
    keys = {}
    for split in ("train", "test"):
        env = make("gymnax:CartPole-v1", num_envs=64, seed=0, split=split)
        env.reset()
        keys[split] = {key[1] % 2 for key in np.asarray(env._keys).tolist()}
    assert keys == {"train": {0}, "test": {1}}


def test_wrong_names_are_refused():
    with pytest.raises(UsageError, match="did you mean 'gymnax:CartPole-v1'"):
        make("gymnax:CartPole", num_envs=1, seed=0)
    env = make("gymnax:CartPole-v1", num_envs=1, seed=0)
    env.play_only(["gymnax:CartPole-v1"])
    with pytest.raises(InputMissing, match="does not let its tasks be chosen"):
        env.play_only(["other"])
