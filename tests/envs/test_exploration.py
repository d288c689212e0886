"""Exploration schedules, by hand-computed rates and by counting."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pydantic import ValidationError

from pipelines.config.settings import ExplorationSettings
from pipelines.envs.exploration import Exploration, perturb
from pipelines.errors import UsageError
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, make_grid

SPACE = Discrete(n=4)


def make_exploration(num_actors=3, horizon=None, seed=0, **settings):
    return Exploration(ExplorationSettings(**settings), SPACE, num_actors, horizon=horizon, seed=seed)


@pytest.mark.parametrize(("progress", "expected"), [(0.0, 1.0), (0.5, 0.525), (1.0, 0.05)])
def test_plain_is_linear_in_the_steps_of_an_actor(progress, expected):
    exploration = make_exploration(2, steps=100, randomize=False)
    exploration.steps = int(100 * progress)
    assert exploration(np.zeros(2, int), np.zeros(2))[1] == pytest.approx([expected, expected])


@pytest.mark.parametrize(
    ("progress", "time", "expected"),
    [(0, 0, 1.0), (0, 10, 0.8), (0, 5, 0.9), (1, 0, 0.05), (1, 10, 0.01), (0.5, 5, (0.525 + 0.405) / 2)],
)
def test_bilevel_also_falls_within_a_rollout(progress, time, expected):
    exploration = make_exploration(1, kind="bilevel", horizon=11, steps=100, randomize=False)
    exploration.steps = int(100 * progress)
    assert exploration(np.zeros(1, int), np.array([time]))[1] == pytest.approx([expected])


def test_windowed_applies_the_full_rate_at_the_edges_only():
    exploration = make_exploration(horizon=21, kind="windowed", randomize=False, steps=10**9)
    rates = [exploration(np.zeros(3, int), np.full(3, t))[1][0] for t in range(21)]
    assert rates == pytest.approx([1.0] * 3 + [0.5 / 20] * 15 + [1.0] * 3)


def test_the_position_advances_once_a_step_and_stays_at_the_end():
    exploration = make_exploration(start=1.0, end=0.0, steps=4, randomize=False)
    rates = [exploration(np.zeros(3, int), np.full(3, t))[1][0] for t in range(6)]
    assert rates == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0])


def test_a_multiplier_is_drawn_for_each_rollout():
    exploration = make_exploration(num_actors=2000, start=1.0, end=1.0)
    first = exploration(np.zeros(2000, int), np.zeros(2000, int))[1]
    same = exploration(np.zeros(2000, int), np.ones(2000, int))[1]
    time = np.where(np.arange(2000) < 1000, 0, 2)
    changed = exploration(np.zeros(2000, int), time)[1]
    assert first.mean() == pytest.approx(0.5, abs=0.03)
    assert first.max() < 1
    np.testing.assert_array_equal(first, same)
    np.testing.assert_array_equal(first[1000:], changed[1000:])
    assert (first[:1000] != changed[:1000]).all()


def test_none_leaves_actions_alone():
    actions = np.arange(3)
    executed, epsilon = make_exploration(kind="none")(actions, np.zeros(3, int))
    np.testing.assert_array_equal(executed, actions)
    assert (epsilon == 0).all()


def test_discrete_actions_are_replaced_with_chance_epsilon():
    rng = np.random.default_rng(0)
    executed = perturb(np.zeros(40_000, np.int32), np.full(40_000, 0.4), SPACE, rng)
    assert (executed != 0).mean() == pytest.approx(0.4 * 3 / 4, abs=0.01)
    assert set(executed.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("persistence", [1.0, 20.0])
def test_actions_on_a_grid_are_replaced_by_its_points_with_chance_epsilon(persistence):
    grid = make_grid(Box(shape=(2,)), 3)
    settings = ExplorationSettings(kind="plain", start=0.4, end=0.4, steps=10, randomize=False, persistence=persistence)
    exploration = Exploration(settings, Box(shape=(2,)), 5000, seed=0, grid=grid)
    policy = np.full((5000, 2), 0.25, dtype=np.float32)
    executed, _ = exploration(policy, np.zeros(5000, dtype=np.int64))
    replaced = (executed != policy).any(1)
    assert replaced.mean() == pytest.approx(0.4, abs=0.03)
    assert executed.dtype == np.float32
    counts = [(executed[replaced] == point).all(1).mean() for point in grid]
    assert sum(counts) == pytest.approx(1)
    assert counts == pytest.approx([1 / 9] * 9, abs=0.03)


def test_box_actions_get_noise_and_stay_inside():
    rng = np.random.default_rng(0)
    epsilon = np.repeat([0.1, 0.0, 5.0], 3000)
    executed = perturb(np.zeros((9000, 2), np.float32), epsilon, Box(shape=(2,)), rng)
    assert executed.dtype == np.float32
    assert executed[:3000].std() == pytest.approx(0.1, abs=0.005)
    assert (executed[3000:6000] == 0).all()
    assert np.abs(executed).max() == 1.0


@pytest.mark.parametrize("space", [MultiDiscrete(nvec=(2, 5)), MultiBinary(n=2)])
def test_each_entry_is_drawn_anew(space):
    rng = np.random.default_rng(0)
    executed = perturb(np.zeros((20_000, 2), space.dtype), np.full(20_000, 0.5), space, rng)
    high = np.array(space.nvec) if isinstance(space, MultiDiscrete) else np.array([2, 2])
    np.testing.assert_allclose((executed != 0).mean(axis=0), 0.5 * (1 - 1 / high), atol=0.02)
    assert (executed < high).all()


@pytest.mark.parametrize("randomize", [False, True])
def test_a_share_of_the_rollouts_explores_as_at_the_beginning(randomize):
    n = 20_000
    exploration = make_exploration(n, start=0.75, end=0.25, steps=10, explorers=0.3, randomize=randomize)
    exploration.steps = 10
    epsilon = np.stack([exploration(np.zeros(n, int), np.full(n, time))[1] for time in (0, 1, 2, 0)])
    assert ((epsilon == 0.75) | ((epsilon < 0.25) if randomize else (epsilon == 0.25))).all()
    assert (epsilon == 0.75).mean(1) == pytest.approx(0.3, abs=0.02)
    np.testing.assert_array_equal(epsilon[0], epsilon[2])
    assert ((epsilon[0] == 0.75) & (epsilon[3] == 0.75)).mean() == pytest.approx(0.09, abs=0.01)


@pytest.mark.parametrize("explorers", [0.0, 0.5])
def test_state_goes_on_exactly(explorers):
    def run(exploration, first, count):
        return [exploration(np.zeros(3, int), np.full(3, t % 5))[0].tolist() for t in range(first, first + count)]

    settings = {"steps": 40, "explorers": explorers}
    whole = make_exploration(**settings)
    expected = run(whole, 0, 20)[8:]
    half, resumed = make_exploration(**settings), make_exploration(**settings, seed=9)
    run(half, 0, 8)
    resumed.load_state_dict(json.loads(json.dumps(half.state_dict())))
    assert run(resumed, 8, 12) == expected
    assert resumed.progress == 0.5


@pytest.mark.parametrize("name", ["start", "end"])
def test_a_probability_above_one_is_refused(name):
    settings = ExplorationSettings(**{name: 2.0})
    with pytest.raises(UsageError, match=rf"exploration\.{name} is 2"):
        Exploration(settings, Discrete(n=3), 2)
    Exploration(settings, Box(shape=(2,)), 2)


@pytest.mark.parametrize("kind", ["bilevel", "windowed"])
def test_a_schedule_within_rollouts_needs_a_horizon(kind):
    with pytest.raises(UsageError, match="fixed horizon"):
        make_exploration(kind=kind)


def halved(settings, *, progress, time, horizon, multiplier, every=1):
    """A schedule of one's own."""
    return settings.start * 0.5 ** (time / every) * multiplier


