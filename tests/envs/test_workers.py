"""Environments in worker processes are those of this process, whatever their number, and what dies is replaced."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from pipelines.envs.env import ActorsFailed
from pipelines.envs.make import make
from pipelines.envs.workers import WorkerEnv
from pipelines.errors import InputMissing, StageFailed, UsageError
from pipelines.processes import RemoteTraceback
from tests.envs.contract import first_tasks, play, sample
from tests.tiers import some

WALK = "tests.envs.breaking:Walk"


APART, OVERLAPPING = {"cores": 1}, {"cores": 64}  # workers of each part of the actors, or of all of them


@pytest.fixture(
    scope="module", params=[pytest.param(APART, marks=pytest.mark.system), OVERLAPPING], ids=["apart", "overlapping"]
)
def shared(request):
    """Seven actors in two processes; a test resets them all before it begins."""
    env = WorkerEnv(WALK, num_envs=7, workers=2, seed=3, **request.param)
    yield env
    env.close()


def assert_same(one, other):
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        for name, values in mine.items():
            np.testing.assert_array_equal(values, theirs[name])


def afresh(env):
    env.load_state_dict({"next_episode": 0})
    return env


@pytest.mark.system
def test_what_is_played_is_what_is_played_here(shared):
    here = make(WALK, num_envs=7, seed=3)
    assert shared.spec == here.spec
    assert_same(play(afresh(shared), 60), play(here, 60))
    everybody = np.arange(7)
    assert shared.tasks(everybody) == here.tasks(everybody)
    assert shared.goal_texts(everybody) == here.goal_texts(everybody)
    assert shared.state_dict() == here.state_dict()


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "num_envs", "workers", "cores"),
    some(
        [
            ("meta-frozen-lake", 5, 1, 1),
            ("meta-frozen-lake", 5, 1, 64),
            (WALK, 3, 3, 1),
            (WALK, 3, 3, 64),
            (WALK, 1, 2, 1),
            (WALK, 1, 2, 64),
            (WALK, 7, 3, 1),
            (WALK, 7, 3, 64),
        ],
        0,
        3,
        5,
        6,
    ),
)
def test_any_number_of_workers_plays_the_same(name, num_envs, workers, cores):
    env = WorkerEnv(name, num_envs=num_envs, workers=workers, seed=3, split="test", cores=cores)
    here = make(name, num_envs=num_envs, seed=3, split="test")
    assert_same(play(env, 30), play(here, 30))
    env.close()
    assert not any(_alive(pid) for pid in env.pids)


def test_what_was_shown_is_never_written_again(shared):
    rows = play(afresh(shared), 20)
    copies = [{name: np.array(values) for name, values in row.items()} for row in rows]
    play(shared, 20, seed=1)
    assert_same(rows, copies)


def test_an_episode_s_end_is_told_before_the_next_has_begun(shared):
    here = make(WALK, num_envs=7, seed=3)
    rng = np.random.default_rng(0)
    afresh(shared).reset()
    here.reset()
    for _ in range(30):
        actions = sample(here.spec.spaces.action, 7, rng)
        theirs, ours = shared.step(actions), here.step(actions)
        over = ours.terminated
        np.testing.assert_array_equal(theirs.terminated, over)
        everybody = np.arange(7)
        assert shared.tasks(everybody) == here.tasks(everybody)
        assert shared.goal_texts(everybody) == here.goal_texts(everybody)
        np.testing.assert_array_equal(shared.episodes.current, here.episodes.current)
        if over.any():
            shared.reset(over)
            here.reset(over)
            assert shared.tasks(everybody) == here.tasks(everybody)


@pytest.mark.system
@pytest.mark.parametrize(
    ("num_envs", "workers", "cores", "sizes", "of_each"),
    [
        (16, 2, 2, [8, 8], [[0], [1]]),  # a process more than cores: who acts has to share one
        (16, 2, 3, [8, 8], [[0, 1], [0, 1]]),
        (16, 3, 2, [11, 5], [[0, 2], [1]]),  # as many actors a worker
        (7, 4, 4, [4, 3], [[0, 2], [1, 3]]),
        (4, 3, 3, [3, 1], [[0, 2], [1]]),
        (16, 1, 1, [8, 8], [[0], [0]]),
        (3, 2, 8, [3], [[0, 1]]),
        (1, 4, 1, [1], [[0]]),
    ],
)
def test_parts_have_workers_of_their_own_where_cores_are_few(num_envs, workers, cores, sizes, of_each):
    env = WorkerEnv("tmaze", num_envs=num_envs, workers=workers, seed=0, cores=cores)
    assert [part.num_envs for part in env.parts] == sizes
    assert [[env.pids.index(worker.pid) for worker in part._workers] for part in env.parts] == of_each
    env.close()


@pytest.mark.system
def test_a_part_with_workers_of_its_own_tells_when_they_have_answered():
    params = {"seconds": 0.1}
    env = WorkerEnv(WALK, num_envs=3, workers=3, seed=0, cores=1, params=params)
    env.reset()
    first, second = env.parts
    assert first.waits_on == []
    for part in env.parts:
        part.begin_step(np.zeros(part.num_envs, np.int32))
    assert len(first.waits_on) == 2
    assert len(second.waits_on) == 1
    for place in [*first.waits_on, *second.waits_on]:
        assert select.select([place], [], [], 600)[0]
    for pid in env.pids:
        os.kill(pid, signal.SIGSTOP)
    first.end_step()  # needs nothing more of the workers
    second.end_step()
    for pid in env.pids:
        os.kill(pid, signal.SIGCONT)
    assert first.waits_on == second.waits_on == []
    env.close()


@pytest.mark.system
@pytest.mark.parametrize("cores", some([1, 64], 1))
def test_tasks_that_are_named_are_played(cores):
    names = first_tasks("tmaze", 8, seed=0)[::-1][:2]
    env = WorkerEnv("tmaze", num_envs=4, workers=2, seed=0, cores=cores)
    env.play_only(names)
    env.reset()
    assert env.tasks(np.arange(4)) == [*names, *names]
    with pytest.raises(InputMissing, match="not a task of environment"):
        env.play_only(["nowhere"])
    env.close()


@pytest.mark.system
def test_the_expert_is_asked_in_its_process():
    env, here = WorkerEnv("tmaze", num_envs=3, workers=1, seed=0), make("tmaze", num_envs=3, seed=0)
    assert env.has_expert
    env.reset()
    here.reset()
    np.testing.assert_array_equal(env.expert(), here.expert())
    env.close()


def test_there_is_no_expert_where_there_is_none(shared):
    assert not shared.has_expert
    assert shared.expert() is None


def failing(env, steps):
    """The first failure within `steps` random steps, what it brought, and who was not in it."""
    rng = np.random.default_rng(0)
    env.reset()
    for _ in range(steps):
        try:
            result = env.step(sample(env.spec.spaces.action, env.num_envs, rng))
        except ActorsFailed as error:
            lost = [actor for failure in error.failures for actor in failure.actors]
            return error, np.setdiff1d(np.arange(env.num_envs), lost)
        over = result.terminated | result.truncated
        if over.any():
            env.reset(over)
    raise AssertionError("nothing failed")


@pytest.mark.system
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "ZeroDivisionError: it broke"),
        ("exit", "SystemExit"),
        ("nan", "reward is nan"),
        ("shape", "has shape"),
    ],
)
def test_an_environment_that_breaks_does_not_break_others(fault, words):
    params = {"fault": fault, "every": 3}
    env, here = (
        WorkerEnv(WALK, num_envs=4, workers=2, seed=0, params=params),
        make(WALK, num_envs=4, seed=0, params=params),
    )
    (theirs, others), (ours, _) = failing(env, 40), failing(here, 40)
    assert words in str(theirs)
    assert [(f.actors, f.message) for f in theirs.failures] == [(f.actors, f.message) for f in ours.failures]
    assert "Traceback" in theirs.failures[0].trace
    assert isinstance(theirs.__cause__, RemoteTraceback)
    for name, column in ours.brought.observation.items():
        np.testing.assert_array_equal(theirs.brought.observation[name][others], column[others])
    lost = np.ones(4, dtype=bool)
    lost[others] = False
    np.testing.assert_array_equal(env.reset(lost)["obs.x"], here.reset(lost)["obs.x"])
    still = np.zeros(4, np.int32)
    np.testing.assert_array_equal(env.step(still).reward, here.step(still).reward)
    env.close()


@pytest.mark.system
@pytest.mark.parametrize(
    ("cores", "told", "gone"), [(1, [False], [3, 4, 5]), (64, [False, True], [1, 2, 4, 5])]
)  # of one part, or of both
def test_a_worker_that_is_killed_is_replaced_and_numbers_go_on(cores, told, gone):
    env = WorkerEnv(WALK, num_envs=6, workers=2, seed=0, cores=cores)
    env.reset()
    env.step(np.zeros(6, np.int32))
    os.kill(env.pids[1], signal.SIGKILL)
    with pytest.raises(ActorsFailed, match=r"worker process \d+ was killed by SIGKILL, which played actors") as caught:
        env.step(np.zeros(6, np.int32))
    failures = caught.value.failures
    assert [failure.reported for failure in failures] == told
    lost = sorted(actor for failure in failures for actor in failure.actors)
    assert lost == gone
    mask = np.isin(np.arange(6), lost)
    observation = env.reset(mask)
    here = make(WALK, num_envs=6, seed=0)
    here.reset()
    expected = here.reset(mask)
    np.testing.assert_array_equal(observation["obs.x"][mask], expected["obs.x"][mask])
    assert env.tasks(np.array(lost)) == here.tasks(np.array(lost))
    assert env.episodes.current.tolist() == here.episodes.current.tolist()
    env.step(np.zeros(6, np.int32))
    env.close()


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "error", "words"),
    some(
        [
            ("tests.envs.breaking:Shy", StageFailed, "not today"),
            ("tests.envs.breaking:Nobody", InputMissing, "Nobody"),
            ("no-such", UsageError, "unknown environment"),
        ],
        0,
    ),
)
def test_what_cannot_be_made_is_refused_as_here(name, error, words):
    with pytest.raises(error, match=words) as theirs:
        WorkerEnv(name, num_envs=2, workers=1, seed=0)
    with pytest.raises(error) as ours:
        make(name, num_envs=2, seed=0)
    assert theirs.value.message == ours.value.message


@pytest.mark.system
def test_workers_end_with_the_process_that_started_them():
    code = (
        "import os, sys, time; from pipelines.envs.workers import WorkerEnv\n"
        f"env = WorkerEnv({WALK!r}, num_envs=2, workers=2, seed=0); env.reset(); print(*env.pids, flush=True)\n"
        "time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    assert len(pids) == 2
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until = time.monotonic() + 600
    while any(_alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
