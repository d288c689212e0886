"""Exploration noise that persists over steps: its marginal distribution, its correlation, and parts of the actors."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.config.settings import ExplorationSettings
from pipelines.envs.exploration import Exploration
from pipelines.envs.legal import LegalActions
from pipelines.errors import UsageError
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Spaces

ACTORS = 400


def make_exploration(space, actors=ACTORS, **settings):
    fixed = {"start": 0.3, "end": 0.3, "randomize": False, **settings}
    return Exploration(ExplorationSettings(**fixed), space, actors, seed=3)


def play(exploration, space, steps, first=0):
    """Return the executed actions (steps, N, ...) where the policy always takes zeros."""
    actors = exploration.state_dict()["multiplier"]
    zeros = np.zeros((len(actors), *space.shape), space.dtype)
    return np.stack([exploration(zeros, np.full(len(actors), first + t))[0] for t in range(steps)])


def correlation(noise, lag):
    return float(np.mean(noise[lag:] * noise[:-lag]) / np.mean(noise**2))


def test_noise_of_a_box_keeps_its_variance_and_is_correlated():
    space = Box(shape=(2,))
    noise = play(make_exploration(space, persistence=1e4, start=0.1, end=0.1), space, 300)
    assert noise.std() == pytest.approx(0.1, rel=0.03)
    assert noise[0].std() == pytest.approx(0.1, rel=0.1)
    assert correlation(noise, 1) > 0.8
    independent = play(make_exploration(space, start=0.1, end=0.1), space, 300)
    assert abs(correlation(independent, 1)) < 0.02


def test_a_rollout_draws_its_own_correlation_time():
    space = Box(shape=(1,))
    noise = play(make_exploration(space, persistence=1e4, start=0.1, end=0.1), space, 2000)[..., 0]
    each = np.array([correlation(noise[:, actor], 1) for actor in range(ACTORS)])
    # 1 - 1 / duration, with durations log-uniform from 1 to 10,000: a median of 1 - 1 / 100
    assert np.median(each) == pytest.approx(0.99, abs=0.01)
    assert (each < 0.5).mean() == pytest.approx(np.log(2) / np.log(1e4), abs=0.04)


@pytest.mark.parametrize("space", [Discrete(n=4), MultiDiscrete(nvec=(4, 4))], ids=["one", "several"])
def test_random_choices_are_repeated_and_as_frequent_as_epsilon(space):
    executed = play(make_exploration(space, persistence=20.0), space, 400)
    assert (executed != 0).mean() == pytest.approx(0.3 * 3 / 4, rel=0.08)
    random = executed != 0
    repeated = (executed[1:] == executed[:-1])[random[:-1]].mean()
    # renewed with chance 1 / duration, whose mean is (1 - 1 / 20) / ln 20; a new one is the same with chance .3 / 4
    renewed = (1 - 1 / 20) / np.log(20)
    assert repeated == pytest.approx(1 - renewed * (1 - 0.3 / 4), abs=0.03)


def test_a_new_rollout_begins_with_new_noise():
    space = Discrete(n=1000)
    exploration = make_exploration(space, persistence=1e6, start=1.0, end=1.0)
    first = play(exploration, space, 1)[0]
    again = play(exploration, space, 1)[0]
    assert (first == again).mean() < 0.05


@pytest.mark.parametrize("space", [Box(shape=(2,)), Discrete(n=5), MultiBinary(n=3)], ids=["box", "one", "bits"])
def test_parts_of_the_actors_get_the_noise_of_all(space):
    settings = {"persistence": 50.0, "explorers": 0.5, "end": 0.1, "steps": 4}
    whole, parts = (make_exploration(space, actors=6, **settings) for _ in range(2))
    assert parts.split([2, 4])
    expected = play(whole, space, 8)
    zeros = np.zeros((6, *space.shape), space.dtype)
    for part, place in ((1, slice(2, 6)), (0, slice(0, 2))):
        found = np.stack([parts(zeros[place], np.full(6, t)[place], None, part)[0] for t in range(8)])
        np.testing.assert_array_equal(found, expected[:, place])


def test_persistence_of_one_changes_no_draw():
    space = Discrete(n=4)
    np.testing.assert_array_equal(
        play(make_exploration(space), space, 50), play(make_exploration(space, persistence=1.0), space, 50)
    )


def test_persistence_with_an_action_mask_is_refused():
    space = Discrete(n=3)
    spaces = Spaces(observation={"obs.legal": MultiBinary(n=3)}, action=space)
    legal = LegalActions("obs.legal", spaces)
    with pytest.raises(UsageError, match="persistence"):
        Exploration(ExplorationSettings(persistence=5.0), space, 2, legal=legal)
