"""A rollout over workers is that of one process; what breaks costs its own episodes only."""

from __future__ import annotations

import os
import re
import signal
from itertools import product

import numpy as np
import pytest

from pipelines.config.settings import ExplorationSettings
from pipelines.envs.env import ActorsFailed, Env
from pipelines.envs.exploration import Exploration
from pipelines.envs.make import make
from pipelines.envs.workers import Worker, WorkerEnv
from pipelines.events import Waiting
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from pipelines.rollout.policies import FunctionPolicy, RandomPolicy
from pipelines.rollout.rollout import Recording, Rollout
from tests.envs.own import Counting
from tests.tiers import crossed, some

WALK = "tests.envs.breaking:Walk"
EXPLORATION = ExplorationSettings(start=0.9, end=0.1, steps=40)


class Parts(Env):
    """An environment in this process that says it is of several parts, each of so many actors."""

    def __init__(self, name, sizes, *, seed, params):
        super().__init__(num_envs=sum(sizes))
        self._parts, first = [], 0
        for size in sizes:
            part = make(name, num_envs=size, seed=seed, params=params)
            part.episodes = self.episodes.slice(first, size)
            self._parts.append(part)
            first += size
        self.spec = self._parts[0].spec

    @property
    def parts(self):
        return tuple(self._parts)

    def reset(self, mask=None):
        raise NotImplementedError

    def step(self, actions):
        raise NotImplementedError

    def tasks(self, indices):
        raise NotImplementedError


def rollout_in(env, policy=None, *, seed=1, keep_unfinished=False, **options):
    stored, action = [], env.spec.spaces.action
    rollout = Rollout(
        env,
        policy or RandomPolicy(action, seed=seed),
        exploration=Exploration(EXPLORATION, action, env.num_envs, horizon=env.spec.horizon, seed=seed),
        recording=Recording(
            sink=lambda found: stored.extend((dict(each.columns), each.info) for each in found),
            seed=seed,
            keep_unfinished=keep_unfinished,
        ),
        **options,
    )
    return rollout, stored


def ordered(stored):
    """By task, which tells episodes apart here; as bytes, since nothing may differ."""
    found = {}
    for columns, info in stored:
        told = {name: values.tobytes() for name, values in columns.items()}
        said = (info.goal_text, info.success, info.attempts, info.epsilon, info.seed)
        found[info.task] = told | {"told": said}
    assert len(found) == len(stored)
    return found


@pytest.mark.parametrize("sizes", [(3, 3), (4, 2), (1, 5), (2, 2, 2)])
def test_what_is_collected_does_not_depend_on_the_parts(sizes):
    here, expected = rollout_in(make(WALK, num_envs=6, seed=0))
    there, stored = rollout_in(Parts(WALK, sizes, seed=0, params={}))
    for rollout in (here, there):
        for steps in (50, 1, 200, 49):
            rollout.run(steps=steps)
        rollout.finish()
    assert ordered(stored) == ordered(expected)
    assert there.total_steps == here.total_steps == 318
    assert there.exploration.steps == here.exploration.steps == 53


@pytest.mark.system
@pytest.mark.parametrize(("workers", "cores"), some([*product([1, 2, 3], [1, 64])], 3))
def test_what_is_collected_does_not_depend_on_the_workers(workers, cores):
    here, expected = rollout_in(make(WALK, num_envs=6, seed=0))
    there, stored = rollout_in(WorkerEnv(WALK, num_envs=6, workers=workers, seed=0, cores=cores))
    assert here.run(steps=400).steps == there.run(steps=400).steps
    assert ordered(stored) == ordered(expected)
    there.env.close()


@pytest.mark.parametrize("scripted", [False, True])
def test_a_policy_that_cannot_act_in_parts_sees_everybody(scripted):
    if scripted:
        policies = [Counting(spaces=None, num_actors=6, seed=0) for _ in range(2)]
    else:
        policies = [FunctionPolicy(lambda obs, action, reward, time: (obs["obs.n"] % 3).astype(np.int32))] * 2
    here, expected = rollout_in(make(WALK, num_envs=6, seed=0), policies[0])
    there, stored = rollout_in(Parts(WALK, (3, 3), seed=0, params={}), policies[1])
    here.run(steps=300)
    there.run(steps=300)
    assert ordered(stored) == ordered(expected)
    if scripted:
        for (a, r, t), (b, s, u) in zip(policies[0].seen, policies[1].seen, strict=True):
            assert (a.tolist(), r.tolist(), t.tolist()) == (b.tolist(), s.tolist(), u.tolist())


