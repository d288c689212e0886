"""PettingZoo: the agent's seat sees and earns what the library says, and our own board games are the library's."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pettingzoo")
pytest.importorskip("pygame")

import pettingzoo

from pipelines.envs.env import ActorsFailed, Env, Opponents, OpponentTurn
from pipelines.envs.make import make
from pipelines.envs.suites.board_games import _RULES, LineGame
from pipelines.envs.suites.pettingzoo import find_id
from pipelines.errors import UsageError
from tests.envs import contract

pytestmark = pytest.mark.system
CLASSIC = {"tic-tac-toe": "tictactoe_v3", "connect-four": "connect_four_v3"}
OWN = "tests.envs.own_games"
needs_rlcard = pytest.mark.skipif(find_spec("rlcard") is None, reason="rlcard is not installed: the extra pettingzoo")


class Recorded:
    """An opponent that plays a list of actions, the same for every game, and keeps what it was shown."""

    name = "recorded"

    def __init__(self, actions: list[int]) -> None:
        self.actions, self.shown = list(actions), list[tuple[Any, ...]]()

    def act(self, turn: OpponentTurn) -> np.ndarray:
        seen = {name: column[0].copy() for name, column in turn.observation.items()}
        self.shown.append((turn.place, seen, float(turn.prev_reward[0])))
        return np.full(len(turn.actors), self.actions.pop(0), dtype=np.int32)


@pytest.mark.parametrize("name", [*CLASSIC.values(), "rps_v2", pytest.param("leduc_holdem_v4", marks=needs_rlcard)])
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_a_batch_keeps_the_contract(check: Any, name: str) -> None:
    check(f"pettingzoo:{name}")


@pytest.mark.parametrize("name", CLASSIC)
@pytest.mark.parametrize("illegal", [0.0, 0.1])
def test_our_board_games_are_pettingzoos(name: str, illegal: float) -> None:
    """Every observation, mask, reward and end of random games, in which some moves are illegal."""
    rng, game, one = np.random.default_rng(0), LineGame(_RULES[name], 1), np.zeros(1, dtype=np.int64)
    theirs = pettingzoo.make("aec", find_id(CLASSIC[name]))
    assert game.seats == tuple(theirs.possible_agents)
    for _ in range(40):
        theirs.reset(seed=0)
        game.begin(one, one)
        while not game.terminated[0, 0]:
            assert game.seats[game.turn[0]] == theirs.agent_selection
            for seat, agent in enumerate(game.seats):
                ours, expected = game.observe(one, np.array([seat])), theirs.observe(agent)
                np.testing.assert_array_equal(ours["obs.observation"][0], expected["observation"])
                np.testing.assert_array_equal(ours["obs.action_mask"][0], expected["action_mask"])
            mask = theirs.observe(theirs.agent_selection)["action_mask"]
            score = rng.random(len(mask)) * (1 if rng.random() < illegal else mask)
            action = int(score.argmax())
            theirs.step(action)
            rewards = game.move(one, np.array([action]))
            np.testing.assert_array_equal(rewards[0], [theirs.rewards[agent] for agent in game.seats])
            assert game.terminated[0].tolist() == [theirs.terminations[agent] for agent in game.seats]
            for seat, agent in enumerate(game.seats):
                ours = game.observe(one, np.array([seat]))
                np.testing.assert_array_equal(ours["obs.observation"][0], theirs.observe(agent)["observation"])


@pytest.mark.parametrize("name", CLASSIC)
def test_our_board_games_have_the_spaces_of_the_adapter(name: str) -> None:
    """So that a policy which has learnt one plays the other."""
    ours, theirs = make(name, num_envs=1, seed=0), make(f"pettingzoo:{CLASSIC[name]}", num_envs=1, seed=0)
    assert ours.spec.spaces == theirs.spec.spaces
    assert list(ours.spec.spaces.observation) == list(theirs.spec.spaces.observation)
    assert (ours.spec.seats, ours.spec.action_mask) == (theirs.spec.seats, theirs.spec.action_mask)


@needs_rlcard
@pytest.mark.parametrize("seat", [0, 1])
def test_a_seat_sees_and_earns_what_the_library_says(seat: int) -> None:
    """Leduc hold'em by the bare library, with a seed and moves that both have: `last()` of each agent in its turn."""
    name = "pettingzoo:leduc_holdem_v4"
    rng = np.random.default_rng(seat)
    bare = pettingzoo.make("aec", "classic/leduc_holdem-v4")
    for number in range(8):
        env = make(name, num_envs=1, seed=number, params={"seat": f"player_{seat}"})
        env.play_against(Opponents(groups=((other := Recorded([]),),)))
        seed = int(env._draw_seeds(np.zeros(1, dtype=np.int64))[0])
        bare.reset(seed=seed)
        moves: dict[int, list[int]] = {0: [], 1: []}
        told: dict[int, list[tuple[Any, float]]] = {0: [], 1: []}
        for agent in bare.agent_iter():
            observation, reward, terminated, truncated, _ = bare.last()
            player = bare.possible_agents.index(agent)
            told[player].append((observation, float(reward)))
            if terminated or truncated:
                bare.step(None)
                continue
            legal = np.flatnonzero(observation["action_mask"])
            moves[player].append(int(rng.choice(legal)))
            bare.step(moves[player][-1])
        if not moves[seat]:  # the other one folded at once
            continue
        other.actions = list(moves[1 - seat])
        observation, total = env.reset(), 0.0
        for step, action in enumerate(moves[seat]):
            np.testing.assert_array_equal(observation["obs.observation"][0], told[seat][step][0]["observation"])
            np.testing.assert_array_equal(observation["obs.action_mask"][0], told[seat][step][0]["action_mask"])
            result = env.step(np.array([action]))
            assert result.reward[0] == told[seat][step + 1][1]
            observation, total = result.observation, total + float(result.reward[0])
        assert result.terminated[0]
        assert not other.actions
        for (_, shown, earned), (expected, reward) in zip(other.shown, told[1 - seat], strict=False):
            np.testing.assert_array_equal(shown["obs.observation"], expected["observation"])
            assert earned == reward


