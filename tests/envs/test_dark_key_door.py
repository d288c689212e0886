"""Dark Key-to-Door equals a literal one, dark and light, with and without shuffled actions."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.envs.make import make
from pipelines.lake.spaces import Discrete
from tests.envs.literal import LiteralDarkKeyDoor, assert_equal
from tests.tiers import crossed


def literal_of(env):
    s = env.settings

    def one(i):
        cells = [divmod(int(cell[i]), s.size) for cell in (env.start, env.key, env.door)]
        return LiteralDarkKeyDoor(
            *cells,
            env.meaning[i].tolist(),
            size=s.size,
            light=s.light,
            show_clock=s.show_clock,
            attempt_steps=s.attempt_steps,
            horizon=s.horizon,
        )

    return one


@pytest.mark.parametrize(
    ("params", "good"),
    crossed(
        [
            {"size": 2, "attempt_steps": 9, "horizon": 40, "show_clock": False},
            {"size": 3, "attempt_steps": 8, "horizon": 40, "show_clock": False, "light": True},
            {"size": 2, "attempt_steps": 7, "horizon": 40},
            {"size": 4, "attempt_steps": 12, "horizon": 65, "light": True},
            {"size": 3, "attempt_steps": 5, "horizon": 30, "shuffle_actions": True},
            {"size": 1, "attempt_steps": 3, "horizon": 8},
        ],
        [0.0, 0.7],
    ),
    ids=str,
)
def test_equals_the_literal_room(params, good):
    env = make("dark-key-door", num_envs=12, seed=2, params=params)
    assert assert_equal(env, literal_of(env), steps=200, good=good) >= 12


def test_key_and_door_on_one_cell_need_two_steps():
    env = make("dark-key-door", num_envs=4, seed=0, params={"size": 1, "horizon": 9})
    env.reset()
    rewards = [env.step(np.full(4, 4)).reward[0] for _ in range(6)]
    assert rewards == [1, 1, 0, 1, 1, 0]


def test_defaults_are_those_of_the_rules():
    env = make("dark-key-door", num_envs=1, seed=0)
    assert env.settings.size == 9
    assert env.spec.horizon == 500
    assert env.settings.attempt_steps == 50
    assert env.spec.num_attempts is None
    assert env.spec.spaces.action == Discrete(n=5)


def test_expert_opens_doors_all_the_time():
    env = make("dark-key-door", num_envs=200, seed=1, params={"size": 4, "attempt_steps": 12, "horizon": 80})
    env.reset()
    doors = np.zeros(200)
    for _ in range(80):
        doors += env.step(env.expert()).success
    assert doors.mean() == pytest.approx(14, abs=1.5)
