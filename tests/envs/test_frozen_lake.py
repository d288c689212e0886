"""Meta-FrozenLake equals a literal implementation, under every option, and its exact figures are right."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.envs.make import make
from pipelines.envs.suites import frozen_lake as fl
from pipelines.errors import UsageError
from tests.envs.literal import LiteralFrozenLake, assert_equal
from tests.tiers import crossed

STREAMS = {
    "slip": fl.SLIP,
    "jitter": fl.JITTER,
    "jitter_row": fl.JITTER_ROW,
    "jitter_column": fl.JITTER_COLUMN,
    "melt": fl.MELT,
}


def literal_of(env: fl.FrozenLake):
    s = env.settings

    def one(i):
        episode = env.episodes.current[i : i + 1].copy()
        name = env.tasks(np.array([i]))[0]
        return LiteralFrozenLake(
            name.split()[0].split("/"),
            "swapped" in name,
            lambda stream, counter: float(env.draws.uniform(episode, stream, counter)[0]),
            STREAMS,
            attempts=s.attempts,
            limit=env.limit,
            hard=s.hard,
            recover=s.recover,
            slip=s.slip,
            show_progress=s.show_progress,
        )

    return one


OPTIONS = (
    {"size": 3, "attempts": 5},
    {"size": 4, "attempts": 3, "show_progress": False},
    {"size": 5, "attempts": 4, "max_episode_steps": 7},
    {"size": 4, "attempts": 3, "recover": True},
    {"size": 4, "attempts": 2, "slip": 0.3},
    {"size": 4, "attempts": 3, "hard": True},
    {"size": 3, "attempts": 4, "hard": True, "recover": True, "slip": 0.2},
)


@pytest.mark.system
@pytest.mark.parametrize(("params", "good"), crossed(OPTIONS, [0.8, 0.0]), ids=str)
def test_equals_the_literal_lake(params, good):
    env = make("meta-frozen-lake", num_envs=9, seed=3, params=params)
    assert assert_equal(env, literal_of(env), steps=260, good=good) > 9


def test_attempt_limits_follow_the_options():
    assert fl.FrozenLakeSettings(size=3).attempt_steps == 9
    assert fl.FrozenLakeSettings(size=4, hard=True).attempt_steps == 32
    assert fl.FrozenLakeSettings(size=4, slip=0.2).attempt_steps == 20
    assert fl.FrozenLakeSettings(size=4, max_episode_steps=10, hard=True).attempt_steps == 10


def test_expert_always_arrives():
    env = make("meta-frozen-lake", num_envs=64, seed=0, params={"size": 6, "attempts": 2})
    env.reset()
    ended = successes = 0
    while ended < 128:
        result = env.step(env.expert())
        ended += result.attempt_end.sum()
        successes += result.success.sum()
        over = result.terminated | result.truncated
        if over.any():
            env.reset(over)
    assert successes == ended


@pytest.mark.parametrize(("size", "steps", "expected"), [(3, 9, 0.07), (4, 16, 0.028)])
def test_random_success_by_enumeration_equals_the_simulated(size, steps, expected):
    exact = fl.compute_random_success(size, steps, 0.0, "train")
    assert exact == pytest.approx(expected, abs=0.004)
    env = make("meta-frozen-lake", num_envs=512, seed=1, params={"size": size, "attempts": 5, "holdout": 0})
    assert env.spec.random_success == (exact,) * 5
    env.reset()
    rng = np.random.default_rng(0)
    ended = successes = 0
    for _ in range(150):
        result = env.step(rng.integers(5, size=512))
        ended, successes = ended + result.attempt_end.sum(), successes + result.success.sum()
        over = result.terminated | result.truncated
        if over.any():
            env.reset(over)
    assert successes / ended == pytest.approx(exact, abs=5 * np.sqrt(exact / ended))


def test_hard_mode_swaps_actions_in_half_of_the_tasks():
    env = make("meta-frozen-lake", num_envs=4000, seed=0, params={"size": 3, "hard": True})
    env.reset()
    assert env.swapped.mean() == pytest.approx(0.5, abs=0.03)


def test_wrong_parameters_are_all_named_with_the_nearest_key():
    with pytest.raises(UsageError) as caught:
        make("meta-frozen-lake", num_envs=1, seed=0, params={"sise": 3, "attempts": 0})
    text = " ".join(caught.value.problems)
    assert "env.size" in text
    assert "env.attempts" in text
