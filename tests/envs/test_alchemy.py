"""Symbolic Alchemy equals a literal one; chemistries, their split and known policies' scores are as the rules say."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.envs.make import make
from pipelines.envs.suites import alchemy
from tests.envs.literal import assert_equal
from tests.envs.literal_alchemy import LiteralAlchemy, connected_rule_sets

STREAMS = {"stones": alchemy.STONES, "potions": alchemy.POTIONS}


def made(num_envs=8, *, seed=3, split="train", **params):
    return make("alchemy", num_envs=num_envs, seed=seed, split=split, params=params)


def literal_of(env):
    s = env.settings

    def one(i):
        episode = env.episodes.current[i : i + 1].copy()
        return LiteralAlchemy(
            env.tasks(np.array([i]))[0],
            lambda stream, counter: float(env.draws.uniform(episode, stream, counter)[0]),
            STREAMS,
            trials=s.trials,
            trial_steps=s.trial_steps,
            end_trial=s.end_trial,
        )

    return one


@pytest.mark.parametrize(
    "params", [{"trials": 3}, {"trials": 2, "trial_steps": 7}, {"trials": 3, "end_trial": True}], ids=str
)
@pytest.mark.parametrize("good", [0.0, 0.7])
def test_equals_the_literal_laboratory(params, good):
    env = made(num_envs=6, **params)
    assert assert_equal(env, literal_of(env), steps=130, good=good) > 6


def test_a_whole_episode_of_the_rules_equals_the_literal_one():
    env = made(num_envs=3, holdout=0)
    assert assert_equal(env, literal_of(env), steps=420, good=0.5) == 6


def test_there_are_109_graphs():
    literal = {frozenset(rules.items()) for rules in connected_rule_sets()}
    ours = {frozenset(((int(i), int(j)), int(rules[i, j])) for i, j in np.argwhere(rules)) for rules in alchemy.RULES}
    assert ours == literal
    assert len(ours) == 109
    assert np.bincount([len(rules) for rules in ours]).tolist() == [1, 12, 48, 48]
    assert alchemy.NUM_CHEMISTRIES == 167_424


def test_the_number_of_constraints_is_uniform():
    drawn = alchemy.draw_chemistries(made().draws, 0, np.arange(20_000), holdout=0.0, test=False)
    graphs = np.unravel_index(drawn, alchemy.SIZES)[0]
    counts = np.bincount(np.count_nonzero(alchemy.RULES[graphs], axis=(1, 2))) / len(drawn)
    np.testing.assert_allclose(counts, 0.25, atol=0.012)
    for part, size in zip(np.unravel_index(drawn, alchemy.SIZES)[1:], (8, 4, 48), strict=True):
        np.testing.assert_allclose(np.bincount(part, minlength=size) * size / len(drawn), 1, atol=0.2)


def test_train_and_test_share_no_chemistry():
    sides = {}
    for split in ("train", "test"):
        env = made(num_envs=5000, split=split)
        env.reset()
        assert (alchemy.is_held_out(env.chemistry, 0.2) == (split == "test")).all()
        sides[split] = set(env.chemistry.tolist())
    assert not sides["train"] & sides["test"]
    held_out = alchemy.is_held_out(np.arange(alchemy.NUM_CHEMISTRIES), 0.2)
    assert held_out.mean() == pytest.approx(0.2, abs=0.005)


def test_no_two_ways_of_showing_stones_are_one_with_its_axes_exchanged():
    """Else a held-out chemistry could be one of training under another name."""
    looks = alchemy.STONE_LOOKS[:, :, :8].reshape(32, 8, 5)
    seen = set()
    for order in alchemy.ORDERS:
        again = [int(np.flatnonzero((v[order] == alchemy.VERTICES).all(axis=1))[0]) for v in alchemy.VERTICES]
        seen |= {looks[i][again].tobytes() for i in range(32)}
    assert len(seen) == 32 * 6


def test_every_name_is_read_back():
    numbers = np.random.default_rng(0).integers(alchemy.NUM_CHEMISTRIES, size=200).tolist()
    assert [alchemy.find_chemistry(alchemy.name_chemistry(number)) for number in numbers] == numbers


def random_actions(env, rng):
    return lambda observation: rng.integers(40, size=env.num_envs)


def potions_at_random(env, rng):
    """From what is seen alone: a random potion for a random stone that is not the best yet, while there are potions; a
    stone goes into the cauldron once it is the best, or pays and no potion is left.
    """

    def act(observation):
        seen = observation["obs"]
        stones, potions = seen[:, :15].reshape(-1, 3, 5), seen[:, 15:].reshape(-1, 12, 2)[:, :, 1] == 0
        value, there = stones[:, :, 3], stones[:, :, 4] == 0
        some = potions.any(axis=1, keepdims=True)
        wanting = there & (value < 0.9) & some
        sold = there & ((value > 0.9) | (value > 0) & ~some)
        poured = 2 + 13 * _any_of(wanting, rng) + _any_of(potions, rng)
        return np.where(sold.any(axis=1), 1 + 13 * sold.argmax(axis=1), np.where(wanting.any(axis=1), poured, 0))

    return act


def _any_of(allowed, rng):
    return np.where(allowed, rng.random(allowed.shape), -1).argmax(axis=1)


def mean_return(policy, episodes, *, num_envs=500):
    env = made(num_envs=num_envs, seed=7, holdout=0)
    act = policy(env, np.random.default_rng(1))
    total = 0.0
    for _ in range(episodes // num_envs):
        observation = env.reset()
        for _ in range(env.spec.horizon):
            result = env.step(act(observation))
            observation = result.observation
            total += float(result.reward.sum())
        assert result.terminated.all()
    return total / episodes


def test_known_policies_score_as_they_should():
    """Standard errors of 500 episodes: 2.2 and 0.8."""
    assert mean_return(potions_at_random, 500) == pytest.approx(146.5, abs=7)
    assert mean_return(random_actions, 500) == pytest.approx(21.6, abs=6)


@pytest.mark.slow
def test_known_policies_score_as_published():
    assert mean_return(potions_at_random, 20_000) == pytest.approx(146.5, abs=3)
    assert mean_return(random_actions, 20_000) == pytest.approx(21.6, abs=4)
