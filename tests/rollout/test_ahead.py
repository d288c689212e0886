"""Parts of an environment go on by themselves; what comes of it is what comes of steps of everybody together."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from pipelines.envs.env import ActorsFailed, Env
from pipelines.errors import Interrupted
from pipelines.rollout.policies import RandomPolicy
from tests.rollout.test_parts import WALK, Parts, rollout_in

MOST_AHEAD = 64


class Signalling(Env):
    """A part that says when its step has ended: `delay()` seconds after it began."""

    def __init__(self, env, delay):
        super().__init__(num_envs=env.num_envs)
        self.env, self.spec, self.episodes, self._delay = env, env.spec, env.episodes, delay
        self._place, self._end = os.pipe()
        self.begun = self.ended = 0

    @property
    def waits_on(self):
        return [self._place]

    def begin_step(self, actions):
        self.begun += 1
        self.env.begin_step(actions)
        if delay := self._delay():
            threading.Timer(delay, self.signal).start()
        else:
            self.signal()

    def signal(self):
        os.write(self._end, b".")

    def end_step(self):
        os.read(self._place, 1)
        self.ended += 1
        return self.env.end_step()

    def reset(self, mask=None):
        return self.env.reset(mask)

    def step(self, actions):
        raise NotImplementedError

    def tasks(self, indices):
        return self.env.tasks(indices)

    def goal_texts(self, indices):
        return self.env.goal_texts(indices)


class Uneven(Parts):
    """Parts that say when their steps have ended, of which the one called `slow` often takes its time."""

    def __init__(self, sizes, *, slow, seed=0, params=None):
        super().__init__(WALK, sizes, seed=0, params=params or {})
        rng = np.random.default_rng(seed)
        self._parts = [
            Signalling(part, (lambda: rng.choice([0.0, 1e-3, 8e-3])) if number == slow else (lambda: 0.0))
            for number, part in enumerate(self._parts)
        ]
        self.lead = 0
        for part in self._parts:
            part.env.begin_step = self._noticed(part.env.begin_step)

    def _noticed(self, begin_step):
        def begun(actions):
            self.lead = max(self.lead, max(p.begun for p in self._parts) - min(p.ended for p in self._parts))
            begin_step(actions)

        return begun


def in_order(stored):
    """As bytes, since nothing may differ, but for the time of day."""
    return [
        ({name: values.tobytes() for name, values in columns.items()}, info.task, info.epsilon, info.success)
        for columns, info in stored
    ]


@pytest.mark.system
@pytest.mark.parametrize(("sizes", "slow"), [((3, 3), 0), ((3, 3), 1), ((1, 5), 0), ((2, 2, 2), 1)])
def test_who_ends_first_changes_nothing_not_even_the_order(sizes, slow):
    together, expected = rollout_in(Parts(WALK, sizes, seed=0, params={}))
    env, heard = Uneven(sizes, slow=slow), []
    apart, stored = rollout_in(env, on_episode=heard.append)
    for steps in (50, 1, 200, 49, 300):
        alike = [rollout.run(steps=steps) for rollout in (together, apart)]
        for name in ("steps", "trajectories", "return_mean", "success_mean"):
            np.testing.assert_equal(getattr(alike[0], name), getattr(alike[1], name))
        assert in_order(stored) == in_order(expected)
    assert [episode.task for episode in heard] == [info.task for _, info in stored]
    assert 2 < env.lead <= MOST_AHEAD
    assert apart.exploration.steps == together.exploration.steps


def test_nobody_is_too_far_ahead_and_what_ends_waits_for_its_turn():
    env = Uneven((3, 3), slow=0)
    slow, quick = env.parts
    slow._delay = lambda: 0.5  # for as long as the other may need to get ahead
    rollout, stored = rollout_in(env)
    for number in range(1, MOST_AHEAD):
        rollout.step()
        assert (slow.ended, quick.ended) == (0, number)
    assert quick.episodes.current.max() >= 6  # an episode has ended
    assert not stored
    rollout.step()
    assert (slow.ended, quick.ended) == (1, MOST_AHEAD)
    slow._delay = lambda: 0.0
    rollout.settle()
    assert stored


@pytest.mark.parametrize(("seconds", "most"), [(0.25, 4), (0.1, 10), (3.0, 2)])
def test_nobody_is_more_than_a_second_ahead_but_two_steps(monkeypatch, seconds, most):
    now = [0.0]
    monkeypatch.setattr("pipelines.rollout.rollout.time", SimpleNamespace(perf_counter=lambda: now[0], time=time.time))
    env = Uneven((3, 3), slow=0)
    slow, quick = env.parts
    slow._delay = lambda: 0.5  # for as long as the other may need to get ahead
    rollout, _ = rollout_in(env)
    for number in range(1, most + 1):
        now[0] += seconds
        rollout.step()
        assert (slow.ended, quick.ended) == (int(number == most), number)
    slow._delay = lambda: 0.0
    rollout.settle()


@pytest.mark.parametrize("slow", [0, 1])
def test_an_interruption_loses_nothing_and_the_run_goes_on(slow, monkeypatch):
    monkeypatch.setattr("pipelines.rollout.rollout._PROGRESS_SECONDS", 0.0)
    whole, expected = rollout_in(Parts(WALK, (3, 3), seed=0, params={}))
    whole.run(steps=300)
    env, told = Uneven((3, 3), slow=slow), []
    rollout, stored = rollout_in(env)

    def listener(event):
        told.append(event)
        if len(told) == 31:
            raise Interrupted("enough")

    with pytest.raises(Interrupted):
        rollout.run(steps=300, listener=listener)
    ended = sum(len(columns["reward"]) - 1 for columns, _ in stored)
    assert ended + sum(int(group.time.sum()) for group in rollout._groups) == rollout.total_steps
    rollout.run(steps=300 - rollout.total_steps)
    found, wanted = ({each[1]: each for each in in_order(of)} for of in (stored, expected))
    assert len(found) == len(stored)
    assert found == wanted


@pytest.mark.parametrize("slow", [0, 1])
def test_what_breaks_stops_everybody_and_everything_is_handed_over_once(slow):
    rollout, stored = rollout_in(
        Uneven((2, 2), slow=slow, params={"fault": "raise", "every": 4, "at": 5}), keep_unfinished=True
    )
    with pytest.raises(ActorsFailed, match="it broke"):
        rollout.run(steps=10_000)
    assert all(not info.tags for _, info in stored)
    rollout.finish()
    tasks = [info.task for _, info in stored]
    assert len(set(tasks)) == len(tasks)
    assert sum(len(columns["reward"]) - 1 for columns, _ in stored) == rollout.total_steps


@pytest.mark.system
@pytest.mark.parametrize("slow", [0, 1])
def test_what_breaks_is_collected_again_as_by_everybody_together(slow):
    params, found = {"fault": "raise", "every": 3, "at": 5}, []
    for env in (Uneven((3, 3), slow=slow, params=params), Parts(WALK, (3, 3), seed=0, params=params)):
        rollout, stored = rollout_in(env, on_env_error="restart")
        stats = rollout.run(steps=500)
        found.append((stats.steps, stats.env_errors, stats.episodes_dropped, in_order(stored)))
    assert found[0] == found[1]
    assert found[0][1] > 3


@pytest.mark.parametrize("slow", [0, 1])
def test_what_replaces_the_policy_acts_for_all_from_one_step_on(slow):
    def run(env):
        rollout, stored = rollout_in(env)
        calls = []

        def between():
            calls.append(None)
            if len(calls) == 10:
                rollout.policy = RandomPolicy(env.spec.spaces.action, seed=7)
                rollout.policy_version = 1

        rollout.run(steps=30 * 6, between=between)
        assert len(calls) == 30
        return [(*each, info.policy_version) for each, (_, info) in zip(in_order(stored), stored, strict=True)]

    env = Uneven((3, 3), slow=slow)
    assert run(env) == run(Parts(WALK, (3, 3), seed=0, params={}))
    assert env.lead > 2


def test_stop_is_asked_before_each_step_of_everybody():
    rollout, _ = rollout_in(Uneven((3, 3), slow=0))
    asked = iter([False] * 12 + [True])
    assert rollout.run(steps=10**6, stop=lambda: next(asked)).steps == 12 * 6
