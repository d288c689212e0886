"""Random policies cover their space; scripted ones are found by name."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.envs.make import make
from pipelines.errors import InputMissing, UsageError
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Spaces
from pipelines.rollout.policies import ExpertPolicy, FunctionPolicy, Policy, RandomPolicy, make_scripted_policy
from tests.envs.own import Counting, fixed

SPACES = Spaces(observation={"obs": Box(shape=(1,))}, action=Discrete(n=2))


@pytest.mark.parametrize(
    "space", [Discrete(n=300), Box(shape=(2, 2)), MultiDiscrete(nvec=(2, 7)), MultiBinary(n=3)], ids=str
)
def test_random_actions_have_the_systems_form_and_cover_the_space(space):
    policy = RandomPolicy(space, seed=0)
    actions = policy.act({}, None, None, np.zeros(4000))
    assert actions.dtype == space.dtype
    assert actions.shape == (4000, *space.shape)
    if isinstance(space, Box):
        assert actions.min() < -0.99
        assert actions.max() > 0.99
    else:
        high = {Discrete: 300, MultiDiscrete: [2, 7], MultiBinary: 2}[type(space)]
        np.testing.assert_array_equal(actions.max(axis=0), np.broadcast_to(np.array(high) - 1, space.shape))
        assert actions.min() == 0


def test_random_state_goes_on():
    policy, other = RandomPolicy(SPACES.action, seed=0), RandomPolicy(SPACES.action, seed=5)
    time = np.zeros(50)
    policy.act({}, None, None, time)
    other.load_state_dict(policy.state_dict())
    np.testing.assert_array_equal(policy.act({}, None, None, time), other.act({}, None, None, time))


def scripted(attribute):
    return make_scripted_policy(f"tests.envs.own:{attribute}", spaces=SPACES, num_actors=3, seed=0)


def test_a_class_an_object_and_a_function_can_be_named():
    made = scripted("Counting")
    assert isinstance(made, Counting)
    assert made.spaces is SPACES
    assert scripted("fixed") is fixed
    function = scripted("go_right")
    assert isinstance(function, FunctionPolicy)
    assert isinstance(function, Policy)
    assert function.act({}, None, None, np.zeros(3)).tolist() == [0, 0, 0]


def test_what_is_not_there_is_explained():
    with pytest.raises(InputMissing, match="has no 'nothing'"):
        scripted("nothing")
    with pytest.raises(InputMissing, match="no module 'no_such'"):
        make_scripted_policy("no_such:x", spaces=SPACES, num_actors=1, seed=0)
    with pytest.raises(UsageError, match="is a int"):
        scripted("number")


def test_an_environment_without_an_expert_is_refused():
    with pytest.raises(UsageError, match="has no expert"):
        ExpertPolicy(make("gym:CartPole-v1", num_envs=1, seed=0))
