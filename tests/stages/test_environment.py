"""How many actors and workers there are when nobody says."""

from __future__ import annotations

import pytest

from pipelines.config.settings import Settings
from pipelines.envs.make import make
from pipelines.envs.workers import WorkerEnv
from pipelines.stages.environment import make_env, more_help, share_out, step_seconds, with_actors, workers

WALK = "tests.envs.breaking:Walk"


def settings(name="meta-frozen-lake", *, env=None, **collect):
    return Settings.model_validate({"env": {"name": name, **(env or {})}, "collect": collect})


@pytest.mark.parametrize(
    ("name", "steps", "actors"),
    [
        ("tmaze", 10**6, 128),
        ("tmaze", 10, 16),  # an episode has 11 steps
        ("tmaze", 4 * 11 * 32, 32),
        ("tmaze", 4 * 11 * 32 - 1, 16),
        ("gym:CartPole-v1", 10**9, 16),
        (WALK, 10**9, 16),
    ],
)
def test_more_actors_where_they_step_as_a_batch_and_have_time_for_episodes(name, steps, actors):
    assert with_actors(settings(name, steps=steps)).collect.actors == actors


@pytest.mark.parametrize(
    ("milliseconds", "collect", "actors"),
    [
        (0.05, {"workers": 2}, 128),
        (0.15, {"workers": 2}, 128),
        (0.15, {"workers": 2, "steps": 4 * 12 * 32}, 32),  # an episode has 12 steps
        (1e9, {"workers": 2}, 16),
        (0.05, {"workers": 0}, 16),
        (0.05, {"workers": 2, "actors": 24}, 24),
    ],
)
def test_more_actors_where_a_step_in_workers_is_quick(milliseconds, collect, actors):
    quick = settings(WALK, **({"steps": 10**9} | collect))
    assert with_actors(quick, trial=lambda env: milliseconds * 1e-3).collect.actors == actors


@pytest.mark.parametrize(
    ("milliseconds", "actors", "workers", "cores", "expected"),
    [
        (0.2, 16, "auto", 2, True),  # 8 actors a message
        (0.2, 64, "auto", 2, True),
        (0.2, 128, "auto", 2, False),
        (0.2, 128, 2, 4, True),  # a worker has two parts
        (0.4, 128, 2, 4, False),
        (0.02, 16, "auto", 2, False),  # no workers
        (0.02, 16, 0, 2, False),
        (0.2, 16, "auto", 1, False),
        (50.0, 16, "auto", 2, False),
        (0.0, 16, 2, 2, False),  # it breaks
        (1.4, 16, 1, 1, True),
        (1.5, 16, 1, 1, False),
    ],
)
def test_a_message_to_a_worker_is_some_milliseconds_of_work(milliseconds, actors, workers, cores, expected):
    assert more_help(milliseconds * 1e-3, actors=actors, workers=workers, cores=cores) is expected


def test_a_number_that_is_given_stays():
    assert with_actors(settings(steps=10**6, actors=5)).collect.actors == 5
    assert with_actors(settings(steps=10**6, actors=5), {"collect": {"actors": 7}}).collect.actors == 5
    assert workers(settings(workers=3), actors=5) == 3


def test_a_run_goes_on_with_as_many_as_it_began_with():
    assert with_actors(settings(steps=10**6), {"collect": {"actors": 7}}).collect.actors == 7
    assert with_actors(settings(steps=10**6), {"collect": {"actors": "auto"}}).collect.actors == 128
    assert with_actors(settings(steps=10**6), {}).collect.actors == 128


@pytest.mark.parametrize(
    ("seconds", "actors", "cores", "expected"),
    [(1.9e-3, 16, 8, 0), (2e-3, 16, 8, 2), (5.5e-3, 16, 8, 5), (1.0, 16, 8, 8), (1.0, 3, 8, 3), (0.0, 16, 8, 0)],
)
def test_workers_have_a_millisecond_of_work_each(seconds, actors, cores, expected):
    assert share_out(seconds, actors=actors, cores=cores) == expected


def test_a_trial_finds_out_what_a_step_takes():
    slow = make(WALK, num_envs=1, seed=0, params={"seconds": 2e-3})
    assert 2e-3 <= step_seconds(slow) < 0.2
    assert step_seconds(make("tmaze", num_envs=1, seed=0)) == 0.0
    assert step_seconds(make(WALK, num_envs=1, seed=0, params={"fault": "raise"})) == 0.0
    assert workers(settings(), actors=16) == 0


def test_environments_are_where_they_are_asked_to_be():
    here, there = (make_env(settings("tmaze"), actors=2, seed=0, workers=count) for count in (0, 1))
    assert not isinstance(here, WorkerEnv)
    assert isinstance(there, WorkerEnv)
    there.close()
