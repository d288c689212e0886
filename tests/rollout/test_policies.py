"""Random policies cover their space; scripted ones are found by name."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.envs.make import make
from pipelines.errors import InputMissing, StageFailed, UsageError
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Spaces
from pipelines.rollout.policies import (
    CheckedPolicy,
    ChoicePolicy,
    ExpertPolicy,
    FunctionPolicy,
    Policy,
    RandomPolicy,
    fit_actions,
    make_scripted_policy,
)

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
    assert made.spaces is SPACES  # its own attributes are reached through the checks
    for policy in (made, scripted("fixed"), scripted("go_right")):
        assert isinstance(policy, Policy)
        assert policy.act({}, np.zeros(3, "i4"), np.zeros(3), np.zeros(3)).shape == (3,)
    assert not isinstance(scripted("fixed"), ChoicePolicy)
    assert scripted("go_right").act({}, None, None, np.zeros(3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("space", "given"),
    [
        (Discrete(n=2), np.array([0, 99])),
        (Discrete(n=2), np.array([0, -1])),
        (Discrete(n=2), np.array([0.0, np.nan])),
        (Discrete(n=2), np.array([0.0, 0.7])),
        (Discrete(n=2), ["left", "right"]),
        (Discrete(n=2), None),
        (MultiDiscrete(nvec=(2, 3)), [[0, 2], [2, 0]]),
        (MultiBinary(n=2), [[0, 1], [2, 0]]),
        (Box(shape=(1,)), [[0.5], [np.nan]]),
        (Box(shape=(1,)), [["a"], ["b"]]),
    ],
)
def test_what_is_not_an_action_is_refused_with_the_name_of_who_gave_it(space, given):
    policy = CheckedPolicy(FunctionPolicy(lambda *_: given), "mine:Wrong", space)
    with pytest.raises(StageFailed, match="policy 'mine:Wrong' gave actions that are not of their space"):
        policy.act({}, None, None, np.zeros(2))


def test_actions_are_converted_to_stored_form():
    assert fit_actions([[3.0], [-0.5]], Box(shape=(1,)), "it").tolist() == [[1.0], [-0.5]]
    started = fit_actions(np.array([0.0, 2.0]), Discrete(n=3, start=5), "it")  # counted from 0 all the same
    assert (started.tolist(), started.dtype) == ([0, 2], np.dtype("int32"))


def test_a_policy_that_fails_is_named():
    def fail(*_):
        raise RuntimeError("confused")

    with pytest.raises(StageFailed, match="policy 'mine:Expert' failed: RuntimeError: confused"):
        CheckedPolicy(FunctionPolicy(fail), "mine:Expert", Discrete(n=2)).act({}, None, None, np.zeros(2))


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
