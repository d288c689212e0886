"""How many actors and workers there are when nobody says."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import CollectSettings, Settings
from pipelines.envs import gymnasium_env
from pipelines.envs.env import Env, Trial
from pipelines.envs.make import make
from pipelines.envs.workers import WorkerEnv
from pipelines.errors import StageFailed
from pipelines.rollout import environment
from pipelines.rollout.environment import choose_actors, make_env, share_out, with_actors, workers
from pipelines.stages import collect
from pipelines.stages import run as chain
from tests.tiers import some

WALK = "tests.envs.breaking:Walk"


def try_out(env: Env, longest: float = 0.0) -> Trial | None:
    with contextlib.closing(env):
        return env.try_out(longest)


def sized(given: Settings, stored: dict[str, Any] | None = None, **more: Any) -> CollectSettings:
    return with_actors(given.collect, given.env, stored, **more)


def processes(given: Settings, *, actors: int) -> int:
    return workers(given.env, given.collect, actors=actors)


def settings(name="meta-frozen-lake", *, env=None, **collect):
    return Settings.model_validate({"env": {"name": name, **(env or {})}, "collect": collect})


@pytest.mark.parametrize(
    ("name", "steps", "actors"),
    [
        ("tmaze", 10**6, 128),
        ("tmaze", 10, 1),  # an episode has 11 steps
        ("tmaze", 2 * 11 * 5, 5),
        ("tmaze", 2 * 11 * 16, 16),
        ("tmaze", 4 * 11 * 32, 32),
        ("tmaze", 4 * 11 * 32 - 1, 16),
    ],
)
def test_more_actors_where_they_step_as_a_batch_and_have_time_for_episodes(name, steps, actors):
    assert sized(settings(name, steps=steps)).actors == actors


@pytest.mark.system
@pytest.mark.parametrize(
    ("milliseconds", "length", "collect", "actors"),
    some(
        [
            (0.05, 9.0, {"workers": 2}, 256),
            (0.15, 9.0, {"workers": 2}, 256),
            (0.15, 9.0, {"workers": 2, "steps": 4 * 9 * 32}, 32),
            (0.15, 9.0, {"workers": 2, "steps": 4 * 9 * 32 - 1}, 16),
            (0.15, None, {"workers": 2, "steps": 4 * 12 * 32}, 32),  # at most 12 steps
            (0.15, None, {"workers": 2, "steps": 4 * 12 * 32 - 1}, 16),
            (1e9, 9.0, {"workers": 2}, 16),
            (0.05, 9.0, {"workers": 0}, 32),  # the loop about them takes a part of it
            (0.015, 9.0, {"workers": 0}, 128),
            (0.015, 9.0, {"workers": 0, "steps": 4 * 9 * 32}, 32),
            (0.1, 9.0, {"workers": 0}, 16),
            (0.05, 9.0, {"workers": 2, "actors": 24}, 24),
            (0.15, 9.0, {"workers": 2, "steps": 4 * 9 * 32, "policy": "random"}, 32),
            (0.15, 9.0, {"workers": 2, "steps": 4 * 12 * 32 - 1, "policy": "expert"}, 16),  # may last as long as any
            (0.15, 9.0, {"workers": 2, "steps": 4 * 12 * 32, "policy": "expert"}, 32),
            (0.15, 9.0, {"workers": 2, "steps": 4 * 12 * 32 - 1, "follow": "runs/it"}, 16),
        ],
        2,
        5,
        9,
        11,
    ),
)
def test_more_actors_where_a_step_in_workers_is_quick(milliseconds, length, collect, actors):
    quick, seen = settings(WALK, **({"steps": 10**9} | collect)), Trial(seconds=milliseconds * 1e-3, length=length)
    assert sized(quick, trial=lambda env, longest: seen).actors == actors


@pytest.mark.parametrize(
    ("collects", "actors"),
    [
        ([11 * 128] * 4, 128),  # an episode has 11 steps
        ([11 * 128 - 1, 10**6], 64),  # to learn from after the first
        ([11 * 128] * 3, 64),
        ([10] * 10**4, 16),
        ([], 32),
    ],
)
def test_actors_of_a_chain_end_an_episode_the_first_time_and_four_in_all(collects, actors):
    assert sized(settings("tmaze", steps=4 * 11 * 32), collects=collects).actors == actors


@pytest.mark.parametrize(
    ("horizon", "collect", "expected"),
    [
        (400, {}, (10_000, 12)),
        (1500, {}, (10_000, 3)),
        (6000, {}, (12_000, 1)),
        (6000, {"steps": 8000}, (8000, 1)),
        (6000, {"actors": 4}, (12_000, 4)),
        (1500, {"actors": 16}, (10_000, 16)),
    ],
)
def test_steps_and_actors_are_such_that_each_actor_ends_two_episodes(horizon, collect, expected):
    found = sized(settings("dark-key-door", env={"horizon": horizon}, **collect))
    assert (found.steps, found.actors) == expected


def test_a_chain_collects_as_many_steps_however_long_episodes_are():
    found = sized(settings("dark-key-door", env={"horizon": 6000}), collects=[10_000] * 4)
    assert (found.steps, found.actors) == (10_000, 16)


@pytest.mark.system
def test_episodes_that_are_short_at_random_need_no_fewer_actors():
    walk = settings(WALK, env={"length": 6000}, workers=0)
    assert sized(walk, trial=lambda env, longest: Trial(seconds=1e-3, length=180.0)).actors == 16
    assert sized(walk, trial=lambda env, longest: Trial(seconds=1e-3, length=None)).actors == 1


def test_a_run_goes_on_with_the_steps_that_it_began_with():
    assert sized(settings(), {"collect": {"steps": 700, "actors": 2}}).steps == 700


@pytest.mark.system
def test_a_chain_counts_all_its_epochs(tmp_path):
    document = {
        "env": {"name": "tmaze"},
        "agent": {"sequence": {"d_model": 8, "num_layers": 1, "num_heads": 1, "d_ff": 8}},
        "collect": {"steps": 11 * 64},
        "epochs": 4,
        "stages": [{"stage": "collect"}, {"stage": "collect", "every": 2, "steps": 11}],
    }
    chain.run(Settings.model_validate(document), run=tmp_path / "run")
    assert RunDirectory(tmp_path / "run").load_document()["collect"]["actors"] == 64


@pytest.mark.parametrize(
    ("milliseconds", "most", "workers", "cores", "actors"),
    [
        (2.0, 128, "auto", 2, 32),  # 16 actors a message
        (0.5, 128, "auto", 2, 128),
        (0.3, 256, "auto", 2, 256),
        (0.47, 256, "auto", 2, 128),
        (0.5, 127, "auto", 2, 64),
        (0.5, 128, "auto", 4, 128),
        (0.2, 128, 2, 4, 128),
        (2.0, 128, 2, 4, 64),  # a worker has two parts
        (0.1, 128, "auto", 2, 128),  # 16 would not be in workers
        (0.1, 256, "auto", 2, 256),
        (0.03, 128, "auto", 2, 16),  # nor would 128 gain by it
        (0.03, 256, "auto", 2, 16),  # nor 256: what a step brings is passed on as slowly
        (0.03, 256, 2, 2, 256),
        (0.03, 128, 2, 2, 128),
        (0.2, 128, 0, 2, 16),
        (0.2, 128, "auto", 1, 16),
        (50.0, 128, "auto", 2, 16),
        (0.0, 128, "auto", 2, 16),  # it breaks
        (0.0, 128, 2, 2, 16),
        (2.4, 128, 1, 1, 32),
        (3.8, 128, 1, 1, 16),
        (0.5, 0, 2, 2, 16),
    ],
)
def test_a_message_to_a_worker_is_some_milliseconds_of_work(milliseconds, most, workers, cores, actors):
    assert choose_actors(milliseconds * 1e-3, most=most, workers=workers, cores=cores) == actors


def test_a_number_that_is_given_stays():
    assert sized(settings(steps=10**6, actors=5)).actors == 5
    assert sized(settings(steps=10**6, actors=5), {"collect": {"actors": 7}}).actors == 5
    assert processes(settings(workers=3), actors=5) == 3


def test_a_run_goes_on_with_as_many_as_it_began_with():
    assert sized(settings(steps=10**6), {"collect": {"actors": 7}}).actors == 7
    assert sized(settings(steps=10**6), {"collect": {"actors": "auto"}}).actors == 128
    assert sized(settings(steps=10**6), {}).actors == 128


@pytest.mark.parametrize(
    ("seconds", "actors", "cores", "expected"),
    [(1.9e-3, 16, 8, 0), (2e-3, 16, 8, 2), (5.5e-3, 16, 8, 5), (1.0, 16, 8, 8), (1.0, 3, 8, 3), (0.0, 16, 8, 0)],
)
def test_workers_have_a_millisecond_of_work_each(seconds, actors, cores, expected):
    assert share_out(seconds, actors=actors, cores=cores) == expected


@pytest.mark.system
def test_a_trial_finds_out_what_a_step_takes():
    slow = try_out(make(WALK, num_envs=1, seed=0, params={"seconds": 2e-3}))
    assert slow is not None
    assert 2e-3 <= slow.seconds < 60
    assert try_out(make("tmaze", num_envs=1, seed=0)) is None
    assert try_out(make(WALK, num_envs=1, seed=0, params={"fault": "raise"})) is None
    assert processes(settings(), actors=16) == 0
    assert processes(settings(WALK, env={"fault": "raise"}), actors=16) == 0


@pytest.mark.system
def test_a_users_environment_is_tried_in_a_process_that_it_may_end(monkeypatch):
    monkeypatch.setattr(environment, "count_cores", lambda: 2)
    ends = settings(WALK, env={"fault": "leave"})
    assert processes(ends, actors=16) == 2
    assert processes(ends, actors=1) == 1
    assert sized(ends).actors
    with pytest.raises(StageFailed, match=r"cannot be stepped in this process.* exit code 7") as caught:
        sized(settings(WALK, env={"fault": "leave"}, workers=0))
    assert caught.value.hint == "give --workers 1"


@pytest.mark.system
def test_an_environment_that_ends_its_process_is_one_line(tmp_path):
    with pytest.raises(StageFailed, match=r"is gone: worker process .* ended with exit code 7"):
        collect.run(settings(WALK, env={"fault": "leave"}), lake=tmp_path / "lake")
    with pytest.raises(StageFailed, match=r"cannot be made: worker process .* ended with exit code 8"):
        collect.run(settings("tests.envs.breaking:EndsProcess"), lake=tmp_path / "lake")


def test_a_trial_finds_out_how_long_an_episode_is(monkeypatch):
    short = try_out(make(WALK, num_envs=1, seed=0, params={"length": 2}))  # 1 or 2 steps
    assert short is not None
    assert short.length is not None
    assert 1.4 < short.length < 1.6
    fixed = try_out(make("gym:Pendulum-v1", num_envs=1, seed=0), 1000.0)  # 200 steps, and some of the next episode
    assert fixed == Trial(seconds=fixed.seconds if fixed else 0.0, length=200.0)
    monkeypatch.setattr(gymnasium_env, "_TRIAL_STEPS", 1)
    none, some, long = (try_out(make(WALK, num_envs=1, seed=0), longest) for longest in (0.0, 12.0, 4.0))
    assert none is not None
    assert none.length is None
    assert some is not None
    assert some.length is not None
    assert 6.0 <= some.length <= 12.0
    assert long is not None
    assert long.length is None  # 6 steps at least


def test_a_trial_does_not_wait_for_an_end_that_is_far(monkeypatch):
    monkeypatch.setattr(gymnasium_env, "_ENDED_SECONDS", 0.05)
    far = try_out(make(WALK, num_envs=1, seed=0, params={"length": 200, "seconds": 2e-3}), 200.0)
    assert far is not None
    assert far.length is None


@pytest.mark.system
def test_environments_are_where_they_are_asked_to_be():
    here, there = (make_env(settings("tmaze").env, actors=2, seed=0, workers=count) for count in (0, 1))
    assert not isinstance(here, WorkerEnv)
    assert isinstance(there, WorkerEnv)
    there.close()
