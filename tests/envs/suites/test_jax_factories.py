"""`jax:MODULE:FACTORY`: environments of each interface end as they say, and show how."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gymnax")

from pipelines import trust
from pipelines.envs.make import make, requirement
from pipelines.errors import InputMissing, UsageError
from pipelines.lake.spaces import Box, Discrete, MultiDiscrete
from tests.envs import contract

WORLDS = f"jax:{__name__.rpartition('.')[0]}.jax_worlds:"
DISCRETE = ("OldGymnax", "Inherited", "NavixWorld", "JumanjiWorld")
ALL = (*DISCRETE, "Continuous", "BraxWorld")


@pytest.mark.parametrize("factory", ["OldGymnax", "JumanjiWorld"])
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_each_interface_keeps_the_contract(check, factory):
    check(WORLDS + factory)


def counted(env):
    parts = env.spec.spaces.observation
    return "obs.count" if "obs.count" in parts else "obs"


@pytest.mark.parametrize("factory", ALL)
def test_a_success_terminates_and_shows_its_true_final_observation(factory):
    env = make(WORLDS + factory, num_envs=6, seed=0)
    env.reset()
    act = np.ones(6, dtype=np.int32) if factory in DISCRETE else np.ones((6, 1), dtype=np.float32)
    lengths = np.zeros(6, dtype=int)
    for step in range(1, 7):
        result = env.step(act)
        over = result.terminated & (lengths == 0)
        assert not result.truncated.any()
        assert (result.reward[over] == 1).all()
        np.testing.assert_array_equal(result.observation[counted(env)][over, 0], np.full(over.sum(), step))
        lengths[over] = step
        if result.terminated.any():
            begun = env.reset(result.terminated)
            assert (begun[counted(env)][result.terminated] == 0).all()
    assert set(lengths.tolist()) <= {3, 4, 5, 6}
    assert len(set(lengths.tolist())) > 1  # each actor has random numbers of its own


@pytest.mark.parametrize("factory", [name for name in ALL if name != "BraxWorld"])
def test_a_time_limit_truncates(factory):
    env = make(WORLDS + factory, num_envs=2, seed=0)
    assert env.spec.horizon == 7
    env.reset()
    act = np.zeros(2, dtype=np.int32) if factory in DISCRETE else -np.ones((2, 1), dtype=np.float32)
    ends = [(env.step(act)) for _ in range(7)]
    assert [(bool(r.terminated.any()), bool(r.truncated.all())) for r in ends] == [(False, False)] * 6 + [(False, True)]


def test_actions_may_be_several_choices():
    env = make(f"{WORLDS}Several", num_envs=2, seed=0)
    assert env.spec.spaces.action == MultiDiscrete(nvec=(2, 3))
    env.reset()
    result = env.step(np.array([[1, 0], [0, 2]], dtype=np.int32))
    np.testing.assert_array_equal(result.observation["obs.count"], [[1], [0]])


def test_a_limit_of_ones_own_truncates():
    for factory in ("BraxWorld", "NavixWorld", "OldGymnax", "unlimited"):
        env = make(WORLDS + factory, num_envs=2, seed=0, params={"max_episode_steps": 2})
        assert env.spec.horizon == 2
        env.reset()
        still = np.zeros((2, 1), dtype=np.float32) if factory == "BraxWorld" else np.zeros(2, dtype=np.int32)
        assert not env.step(still).truncated.any()
        result = env.step(still)
        assert result.truncated.all()
        assert not result.terminated.any()
    assert make(f"{WORLDS}BraxWorld", num_envs=1, seed=0).spec.horizon == 1000
    assert make(f"{WORLDS}unlimited", num_envs=1, seed=0).spec.horizon is None


def test_spaces_and_parameters():
    env = make(f"{WORLDS}OldGymnax", num_envs=1, seed=0, params={"params": {"bonus": 0.25}})
    assert env.spec.spaces.action == Discrete(n=2)
    assert env.spec.spaces.observation["obs.target"] == Box(shape=(), dtype="int32")
    env.reset()
    assert env.step(np.zeros(1, dtype=np.int32)).reward == 0.25
    assert make(f"{WORLDS}unlimited", num_envs=1, seed=0).interface.params.bonus == 0.5
    for factory, bound in (("Continuous", 2.0), ("BraxWorld", 1.0)):
        action = make(WORLDS + factory, num_envs=1, seed=0).spec.spaces.action
        assert action == Box(shape=(1,), low=(-bound,), high=(bound,))
    assert set(make(f"{WORLDS}JumanjiWorld", num_envs=1, seed=0).spec.spaces.observation) == {"obs.count", "obs.legal"}


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        (f"{WORLDS}nothing", {}, "gives int, which has no reset and step"),
        (f"{WORLDS}Neither", {}, "gives Neither, whose interface is not known"),
        (f"{WORLDS}Wrapper", {}, "gives Wrapper, whose interface is not known"),
        (f"{WORLDS}OldGymnax", {"params": {"bonsu": 1.0}}, "has no parameter 'bonsu'"),
        (f"{WORLDS}BraxWorld", {"params": {"bonus": 1.0}}, "has no parameters to change"),
        (f"{WORLDS}OldGymnax", {"options": {"size": 3}}, "does not take env.options"),
        ("jax:alone", {}, "names no factory"),
    ],
)
def test_mistakes_are_one_line(name, params, said):
    with pytest.raises(UsageError, match=said):
        make(name, num_envs=1, seed=0, params=params)


def test_a_factory_may_be_an_attribute_of_an_attribute():
    assert make(f"{WORLDS}Shelf.world", num_envs=1, seed=0).spec.horizon == 7


def test_a_state_that_actors_share_is_refused():
    env = make(f"{WORLDS}Shared", num_envs=2, seed=0)
    with pytest.raises(UsageError, match="shares a part of its state between actors; of MuJoCo Playground, choose MJX"):
        env.reset()


def test_a_factory_that_is_not_there_is_missing():
    with pytest.raises(InputMissing, match="no module 'no_such_worlds'"):
        make("jax:no_such_worlds:make", num_envs=1, seed=0)
    with pytest.raises(InputMissing, match="has no 'chess'"):
        make(f"{WORLDS}chess", num_envs=1, seed=0)
    with pytest.raises(InputMissing, match=r"has no 'Shelf\.chess'"):
        make(f"{WORLDS}Shelf.chess", num_envs=1, seed=0)
    assert requirement("jax:a:b") == ("jax", True)


def test_a_factory_that_was_only_read_from_a_file_is_not_imported():
    with trust.only(()), pytest.raises(InputMissing, match="would import the module"):
        make(f"{WORLDS}OldGymnax", num_envs=1, seed=0)
    with trust.only([f"{WORLDS}OldGymnax"]):
        make(f"{WORLDS}OldGymnax", num_envs=1, seed=0)