@pytest.mark.parametrize("space", [Discrete(n=4), Box(shape=(2,)), MultiDiscrete(nvec=(2, 5)), MultiBinary(n=3)])
def test_random_numbers_are_those_of_an_actor_whatever_the_parts(space):
    def drawn(sizes):
        policy, exploration = RandomPolicy(space, seed=0), Exploration(EXPLORATION, space, 5, seed=0)
        places = [slice(0, 5)]
        if sizes:
            assert policy.split(sizes)
            assert exploration.split(sizes)
            places = [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
        found = []
        for t in range(6):
            rows = []
            for part, place in enumerate(places):
                time = np.full(5, t % 3)[place]
                told = {"part": part} if sizes else {}
                actions = policy.act({}, np.zeros(0), np.zeros(0), time, **told)
                rows.append(exploration(actions, time, **told))
            found.append([np.concatenate(each).tolist() for each in zip(*rows, strict=True)])
        return found

    assert drawn(None) == drawn([2, 3]) == drawn([1, 3, 1])


def test_who_is_behind_catches_up_before_the_policy_changes():
    rollout, _ = rollout_in(Parts(WALK, (3, 3), seed=0, params={"length": 99}))
    for _ in range(4):
        rollout.step()
    assert rollout.total_steps == 4 * 3 + 3 * 3
    rollout.policy = RandomPolicy(rollout.env.spec.spaces.action, seed=7)
    assert rollout.total_steps == 24
    assert [len(prefix["reward"]) for prefix in rollout.prefixes()] == [4] * 6


BREAKS = [
    ("raise", "ZeroDivisionError: it broke"),
    ("nan", "reward is nan"),
    ("nan-observation", "not finite"),
    ("shape", "has shape"),
    ("reset", "failed in reset .* cannot begin"),
]


@pytest.mark.parametrize(("fault", "words"), BREAKS)
def test_what_breaks_is_told_dropped_and_begun_anew(fault, words):
    whole, expected = rollout_in(make(WALK, num_envs=4, seed=0))
    told = []
    params = {"fault": fault, "every": 5}
    env = make(WALK, num_envs=4, seed=0, params=params)
    rollout, stored = rollout_in(env, on_env_error="restart", on_failure=told.append)
    stats = rollout.run(steps=600)
    whole.run(steps=600)
    assert stats.steps >= 600
    assert stats.env_errors == len(told) > 3
    assert all("Traceback" in failure.trace for failure in told)
    assert stats.episodes_dropped == (0 if fault == "reset" else len(told))
    assert all(re.search(words, failure.message) for failure in told)
    broken = {info.task for _, info in stored if int(info.task.split("-")[1]) // 2 % 5 == 0}
    assert all(len(c["reward"]) - 1 <= 3 for c, i in stored if i.task in broken)  # ended before it could break
    lengths = {info.task: len(columns["reward"]) for columns, info in expected}
    assert all(lengths.get(info.task, len(c["reward"])) == len(c["reward"]) for c, info in stored)


def test_what_breaks_stops_everybody_and_what_they_had_is_kept():
    env = make(WALK, num_envs=4, seed=0, params={"fault": "raise", "every": 4})
    rollout, stored = rollout_in(env, keep_unfinished=True)
    with pytest.raises(ActorsFailed, match=r"failed in step \(actor \d, reset seed \d+\): ZeroDivisionError"):
        rollout.run(steps=10_000)
    ended = len(stored)
    assert rollout.finish() > 0
    assert rollout.episodes_dropped == rollout.env_errors == 1
    assert sum(len(columns["reward"]) - 1 for columns, _ in stored) == rollout.total_steps
    assert all(info.tags for _, info in stored[ended:])


def test_what_breaks_every_time_is_given_up():
    env = make(WALK, num_envs=2, seed=0, params={"fault": "reset"})
    told = []
    rollout, _ = rollout_in(env, on_env_error="restart", on_failure=told.append)
    with pytest.raises(ActorsFailed, match=r"cannot begin.*5th time in a row"):
        rollout.run(steps=10)
    assert len(told) == 8


@pytest.mark.system
@pytest.mark.parametrize(
    ("fault", "how", "cores"),
    some(
        [
            ("kill", "was killed by SIGKILL", 1),
            ("kill", "was killed by SIGKILL", 64),
            ("leave", "ended with exit code 7", 1),
            ("leave", "ended with exit code 7", 64),
        ],
        0,
        3,
    ),
)
def test_a_worker_that_dies_costs_its_own_actors_episodes_only(fault, how, cores):
    told = []
    params = {"fault": fault, "every": 4, "at": 4}
    env = WorkerEnv(WALK, num_envs=4, workers=2, seed=0, params=params, cores=cores)
    rollout, stored = rollout_in(env, on_env_error="restart", on_failure=told.append)
    stats = rollout.run(steps=200)
    env.close()
    assert how in told[0].message
    assert f"environment '{WALK}'" in told[0].message
    assert len(told) == stats.env_errors > 0
    assert stats.env_errors <= stats.episodes_dropped <= 2 * stats.env_errors
    assert stats.steps >= 200
    here = {}
    for columns, info in rollout_of(600):
        here[info.task] = columns["obs.x"]
    for columns, info in stored:  # an episode's numbers are its own, whoever died beside it
        if info.task in here and len(here[info.task]) == len(columns["obs.x"]):
            np.testing.assert_array_equal(columns["obs.x"], here[info.task])


@pytest.mark.system
@pytest.mark.parametrize(
    ("params", "ends", "cores"),
    some(
        [
            ({"fault": "wear", "at": 80, "length": 6}, True, 1),
            ({"fault": "wear", "at": 80, "length": 6}, True, 64),
            ({"fault": "leave"}, False, 1),
            ({"fault": "leave"}, False, 64),
        ],
        1,
        2,
    ),
)
def test_a_worker_that_dies_soon_after_each_start_is_given_up_whether_or_not_episodes_end(params, ends, cores):
    env = WorkerEnv(WALK, num_envs=4, workers=2, seed=0, params=params, cores=cores)
    told = []
    rollout, stored = rollout_in(env, on_env_error="restart", on_failure=told.append)
    with pytest.raises(ActorsFailed, match=r"ended with exit code 7.*5th time in a row"):
        rollout.run(steps=5_000)
    env.close()
    assert 4 <= len(told) <= 8
    assert bool(stored) == ends


@pytest.mark.system
def test_dead_workers_are_replaced_side_by_side(monkeypatch):
    env = WorkerEnv(WALK, num_envs=4, workers=4, seed=0, cores=64)
    rollout, _ = rollout_in(env, on_env_error="restart")
    rollout.run(steps=8)
    calls = []
    for name in ("replace", "introduce"):
        real = getattr(Worker, name)
        monkeypatch.setattr(Worker, name, lambda self, name=name, real=real: (calls.append(name), real(self))[1])
    for pid in env.pids:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    rollout.run(steps=8)
    env.close()
    assert calls == 4 * ["replace"] + 4 * ["introduce"]


@pytest.mark.system
@pytest.mark.parametrize(("on_env_error", "cores"), crossed(["stop", "restart"], [1, 64]))
def test_a_step_that_takes_longer_than_it_may_is_a_failure(on_env_error, cores):
    params, told = {"fault": "hang"}, []
    env = WorkerEnv(WALK, num_envs=2, workers=2, seed=0, params=params, cores=cores, timeout_seconds=0.2)
    rollout, _ = rollout_in(env, on_env_error=on_env_error, on_failure=told.append)
    with pytest.raises(ActorsFailed, match=r"took longer than 0\.2 s for a step or a reset") as caught:
        rollout.run(steps=1_000)
    env.close()
    assert ("5th time in a row" in str(caught.value)) == (on_env_error == "restart")
    assert 4 * (on_env_error == "restart") <= len(told) <= 8


@pytest.mark.system
@pytest.mark.parametrize("cores", [1, 64])
def test_progress_names_the_part_that_is_waited_for(cores):
    heard = []

    def hear(event):
        heard.append(event)
        if "worker process" in event.what:
            raise KeyboardInterrupt

    env = WorkerEnv(WALK, num_envs=4, workers=2, seed=0, params={"fault": "hang"}, cores=cores, listener=hear)
    rollout, _ = rollout_in(env)
    with pytest.raises(KeyboardInterrupt):
        rollout.run(steps=1_000, listener=hear)
    env.close()
    assert Waiting(what=f"a step of environment '{WALK}'", stoppable=False) in heard
    assert re.search(rf"environment '{WALK}', actors \d to \d.* \(worker process \d+\)", heard[-1].what)


def rollout_of(steps):
    rollout, stored = rollout_in(make(WALK, num_envs=4, seed=0))
    rollout.run(steps=steps)
    return stored


@pytest.mark.system
@pytest.mark.parametrize("cores", [1, 64])
def test_a_worker_killed_between_steps_is_noticed_in_all_its_parts(cores):
    env = WorkerEnv(WALK, num_envs=8, workers=2, seed=0, params={"length": 60}, cores=cores)
    told = []
    rollout, _ = rollout_in(env, on_env_error="restart", on_failure=told.append)
    rollout.run(steps=80)
    os.kill(env.pids[0], signal.SIGKILL)
    stats = rollout.run(steps=80)
    assert stats.steps >= 80
    assert (stats.env_errors, stats.episodes_dropped, len(told)) == (1, 4, 1)
    env.close()
