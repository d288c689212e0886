"""Procgen: attempts at one level, levels split, and no mode that would kill the process."""

from __future__ import annotations

import sys
from itertools import product
from typing import get_args

import numpy as np
import pytest

pytest.importorskip("gym3", reason="Procgen needs numpy below 2, so an environment of its own")

from pipelines.envs.make import make
from pipelines.envs.suites import procgen
from pipelines.envs.suites.procgen import GAMES, Mode, games_of, time_limit
from pipelines.errors import InputMissing, UsageError
from tests.envs import contract

STAY, RIGHT = 4, 7


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ["procgen-coinrun", "procgen-multi"])
def test_procgen_keeps_the_contract(check, name):
    check(name)


def until(env, action, most=1100):
    """Steps with `action` until an attempt ends: how many, the last picture before it, and the last result."""
    before = None
    for step in range(1, most):
        result = env.step(np.array([action]))
        if result.attempt_end[0]:
            return step, before, result
        before = result.observation["obs"]
    raise AssertionError("no end")


def test_two_attempts_at_one_level_with_one_step_between():
    env = make("procgen-multi", num_envs=1, seed=0, params={"games": ["maze"]})
    assert (env.spec.num_attempts, env.spec.horizon) == (2, 2 * 500 + 1)
    start = env.reset()["obs"].copy()
    task = env.tasks(np.arange(1))
    step, before, result = until(env, STAY)
    assert step == 500  # the game's own limit
    assert not (result.terminated | result.truncated | result.reset | result.success).any()
    np.testing.assert_array_equal(result.observation["obs"], before)  # there is no picture of the end
    result = env.step(np.array([RIGHT]))  # ignored
    assert result.reset.all()
    assert (result.reward, result.attempt_end) == (0, False)
    again = result.observation["obs"]
    assert (again[0, :4, :4] == 0).all()
    again = again.copy()
    again[0, :4, :4] = start[0, :4, :4]
    np.testing.assert_array_equal(again, start)
    assert env.tasks(np.arange(1)) == task
    step, _, result = until(env, STAY)
    assert step == 500
    assert result.terminated.all()
    assert not result.truncated.any()
    env.close()


def test_one_attempt_that_runs_out_of_time_is_truncated():
    env = make("procgen-maze", num_envs=1, seed=0)
    env.reset()
    step, _, result = until(env, STAY)
    assert (step, result.truncated[0], result.terminated[0]) == (500, True, False)
    env.close()


def test_reaching_the_end_is_a_success_and_pays():
    """In coinrun, running and jumping to the right finds the coin in some of the first levels."""
    env = make("procgen-coinrun", num_envs=4, seed=0)
    env.play_only([f"coinrun/{level}" for level in range(4)])
    env.reset()
    rng, won = np.random.default_rng(0), 0
    for _ in range(400):
        result = env.step(rng.choice([RIGHT, RIGHT + 1], size=4))
        assert (result.success == (result.reward > 0)).all()  # coinrun pays 10 for the coin, and nothing else
        won += result.success.sum()
        over = result.terminated | result.truncated
        if over.any():
            env.reset(over)
    assert won
    env.close()


def test_levels_of_test_are_not_those_of_training():
    train = contract.first_tasks("procgen-leaper", 4, count=40, seed=0, params={"levels": 10})
    test = contract.first_tasks("procgen-leaper", 4, count=40, seed=0, split="test", params={"levels": 10})
    levels = {int(task.removeprefix("leaper/")) for task in train}
    assert levels <= set(range(10))
    assert len(levels) > 5
    assert all(int(task.removeprefix("leaper/")) >= 10 for task in test)


def test_a_named_level_is_played():
    env = make("procgen-multi", num_envs=2, seed=0)
    env.play_only(["maze/7", "ninja/3"])
    env.reset()
    assert env.tasks(np.arange(2)) == ["maze/7", "ninja/3"]
    for wrong in ("maze/x", "chess/1", "maze"):
        with pytest.raises(InputMissing, match=f"'{wrong}' is no task"):
            env.play_only([wrong])
    env.close()


@pytest.mark.parametrize(("game", "mode"), list(product(GAMES, get_args(Mode))))
def test_pairs_of_game_and_mode(game, mode):
    if game not in games_of(mode):
        with pytest.raises(UsageError, match=f"'{game}' has no mode '{mode}'"):
            make(f"procgen-{game}", num_envs=1, seed=0, params={"mode": mode})
        return
    env = make(f"procgen-{game}", num_envs=1, seed=0, params={"mode": mode})
    env.reset()
    for action in range(3):
        env.step(np.array([action]))
    env.close()


def test_there_are_fifty_legal_pairs():
    assert sum(len(games_of(mode)) for mode in get_args(Mode)) == 50
    assert (time_limit("maze"), time_limit("heist")) == (500, 1000)


def test_an_unknown_game_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'coinrun'"):
        make("procgen-coin-run", num_envs=1, seed=0)
    with pytest.raises(UsageError, match="games: bigfish"):
        make("procgen-xyz", num_envs=1, seed=0)


def test_procgen_is_imported_without_gym():
    procgen.import_procgen()
    assert "gym" not in sys.modules