def one_for_all(settings, *, progress, time, horizon, multiplier):
    return 0.5


def test_a_schedule_of_ones_own_is_named_in_the_settings():
    settings = {"kind": f"{__name__}:halved", "start": 0.8, "options": {"every": 2}}
    exploration = make_exploration(start=0.8, randomize=False, kind=settings["kind"], options=settings["options"])
    assert exploration(np.zeros(3, int), np.array([0, 2, 4]))[1] == pytest.approx([0.8, 0.4, 0.2])
    randomized = make_exploration(num_actors=2000, **settings)
    executed, epsilon = randomized(np.zeros(2000, int), np.zeros(2000, int))
    assert epsilon.mean() == pytest.approx(0.4, abs=0.03)
    assert (executed != 0).mean() == pytest.approx(0.4 * 3 / 4, abs=0.04)


@pytest.mark.parametrize("options", [{"unknown": 1}, {"progress": 1}])
def test_options_that_a_schedule_does_not_take_are_refused(options):
    for kind in (f"{__name__}:halved", "plain"):
        with pytest.raises(UsageError, match="exploration"):
            make_exploration(kind=kind, options=options)


def test_a_schedule_must_say_an_epsilon_for_each_actor():
    with pytest.raises(UsageError, match="not one for each of 3 actors"):
        make_exploration(kind=f"{__name__}:one_for_all")(np.zeros(3, int), np.zeros(3, int))


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValidationError, match="known: bilevel, none, plain, windowed, or module:attr"):
        ExplorationSettings(kind="boltzmann")
    with pytest.raises(ValidationError, match="did you mean 'plain'"):
        ExplorationSettings(kind="plane")


def test_a_key_of_another_schedule_is_refused():
    with pytest.raises(ValidationError, match="'edge' applies to kind = \"windowed\" only"):
        ExplorationSettings(kind="plain", edge=5)
    settings = ExplorationSettings(kind="windowed", edge=5)
    assert ExplorationSettings.model_validate(settings.model_dump()) == settings
    assert ExplorationSettings.model_validate(ExplorationSettings().model_dump()) == ExplorationSettings()
