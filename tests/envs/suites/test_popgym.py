"""POPGym: every game as numbers, and 27 of them as one environment with a warm-up attempt."""

from __future__ import annotations

import random

import gymnasium
import numpy as np
import pytest

pytest.importorskip("popgym")
pytest.importorskip("mazelib")

from pipelines.envs.make import make
from pipelines.envs.suites import popgym
from pipelines.envs.suites.popgym import GAMES, PREFIX, find_step_limit, new_game
from pipelines.errors import InputMissing, UsageError
from pipelines.lake.spaces import Box, Discrete, MultiDiscrete
from tests.envs import contract

MULTI = "popgym-multi"
# A discrete, a tuple, a vector of choices, a maze, a continuous one with noise, and one with choices at two places.
FEW = (
    "RepeatPreviousEasy",
    "AutoencodeEasy",
    "ConcentrationEasy",
    "LabyrinthEscapeEasy",
    "NoisyPositionOnlyPendulumEasy",
)
FEW += ("BattleshipEasy",)
# Steps of an episode at the three levels, however it is played (the games that end by a fall or a mine: at most).
LENGTHS = {
    "Autoencode": (103, 207, 311),
    "RepeatPrevious": (51, 103, 155),
    "RepeatFirst": (51, 415, 831),
    "CountRecall": (51, 103, 207),
    "PositionOnlyPendulum": (200, 150, 100),
    "NoisyPositionOnlyPendulum": (200, 200, 200),
    "MultiarmedBandit": (200, 400, 600),
    "HigherLower": (51, 103, 155),
    "Battleship": (64, 100, 144),
    "Concentration": (104, 208, 104),
    "LabyrinthExplore": (1023, 1023, 1023),
    "LabyrinthEscape": (1023, 1023, 1023),
}
TRUNCATED = ("Pendulum", "Bandit", "Battleship", "Concentration", "Labyrinth")
LEVELS = ("Easy", "Medium", "Hard")


def literal(space, seen):
    """Numbers of an observation, written out place by place."""
    if isinstance(space, gymnasium.spaces.Tuple):
        return [number for part, value in zip(space.spaces, seen, strict=True) for number in literal(part, value)]
    if isinstance(space, gymnasium.spaces.Discrete):
        return [float(seen == choice) for choice in range(space.n)]
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return [float(value == choice) for value, n in zip(seen, space.nvec, strict=True) for choice in range(n)]
    return [float(value) for value in seen]


@pytest.mark.parametrize("game", FEW)
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_a_game_keeps_the_contract(check, game):
    check(PREFIX + game)


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_many_games_keep_the_contract(check):
    check(MULTI)


@pytest.mark.slow
@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_every_game_keeps_the_contract(check, game):
    check(PREFIX + game)


def test_there_are_sixteen_games_at_three_levels():
    assert len(GAMES) == 48
    names = {game.removesuffix(level) for game in GAMES for level in LEVELS if game.endswith(level)}
    assert len(names) == 16
    assert {name + level for name in names for level in LEVELS} == set(GAMES)
    assert set(LENGTHS) < names


@pytest.mark.parametrize("game", FEW)
def test_a_game_is_played_as_the_library_plays_it(game):
    check_game(game)


@pytest.mark.slow
@pytest.mark.parametrize("game", GAMES)
def test_every_game_is_played_as_the_library_plays_it(game):
    check_game(game)


def check_game(game):
    env = make(PREFIX + game, num_envs=1, seed=0, split="test")
    theirs = new_game(game)
    shown = env.reset()["obs"]
    seed = int(env._seeds[0])
    assert seed % 2 == 1
    seen, _ = theirs.reset(seed=seed)
    rng = np.random.default_rng(0)
    for t in range(1, env.spec.horizon + 1):
        np.testing.assert_array_equal(shown[0, :-1], np.array(literal(theirs.observation_space, seen), np.float32))
        assert shown[0, -1] == np.float32((t - 1) / 1000)
        action = contract.sample(env.spec.spaces.action, 1, rng)
        given = action[0] if not isinstance(theirs.action_space, gymnasium.spaces.Box) else 2.0 * action[0]
        seen, reward, terminated, truncated, _ = theirs.step(given)
        result = env.step(action)
        shown = result.observation["obs"]
        assert result.reward[0] == pytest.approx(reward, rel=1e-6, abs=1e-7)
        assert result.truncated[0] == truncated
        assert result.terminated[0] == (terminated or truncated) == result.attempt_end[0]
        if terminated or truncated:
            break
    assert result.terminated[0]
    name, level = next((game.removesuffix(level), i) for i, level in enumerate(LEVELS) if game.endswith(level))
    if name in LENGTHS and not (name.startswith(("Labyrinth", "Battleship")) and terminated):
        assert t == LENGTHS[name][level]
        assert truncated == any(part in name for part in TRUNCATED)
    env.close()


def test_the_step_limit_may_be_a_pause():
    env = make("popgym-MultiarmedBanditEasy", num_envs=1, seed=0, params={"time_limit_ends": False})
    env.reset()
    for _ in range(200):
        result = env.step(np.zeros(1, dtype=int))
    assert result.truncated[0]
    assert not result.terminated[0]
    env.close()


