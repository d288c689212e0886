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
from pipelines.envs.suites.procgen import GAMES, Mode, find_mode, find_time_limit, list_games
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
        with pytest.raises(InputMissing, match=f"'{wrong}' is not a task"):
            env.play_only([wrong])
    env.close()


@pytest.mark.parametrize(("game", "mode"), list(product(GAMES, get_args(Mode))))
def test_pairs_of_game_and_mode(game, mode):
    if game not in list_games(mode):
        with pytest.raises(UsageError, match=f"'{game}' has no mode '{mode}'"):
            make(f"procgen-{game}", num_envs=1, seed=0, params={"mode": mode})
        return
    env = make(f"procgen-{game}", num_envs=1, seed=0, params={"mode": mode})
    env.reset()
    for action in range(3):
        env.step(np.array([action]))
    env.close()


def test_there_are_fifty_legal_pairs():
    assert sum(len(list_games(mode)) for mode in get_args(Mode) if mode != "memory-hard") == 50


# The games' own sources, by `timeout`.
LIMITS = {"bigfish": 6000, "bossfight": 4000, "leaper": 500, "maze": 500, "plunder": 4000}


@pytest.mark.parametrize("game", GAMES)
def test_each_game_has_its_own_time_limit(game):
    for mode in ("easy", "hard"):
        assert find_time_limit(game, mode) == LIMITS.get(game, 1000)
    spec = make(f"procgen-{game}", num_envs=1, seed=0).spec
    assert spec.horizon == LIMITS.get(game, 1000)


def test_jumper_has_twice_the_time_in_memory_mode():
    assert (
        find_time_limit("jumper", "memory"),
        find_time_limit("maze", "memory"),
        find_time_limit("heist", "memory"),
    ) == (
        2000,
        500,
        1000,
    )
    assert find_time_limit("jumper", "memory-hard") == 2000
    assert make("procgen-multi", num_envs=1, seed=0, params={"mode": "memory"}).spec.horizon == 2 * 2000 + 1


@pytest.mark.parametrize(("game", "mode"), [("leaper", "easy"), ("jumper", "memory")])
def test_running_out_of_a_games_own_time_is_not_a_death(game, mode):
    env = make(f"procgen-{game}", num_envs=1, seed=0, params={"mode": mode})
    env.play_only([f"{game}/{level}" for level in range(8)])
    ends = []
    for _ in range(8):
        env.reset()
        step, _, result = until(env, STAY, most=2100)
        ends.append((step, bool(result.truncated[0])))
    limit = find_time_limit(game, mode)
    assert (limit, True) in ends
    assert all(step == limit if truncated else step < limit for step, truncated in ends)
    env.close()


def test_a_death_after_a_thousand_steps_is_not_a_time_out(monkeypatch):
    """Of bigfish, which lasts up to 6,000 steps."""
    env = procgen.Procgen(procgen.ProcgenSettings(), ("bigfish",))
    env.split = "train"
    env.reset(seed=0)
    monkeypatch.setattr(env, "_play", _EndsAt(env._play, 1200))
    for _ in range(1199):
        assert not any(env.step(STAY)[2:4])
    assert env.step(STAY)[2:4] == (True, False)


class _EndsAt:
    """A game in which nothing happens until it ends."""

    def __init__(self, game, last):
        self.game, self.last, self.time = game, last, 0
        self.picture = game.observe()[1]

    def act(self, action):
        self.time += 1

    def observe(self):
        return np.zeros(1), self.picture, np.array([self.time == self.last])

    def get_info(self):
        return [{"prev_level_complete": 0}]


def test_memory_hard_is_memory_where_a_game_has_it_and_hard_elsewhere():
    assert [game for game in GAMES if find_mode(game, "memory-hard") == "memory"] == sorted(list_games("memory"))
    assert {find_mode(game, "memory-hard") for game in GAMES} == {"memory", "hard"}
    pictures = {}
    for mode in ("memory-hard", "memory", "hard"):
        for game in ("maze", "coinrun") if mode != "memory" else ("maze",):
            env = make(f"procgen-{game}", num_envs=1, seed=0, params={"mode": mode})
            env.play_only([f"{game}/3"])
            pictures[game, mode] = env.reset()["obs"]
            env.close()
    np.testing.assert_array_equal(pictures["maze", "memory-hard"], pictures["maze", "memory"])
    np.testing.assert_array_equal(pictures["coinrun", "memory-hard"], pictures["coinrun", "hard"])
    assert (pictures["maze", "memory-hard"] != pictures["maze", "hard"]).any()


def test_rewards_of_a_game_are_scaled():
    """Chaser pays for each orb from the first step on."""
    played = {}
    for scale in (1.0, 0.25):
        params = {"games": ["chaser"], "reward_scales": {"chaser": scale, "bigfish": 7.0}}
        env = make("procgen-multi", num_envs=2, seed=0, params=params)
        played[scale] = np.stack([row["reward"] for row in contract.play(env, 60) if "reward" in row])
        env.close()
    assert played[1.0].any()
    np.testing.assert_allclose(played[0.25], 0.25 * played[1.0], rtol=1e-6)


@pytest.mark.parametrize("scales", [{"chess": 1.0}, {"maze": 0.0}, {"maze": float("nan")}])
def test_a_wrong_reward_scale_is_refused(scales):
    with pytest.raises(UsageError) as caught:
        make("procgen-multi", num_envs=1, seed=0, params={"reward_scales": scales})
    assert next(iter(scales)) in " ".join(caught.value.problems)


def test_an_unknown_game_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'coinrun'"):
        make("procgen-coin-run", num_envs=1, seed=0)
    with pytest.raises(UsageError, match="games: bigfish"):
        make("procgen-xyz", num_envs=1, seed=0)


def test_procgen_is_imported_without_gym():
    procgen.import_procgen()
    assert "gym" not in sys.modules


def test_returns_are_normalised_by_the_bounds_of_game_and_mode():
    def score(name, **params):
        return make(name, num_envs=1, seed=0, params=params).spec.score

    assert score("procgen-starpilot").bounds == {"starpilot": (2.5, 64.0)}
    assert score("procgen-starpilot", mode="hard").bounds == {"starpilot": (1.5, 35.0)}
    assert score("procgen-maze", mode="memory") is None
    scaled = score("procgen-multi", games=["maze", "miner"], reward_scales={"miner": 0.5})
    assert scaled.bounds == {"maze": (10.0, 20.0), "miner": (1.5, 13.0)}  # of two attempts


def test_the_papers_protocol_has_500_hard_levels_or_200_easy_ones():
    for given, expected in (
        ({}, ("hard", 500, 1)),
        ({"mode": "easy"}, ("easy", 200, 1)),
        ({"levels": 10, "attempts": 3}, ("hard", 10, 3)),
    ):
        settings = procgen.ProcgenMultiSettings(protocol="paper", **given)
        assert (settings.mode, settings.levels, settings.attempts) == expected
