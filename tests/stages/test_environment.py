"""How many actors and workers there are when nobody says."""

from __future__ import annotations

import pytest

from pipelines.config.settings import Settings
from pipelines.envs.make import make
from pipelines.envs.workers import WorkerEnv
from pipelines.stages.environment import make_env, share_out, step_seconds, with_actors, workers

WALK = "tests.envs.breaking:Walk"


def settings(name="meta-frozen-lake", *, env=None, **collect):
    return Settings.model_validate({"env": {"name": name, **(env or {})}, "collect": collect})


@pytest.mark.parametrize(
    ("name", "steps", "actors"),
    [
        ("tmaze", 10**6, 64),
        ("tmaze", 10, 16),  # an episode has 11 steps
        ("tmaze", 4 * 11 * 32, 32),
        ("tmaze", 4 * 11 * 32 - 1, 16),
        ("gym:CartPole-v1", 10**9, 16),
        (WALK, 10**9, 16),
    ],
)
def test_more_actors_where_they_step_as_a_batch_and_have_time_for_episodes(name, steps, actors):
    assert with_actors(settings(name, steps=steps)).collect.actors == actors


def test_a_number_that_is_given_stays():
    assert with_actors(settings(steps=10**6, actors=5)).collect.actors == 5
    assert workers(settings(workers=3), actors=5) == 3


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
