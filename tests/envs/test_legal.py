"""Random actions among the legal ones, by counting."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.config.settings import ExplorationSettings
from pipelines.envs.exploration import Exploration
from pipelines.envs.legal import LegalActions
from pipelines.errors import UsageError
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space, Spaces
from pipelines.rollout.policies import RandomPolicy

COUNT = 30_000


def legal_of(action: Space) -> LegalActions:
    size = action.flat_size
    return LegalActions("obs.legal", Spaces(observation={"obs.legal": Box(shape=(size,))}, action=action))


def seen(*mask: float) -> dict[str, np.ndarray]:
    return {"obs.legal": np.tile(np.array(mask, np.float32), (COUNT, 1))}


def shares(actions: np.ndarray, size: int) -> np.ndarray:
    return np.bincount(actions, minlength=size) / len(actions)


def test_legal_choices_are_equally_likely_and_others_impossible() -> None:
    actions = legal_of(Discrete(n=5)).draw(seen(0, 2.5, -1, 1, 0.5), np.random.default_rng(0))
    assert actions.dtype == np.int32
    np.testing.assert_allclose(shares(actions, 5), [0, 1 / 3, 0, 1 / 3, 1 / 3], atol=0.01)
    assert not np.isin(actions, [0, 2]).any()


def test_each_actor_has_its_own_legal_choices() -> None:
    masks = np.random.default_rng(1).integers(0, 2, (COUNT, 7))
    masks[:, 0] |= masks.sum(1) == 0
    actions = legal_of(Discrete(n=7)).draw({"obs.legal": masks}, np.random.default_rng(0))
    assert masks[np.arange(COUNT), actions].all()


def test_where_none_is_legal_all_are() -> None:
    actions = legal_of(Discrete(n=3)).draw(seen(0, 0, 0), np.random.default_rng(0))
    np.testing.assert_allclose(shares(actions, 3), 1 / 3, atol=0.01)


def test_each_place_has_its_own_part_of_the_column() -> None:
    actions = legal_of(MultiDiscrete(nvec=(2, 3, 2))).draw(seen(0, 1, 1, 0, 1, 0, 0), np.random.default_rng(0))
    np.testing.assert_allclose(shares(actions[:, 0], 2), [0, 1], atol=0)
    np.testing.assert_allclose(shares(actions[:, 1], 3), [0.5, 0, 0.5], atol=0.01)
    np.testing.assert_allclose(shares(actions[:, 2], 2), 0.5, atol=0.01)  # none legal here


def test_a_bit_that_is_not_legal_stays_unset() -> None:
    actions = legal_of(MultiBinary(n=3)).draw(seen(1, 0, 1), np.random.default_rng(0))
    assert actions.dtype == np.uint8
    np.testing.assert_allclose(actions.mean(0), [0.5, 0, 0.5], atol=0.01)


@pytest.mark.parametrize("space", [Discrete(n=4), MultiDiscrete(nvec=(2, 2)), MultiBinary(n=4)])
def test_exploration_replaces_a_share_of_actions_by_legal_ones(space: Space) -> None:
    settings = ExplorationSettings(start=0.4, randomize=False, steps=10**9)
    explore = Exploration(settings, space, COUNT, legal=legal_of(space))
    wanted = np.ones((COUNT, *space.shape), space.dtype)  # legal, each of them
    executed, epsilon = explore(wanted, np.zeros(COUNT), seen(1, 1, 0, 1))
    assert executed.shape == wanted.shape
    assert (epsilon == 0.4).all()
    changed = executed != wanted
    if isinstance(space, Discrete):
        assert set(executed.tolist()) == {0, 1, 3}
        assert changed.mean() == pytest.approx(0.4 * 2 / 3, abs=0.01)
    elif isinstance(space, MultiDiscrete):
        np.testing.assert_allclose(changed.mean(0), [0.4 / 2, 0], atol=0.01)
    else:
        np.testing.assert_allclose(changed.mean(0), [0.2, 0.2, 0.4, 0.2], atol=0.01)


def test_without_exploration_an_action_is_left_alone() -> None:
    explore = Exploration(ExplorationSettings(kind="none"), Discrete(n=2), COUNT, legal=legal_of(Discrete(n=2)))
    executed, _ = explore(np.zeros(COUNT, np.int32), np.zeros(COUNT), seen(0, 1))
    assert not executed.any()


def test_the_random_policy_keeps_to_what_is_legal_and_repeats_itself_by_its_seed() -> None:
    def act(seed: int) -> np.ndarray:
        policy = RandomPolicy(Discrete(n=4), seed=seed, legal=legal_of(Discrete(n=4)))
        return policy.act(seen(1, 0, 0, 1), np.zeros(COUNT), np.zeros(COUNT), np.zeros(COUNT))

    assert set(act(0).tolist()) == {0, 3}
    np.testing.assert_array_equal(act(0), act(0))
    assert (act(0) != act(1)).any()


@pytest.mark.parametrize(
    ("column", "action", "said"),
    [
        ("obs.x", Discrete(n=4), r"'obs.x' is not an observation of shape \(4,\)"),
        ("obs.legal", Discrete(n=3), r"not an observation of shape \(3,\)"),
        ("obs.legal", Box(shape=(4,)), "not for Box actions"),
    ],
)
def test_a_column_that_cannot_say_it_is_refused(column: str, action: Space, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        LegalActions(column, Spaces(observation={"obs.legal": MultiBinary(n=4)}, action=action))