def test_an_environment_in_parallel_is_played_by_turns() -> None:
    env = make(f"{OWN}:Matching", num_envs=2, seed=0, params={"seat": "odd", "rounds": 2})
    env.play_against(Opponents(groups=((Recorded([1, 0, 1]),),)))
    np.testing.assert_array_equal(env.reset()["obs"], np.zeros((2, 2)))
    first = env.step(np.array([1, 0]))
    np.testing.assert_array_equal(first.reward, [-1.0, 1.0])
    np.testing.assert_array_equal(first.observation["obs"], [[1, 1], [1, 1]])
    assert not first.terminated.any()
    second = env.step(np.array([0, 0]))
    np.testing.assert_array_equal(second.reward, [-1.0, -1.0])
    assert second.terminated.all()
    np.testing.assert_array_equal(env.outcomes(np.arange(2)), [0.0, 0.5])


def leaving(seat: str, others: list[int], **params: Any) -> Env:
    env = make(f"{OWN}:Leaving", num_envs=1, seed=0, params={"seat": seat, **params})
    env.play_against(Opponents(groups=((Recorded(others),),)))
    return env


def test_a_mask_in_infos_is_observed() -> None:
    env = leaving("a", [0, 0, 2])
    assert list(env.spec.spaces.observation) == ["obs.action_mask", "obs.observation"]
    assert env.spec.action_mask == "obs.action_mask"
    observation = env.reset()
    np.testing.assert_array_equal(observation["obs.action_mask"], [[1, 1, 1, 0]])


def test_the_episode_ends_with_its_seat_while_the_others_go_on() -> None:
    env = leaving("b", [2])
    env.reset()  # a says 3
    result = env.step(np.array([3]))  # not legal
    assert (result.terminated[0], result.reward[0], result.success[0]) == (True, -2.0, False)
    assert result.observation["obs.observation"][0] == 7


def test_a_seat_goes_on_when_another_one_has_left() -> None:
    env = leaving("a", [3, 1, 0])
    env.reset()
    first = env.step(np.array([0]))  # b leaves, c says 2
    assert (first.terminated[0], first.reward[0]) == (False, 1.0)
    second = env.step(np.array([0]))
    assert (second.terminated[0], second.reward[0]) == (False, 0.0)
    third = env.step(np.array([3]))
    assert (third.terminated[0], third.reward[0]) == (True, -1.0)
    np.testing.assert_array_equal(env.outcomes(np.zeros(1, int)), [0.5])  # 0, and the others -2 + 1 and 1 + 1


def test_a_game_that_is_cut_is_truncated() -> None:
    env = leaving("a", [0] * 40)
    env.reset()
    for _ in range(40):
        result = env.step(np.zeros(1, dtype=np.int64))
        if result.truncated[0] or result.terminated[0]:
            break
    assert (result.truncated[0], result.terminated[0]) == (True, False)
    limited = leaving("a", [0] * 40, max_episode_steps=2)
    assert limited.spec.horizon == 2
    limited.reset()
    assert [bool(limited.step(np.zeros(1, dtype=np.int64)).truncated[0]) for _ in range(2)] == [False, True]


def test_a_game_that_breaks_is_replaced() -> None:
    env = leaving("a", [0] * 40, fails=True)
    env.reset()
    with pytest.raises(ActorsFailed, match="three is too many") as caught:
        env.step(np.array([3]))
    assert caught.value.failures[0].actors == (0,)
    assert "three is too many" in caught.value.failures[0].trace
    env.reset(np.array([True]))
    assert env.step(np.zeros(1, dtype=np.int64)).reward[0] == 0


@pytest.mark.parametrize(
    ("name", "params", "told"),
    [
        ("pettingzoo:tictactoe_v9", {}, "PettingZoo has no environment 'tictactoe_v9'"),
        ("pettingzoo:os", {}, "PettingZoo has no environment 'os'"),
        ("pettingzoo:tictactoe_v3", {"seat": "north"}, "has no seat 'north'"),
        (f"{OWN}:Leaving", {"uneven": True}, "seat 'c' has other spaces than seat 'a'"),
        (f"{OWN}:alone", {}, "has 1 agent"),
    ],
)
def test_what_is_no_game_is_refused(name: str, params: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        make(name, num_envs=1, seed=0, params=params)


def test_names_are_those_of_the_registry() -> None:
    names = ("chess_v6", "classic/chess_v6", "classic/chess-v6")
    assert {find_id(name) for name in names} == {"classic/chess-v6"}
    with pytest.raises(UsageError) as caught:
        find_id("tictacto_v3")
    assert caught.value.hint == "did you mean 'tictactoe_v3'?"


def test_a_seat_of_an_environment_without_any_is_refused() -> None:
    for name in ("gym:CartPole-v1", "tests.envs.own:Line"):
        with pytest.raises(UsageError, match="has a single seat"):
            make(name, num_envs=1, seed=0, params={"seat": "a"})
