"""Dark Room equals a literal one, its split is of cells, and its figures of random play are exact."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.envs.make import make
from pipelines.envs.suites.dark_room import DarkRoomSettings, compute_random_play, list_goal_cells
from pipelines.errors import InputMissing, UsageError
from tests.envs import contract
from tests.envs.literal import Outcome, assert_equal

NAME = "dark-room"


class LiteralDarkRoom:
    def __init__(self, start, goal, *, size, attempts, steps, sparse):
        self.start, self.goal, self.size = start, goal, size
        self.attempts, self.steps, self.sparse, self.finished = attempts, steps, sparse, 0
        self.begin()

    def begin(self):
        self.place, self.time, self.found = self.start, 0, False

    def observe(self, fresh):
        x, y = self.place
        return {"obs": [x / self.size, y / self.size, float(fresh), self.finished / self.attempts]}

    def first(self):
        return self.observe(True)

    def step(self, action):
        self.time += 1
        dx, dy = [(0, -1), (-1, 0), (0, 1), (1, 0), (0, 0)][action]
        x, y = self.place[0] + dx, self.place[1] + dy
        if 0 <= x < self.size and 0 <= y < self.size:
            self.place = (x, y)
        reward = 0.0
        if self.place == self.goal:
            reward = 0.0 if self.sparse and self.found else 1.0
            self.found = True
        if self.time < self.steps:
            return Outcome(self.observe(False), reward, False, False, False, False, False)
        self.finished += 1
        last, success = self.finished == self.attempts, self.found
        if not last:
            self.begin()
        return Outcome(self.observe(not last), reward, last, False, not last, True, success)


def literal_of(env):
    s = env.settings

    def one(i):
        x, y = map(int, env.tasks(np.array([i]))[0].removeprefix("goal=").split(","))
        start = (s.size // 2, s.size // 2) if s.start == "center" else (0, 0)
        sizes = {"size": s.size, "attempts": s.attempts, "steps": s.attempt_steps, "sparse": s.sparse}
        return LiteralDarkRoom(start, (x, y), **sizes)

    return one


@pytest.mark.parametrize(
    "params",
    [
        {"size": 4, "attempts": 3, "attempt_steps": 7},
        {"size": 3, "attempts": 2, "attempt_steps": 5, "sparse": True, "holdout": 0},
        {"size": 5, "attempts": 1, "attempt_steps": 9, "start": "corner"},
    ],
    ids=str,
)
@pytest.mark.parametrize("good", [0.0, 0.7])
def test_equals_the_literal_room(params, good):
    env = make(NAME, num_envs=6, seed=3, params=params)
    assert assert_equal(env, literal_of(env), steps=90, good=good) > 6


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(check):
    check(NAME, params={"size": 5, "attempts": 2, "attempt_steps": 6})


@pytest.mark.parametrize("sparse", [False, True])
def test_random_play_by_enumeration_equals_the_simulated(sparse):
    params = {"size": 5, "attempts": 2, "attempt_steps": 12, "sparse": sparse}
    env = make(NAME, num_envs=4000, seed=1, params=params)
    env.reset()
    rng, paid, found = np.random.default_rng(0), 0.0, 0
    for _ in range(24):
        result = env.step(rng.integers(5, size=4000))
        paid, found = paid + result.reward.sum(), found + result.success.sum()
    chance, expected = compute_random_play(env.settings, "train")
    assert found / 8000 == pytest.approx(chance, abs=0.02)
    assert paid / 8000 == pytest.approx(expected, rel=0.05)
    assert env.spec.random_success == (chance, chance)
    assert env.spec.random_return == 2 * expected


def test_goals_of_test_are_never_goals_of_training():
    s = DarkRoomSettings()
    train, test = (set(list_goal_cells(s, split).tolist()) for split in ("train", "test"))
    assert not train & test
    assert train | test == set(range(81)) - {40}
    assert 8 <= len(test) <= 24
    played = contract.first_tasks(NAME, 400, seed=0, split="test")
    assert {9 * int(task[5]) + int(task[7]) for task in played} == test


def test_the_expert_finds_every_goal_in_time():
    env = make(NAME, num_envs=80, seed=0, params={"attempts": 2, "holdout": 0})
    env.reset()
    successes = sum(env.step(env.expert()).success.sum() for _ in range(40))
    assert successes == 160


def test_wrong_tasks_and_empty_sides_are_refused():
    env = make(NAME, num_envs=1, seed=0)
    for wrong in ("goal=4,4", "goal=9,0", "goal=-1,0", "chess"):
        with pytest.raises(InputMissing, match="is not a task"):
            env.play_only([wrong])
    with pytest.raises(UsageError, match="no goal is left for split 'test'"):
        make(NAME, num_envs=1, seed=0, split="test", params={"size": 2, "holdout": 0.01})
