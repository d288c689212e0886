"""A VectorEnv plays what the same environments play one by one, where it lets single actors be reset."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from pipelines.envs.draws import Draws
from pipelines.envs.make import make
from pipelines.errors import StageFailed, UsageError
from tests.envs import contract
from tests.envs.own import Everything, Line

HERE = "tests.envs.test_vector_env"
FLAGS = ("reward", "terminated", "truncated", "attempt_end", "success")


def many(num_envs, mode="Disabled", length=4):
    """Everything, all actors at once."""
    return SyncVectorEnv([lambda: Everything(length=length)] * num_envs, autoreset_mode=AutoresetMode(mode))


def too_few(num_envs):
    return SyncVectorEnv([Line], autoreset_mode=AutoresetMode.DISABLED)


def broken(num_envs):
    return SyncVectorEnv([lambda: Line(fault="raise")] * num_envs, autoreset_mode=AutoresetMode.DISABLED)


def not_a_vector(num_envs):
    return Line()


def vectorized(num_envs, vectorization):
    """CartPole as `gymnasium.make_vec` makes it."""
    return gymnasium.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode=vectorization)


class Deaf(SyncVectorEnv):
    """One that resets all of its actors, whatever the mask says."""

    def __init__(self, num_envs):
        super().__init__([lambda: gymnasium.make("CartPole-v1")] * num_envs)

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)


class Pool(SyncVectorEnv):
    """As EnvPool's environments: a reset returns the actors that were reset alone, and seeds are not taken."""

    is_async = False

    def __init__(self, num_envs, batch=1.0):
        super().__init__([lambda: gymnasium.make("CartPole-v1")] * num_envs)
        self.all_env_ids = np.arange(num_envs)
        self.config, self.spec = {"max_episode_steps": 500}, object()
        self.is_async = batch < 1.0

    def reset(self, *, options=None):
        mask = np.ones(self.num_envs, dtype=bool) if options is None else options["reset_mask"]
        seeds = [7 + i for i in range(self.num_envs)] if options is None else None
        shown, _ = super().reset(seed=seeds, options=options)
        ids = np.flatnonzero(mask)[::-1]
        return shown[ids], {"env_id": ids}


def played(env, steps=30):
    rng = np.random.default_rng(0)
    rows = [dict(env.reset())]
    for _ in range(steps):
        result = env.step(rng.integers(3, size=env.num_envs).astype(np.int32))
        rows.append(dict(result.observation) | {name: getattr(result, name) for name in FLAGS})
        over = result.terminated | result.truncated
        if over.any():
            rows.append(dict(env.reset(over)))
    return rows


def test_the_same_is_played_as_one_by_one(monkeypatch):
    params = {"success_key": "is_success"}
    monkeypatch.setattr("pipelines.envs.env.Draws", lambda seed, split, name: Draws(seed, split, "one"))
    ours = make("tests.envs.own:Everything", num_envs=3, seed=5, params=params)
    theirs = make(f"{HERE}:many", num_envs=3, seed=5, params=params)
    assert theirs.spec.spaces == ours.spec.spaces
    for mine, other in zip(played(ours), played(theirs), strict=True):
        assert mine.keys() == other.keys()
        for column, values in mine.items():
            np.testing.assert_array_equal(values, other[column], err_msg=column)


@pytest.mark.parametrize("mode", ["Disabled", "NextStep", "SameStep"])
@pytest.mark.parametrize(
    "check",
    [
        contract.observations_are_what_the_spec_says,
        contract.what_was_shown_is_never_written_again,
        contract.the_same_seed_plays_the_same,
    ],
    ids=lambda check: check.__name__,
)
def test_the_contract_holds(check, mode):
    check(f"{HERE}:many", params={"mode": mode})


def test_with_same_step_the_final_observation_is_the_episodes_own():
    env = make(f"{HERE}:many", num_envs=2, seed=0, params={"mode": "SameStep", "length": 3})
    env.reset()
    for time in (1, 2, 3):
        result = env.step(np.zeros(2, np.int32))
        assert (result.observation["obs.image"] == time).all()
    assert result.terminated.all()
    assert (env.reset(result.terminated)["obs.image"] == 0).all()
    assert (env.step(np.zeros(2, np.int32)).observation["obs.image"] == 1).all()