def test_spaces_are_those_of_the_games():
    def spaces(game):
        env = make(PREFIX + game, num_envs=1, seed=0)
        return env.spec.spaces.observation["obs"], env.spec.spaces.action

    assert spaces("AutoencodeHard") == (Box(shape=(7,)), Discrete(n=4))
    assert spaces("CountRecallHard") == (Box(shape=(27,)), Discrete(n=17))
    assert spaces("ConcentrationHard") == (Box(shape=(14 * 52 + 1,)), Discrete(n=52))
    assert spaces("MineSweeperHard") == (Box(shape=(11,)), MultiDiscrete(nvec=(8, 8)))
    assert spaces("PositionOnlyPendulumHard") == (Box(shape=(3,)), Box(shape=(1,), low=(-2.0,), high=(2.0,)))
    assert spaces("LabyrinthExploreHard") == (Box(shape=(51,)), Discrete(n=4))


def test_global_randomness_is_left_as_it_was():
    env = make("popgym-LabyrinthExploreEasy", num_envs=1, seed=0)
    np.random.seed(3)
    random.seed(3)
    expected = np.random.random(), random.random()
    np.random.seed(3)
    random.seed(3)
    env.reset()
    assert (np.random.random(), random.random()) == expected
    env.close()


def test_wrong_names_are_refused_with_the_closest():
    with pytest.raises(UsageError, match="did you mean 'popgym-VelocityOnlyCartpoleEasy'"):
        make("popgym-VelocityOnlyCartPoleEasy", num_envs=1, seed=0)
    with pytest.raises(UsageError, match="each followed by Easy, Medium or Hard: Autoencode, "):
        make("popgym-xyz", num_envs=1, seed=0)
    env = make(MULTI, num_envs=1, seed=0)
    with pytest.raises(InputMissing, match="games are Autoencode"):
        env.play_only(["BattleshipEasy"])


def test_the_27_games_are_those_that_fit():
    fitting = set()
    for name in GAMES:
        game = new_game(name)
        discrete = not isinstance(game.action_space, gymnasium.spaces.Box)
        choices = int(np.prod(getattr(game.action_space, "nvec", getattr(game.action_space, "n", 0))))
        # CountRecall's 27th action, a card seen 26 times, is left out.
        small = len(literal(game.observation_space, game.reset(seed=0)[0])) <= 26 and choices <= 27
        if discrete and small:
            fitting.add(name)
    assert fitting == set(popgym.MULTI_GAMES)
    assert len(popgym.MULTI_GAMES) == 27
    assert max(find_step_limit(new_game(name)) for name in popgym.MULTI_GAMES) == 831


def test_the_first_attempt_shows_rewards_and_pays_none():
    env = make(MULTI, num_envs=1, seed=0)
    env.play_only(["RepeatPreviousEasy"])
    assert (env.spec.horizon, env.spec.num_attempts) == (2 * 832 - 1, 2)
    shown = env.reset()["obs"][0]
    assert shown[26:].tolist() == [0.0, 0.0, 1.0, 0.0]
    hot = [shown[:4]]
    for t in range(1, 104):
        result = env.step(np.array([t % 4]))
        shown = result.observation["obs"][0]
        attempt, clock = (0, t) if t <= 51 else (1, t - 52)
        assert shown[26] == np.float32(clock / 1000)
        assert shown[27] == (1.0 if t >= 51 else 0.0)  # finished attempts
        assert shown[28] == 1.0
        if t == 52:
            assert result.reset[0]
            assert (result.reward[0], shown[29]) == (0.0, 0.0)
        else:
            # RepeatPrevious asks for the suit of four cards ago: +-1/48 once there is one, 0 before.
            assert abs(shown[29]) == pytest.approx(0.0 if clock < 4 else 1 / 48, rel=1e-3)
            assert result.reward[0] == (shown[29] if attempt else 0.0)
            assert not result.reset[0]
        assert result.attempt_end[0] == (t in (51, 103))
        assert result.terminated[0] == (t == 103)
        hot.append(shown[:4])
    first, second = np.array(hot[:52]), np.array(hot[52:])
    assert (first.sum(1) == 1).all()
    assert not np.array_equal(first, second)  # another instance
    env.close()


def test_actions_that_a_game_does_not_have_are_replaced_by_random_ones():
    env = make(MULTI, num_envs=1, seed=0)
    env.play_only(["MultiarmedBanditEasy"])
    env.reset()
    taken = []
    bandit = env.envs[0].env._game
    step = bandit.step
    bandit.step = lambda action: taken.append(int(action)) or step(action)
    for t in range(200):
        wanted = 25 if t % 2 else 3
        assert env.step(np.array([wanted])).observation["obs"][0, 28] == (wanted == 3)
    assert set(taken[::2]) == {3}
    assert set(taken[1::2]) == set(range(10))
    env.close()


def test_choices_at_two_places_are_counted_through():
    env = make(MULTI, num_envs=1, seed=0)
    env.play_only(["MineSweeperEasy"])
    env.reset()
    single = env.envs[0].env
    moves = []

    def note_move(move):
        moves.append(tuple(map(int, move)))
        return seen, 0.0, False, False, {}

    seen, single._game.step = single._game.observation_space.sample(), note_move
    for choice in (0, 3, 4, 15):
        env.step(np.array([choice]))
    assert moves == [(0, 0), (0, 3), (1, 0), (3, 3)]
    env.close()


def test_all_games_are_played_on_both_sides():
    for split in ("train", "test"):
        assert set(contract.first_tasks(MULTI, 50, count=300, seed=0, split=split)) == set(popgym.MULTI_GAMES)


def test_without_warm_up_every_attempt_pays():
    env = make(MULTI, num_envs=1, seed=0, params={"warmup": 0})
    env.play_only(["HigherLowerEasy"])
    env.reset()
    result = env.step(np.array([0]))
    assert result.reward[0] == result.observation["obs"][0, 29] != 0
    assert result.observation["obs"][0, 27] == 1.0
    env.close()