@pytest.mark.parametrize(
    ("name", "params", "error", "words"),
    [
        ("too_few", {}, UsageError, "gives 1 actors, 2 were asked for"),
        ("Pool", {"batch": 0.5}, UsageError, "steps some of its actors at once"),
        ("not_a_vector", {}, UsageError, "not a gymnasium.vector.VectorEnv"),
        ("many", {"attempts": 2}, UsageError, "env.attempts: a VectorEnv steps and ends its episodes by itself"),
        ("many", {"action_repeat": 2}, UsageError, "env.action_repeat: a VectorEnv steps and ends"),
        ("many", {"lenth": 2}, UsageError, "1 error"),
    ],
)
def test_what_cannot_be_used_is_refused(name, params, error, words):
    with pytest.raises(error) as caught:
        make(f"{HERE}:{name}", num_envs=2, seed=0, params=params)
    assert words in str(caught.value)


@pytest.mark.system
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_gymnasiums_default_plays_whole_episodes(vectorization):
    """The bare environments are the judge: a step that only resets would be a row more."""
    env = make(f"{HERE}:vectorized", num_envs=3, seed=2, params={"vectorization": vectorization})
    bare = [gymnasium.make("CartPole-v1") for _ in range(3)]
    try:
        shown, mask, ended = env.reset()["obs"], np.ones(3, dtype=bool), 0
        for time in range(90):
            seeds = env.seeds(np.arange(3))
            for i in np.flatnonzero(mask):
                np.testing.assert_array_equal(shown[i], bare[i].reset(seed=seeds[i])[0])
            actions = np.array([time // 2 % 2, 1, time % 3 // 2], np.int32)
            result = env.step(actions)
            for i in range(3):
                observation, reward, terminated, truncated, _ = bare[i].step(int(actions[i]))
                np.testing.assert_array_equal(result.observation["obs"][i], observation)
                assert (reward, terminated, truncated) == (
                    result.reward[i],
                    result.terminated[i],
                    result.truncated[i],
                )
            mask = result.terminated | result.truncated
            ended += int(mask.sum())
            shown = env.reset(mask)["obs"] if mask.any() else result.observation["obs"]
        assert ended > 6
    finally:
        env.close()


def test_a_pool_returns_the_actors_that_were_reset():
    env, bare = make(f"{HERE}:Pool", num_envs=3, seed=0), Pool(3)
    assert env.spec.horizon == 500
    shown, (rows, info) = env.reset()["obs"], bare.reset()
    np.testing.assert_array_equal(shown[info["env_id"]], rows)
    ended = 0
    for time in range(90):
        actions = np.array([time // 2 % 2, 1, time % 3 // 2], np.int32)
        result, (observation, _, terminated, truncated, _) = env.step(actions), bare.step(actions)
        np.testing.assert_array_equal(result.observation["obs"], observation)
        if (mask := terminated | truncated).any():
            ended += int(mask.sum())
            shown, (rows, info) = env.reset(mask)["obs"], bare.reset(options={"reset_mask": mask})
            np.testing.assert_array_equal(shown[info["env_id"]], rows)
            np.testing.assert_array_equal(shown[~mask], observation[~mask])
    assert ended > 6
    assert env.seeds(np.arange(3)) == [None] * 3


def test_an_environment_that_ignores_the_mask_is_refused():
    env = make(f"{HERE}:Deaf", num_envs=2, seed=0)
    env.reset()
    env.step(np.zeros(2, np.int32))
    with pytest.raises(StageFailed, match="has reset all of its actors"):
        env.reset(np.array([True, False]))


def test_a_failure_is_named_with_its_place():
    env = make(f"{HERE}:broken", num_envs=2, seed=0)
    env.reset()
    env.step(np.zeros(2, np.int32))
    env.step(np.zeros(2, np.int32))
    with pytest.raises(StageFailed, match=r"failed in step: ZeroDivisionError: it broke \(.*own.py"):
        env.step(np.zeros(2, np.int32))
