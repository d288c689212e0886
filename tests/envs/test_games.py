"""Games of several seats: rules against a literal version, perfect play against minimax, and what the agent sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pipelines.envs.env import ActorsFailed, Env, Opponents, OpponentTurn
from pipelines.envs.make import make
from pipelines.envs.seats import SeatedEnv, SeatSettings
from pipelines.envs.suites.board_games import _RULES, LineGame
from pipelines.errors import InputMissing, UsageError
from tests.envs import contract
from tests.envs.literal_games import FREE, MARKS, Board, moves, value, wins

GAMES = ("tic-tac-toe", "connect-four")
OBS, MASK = "obs.observation", "obs.action_mask"


class Scripted:
    """An opponent that calls a function of what it observes; `seen` has its arguments."""

    def __init__(self, choose: Callable[..., np.ndarray], name: str = "scripted") -> None:
        self.name, self._choose = name, choose
        self.seen: list[tuple[Any, ...]] = []

    def act(self, turn: OpponentTurn) -> np.ndarray:
        self.seen.append((turn.place, turn.actors, turn.prev_action.copy(), turn.prev_reward.copy(), turn.time.copy()))
        return self._choose(turn.observation)


def first_legal(observation) -> np.ndarray:
    return observation[MASK].argmax(axis=1).astype(np.int32)


def last_legal(observation) -> np.ndarray:
    return (observation[MASK].shape[1] - 1 - observation[MASK][:, ::-1].argmax(axis=1)).astype(np.int32)


def play(env: Env, episodes: int, choose: Callable[[Any], np.ndarray] = last_legal) -> dict[int, tuple[Any, ...]]:
    """Task, opponent, length, return and outcome of the first episodes, by number."""
    found: dict[int, tuple[Any, ...]] = {}
    observation, length, total = env.reset(), np.zeros(env.num_envs, int), np.zeros(env.num_envs)
    while len(found) < episodes:
        result = env.step(choose(observation))
        observation, length, total = result.observation, length + 1, total + result.reward
        over = np.flatnonzero(result.terminated | result.truncated)
        facts = zip(env.tasks(over), env.opponents(over), env.outcomes(over).tolist(), strict=True)
        for actor, (task, opponent, outcome) in zip(over.tolist(), facts, strict=True):
            number = int(env.episodes.current[actor])
            if number < episodes:
                found[number] = task, opponent, int(length[actor]), float(total[actor]), outcome
        if len(over):
            mask = np.isin(np.arange(env.num_envs), over)
            observation = env.reset(mask)
            length[mask] = total[mask] = 0
    return found


@pytest.mark.parametrize("name", GAMES)
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_a_game_keeps_the_contract(check: Callable[..., None], name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", GAMES)
def test_games_are_those_of_a_literal_version(name: str) -> None:
    rules, rng = _RULES[name], np.random.default_rng(0)
    game = LineGame(rules, 40)
    everyone = np.arange(40)
    game.begin(everyone, everyone)
    boards = [Board(rules.rows, rules.columns, rules.length, drops=rules.drops) for _ in everyone]
    totals, finished = np.zeros((40, 2)), 0
    while len(running := np.flatnonzero(~game.terminated[:, 0])):
        legal = game.observe(running, game.turn[running])[MASK].astype(bool)
        assert not game.observe(running, 1 - game.turn[running])[MASK].any()
        for row, number in enumerate(running.tolist()):
            assert np.flatnonzero(legal[row]).tolist() == boards[number].legal()
        anything = rng.random(len(running)) < 0.02  # mostly legal
        chosen = np.where(anything[:, None], rng.random(legal.shape), legal * rng.random(legal.shape)).argmax(axis=1)
        rewards = game.move(running, chosen)
        totals[running] += rewards
        for action, number in zip(chosen.tolist(), running.tolist(), strict=True):
            board = boards[number]
            board.play(action)
            assert bool(game.terminated[number, 0]) == board.over
            for seat in range(2):
                planes = game.observe(np.array([number]), np.array([seat]))[OBS][0]
                own = [[mark == MARKS[seat] for mark in line] for line in board.cells]
                other = [[mark == MARKS[1 - seat] for mark in line] for line in board.cells]
                np.testing.assert_array_equal(planes, np.stack([own, other], axis=-1))
            finished += board.over
    assert finished == 40
    np.testing.assert_array_equal(totals, [board.rewards for board in boards])


@pytest.mark.system
def test_the_expert_of_tic_tac_toe_keeps_what_minimax_says_in_every_position() -> None:
    game = LineGame(_RULES["tic-tac-toe"], 1)
    one, waiting, met = np.zeros(1, int), [(FREE * 9, "X")], set()
    while waiting:
        cells, mark = waiting.pop()
        if (cells, mark) in met or wins(cells, "X") or wins(cells, "O") or FREE not in cells:
            continue
        met.add((cells, mark))
        game.board[0] = [".XO".index(each) for each in cells]
        game.turn[0], game.terminated[0] = MARKS.index(mark), False
        other = MARKS[1 - MARKS.index(mark)]
        best = np.flatnonzero(game.find_best(one)[0]).tolist()
        assert best
        after = moves(cells, mark)
        assert all(-value(after[i], other) == value(cells, mark) for i in best)
        if any(wins(each, mark) for each in after.values()):  # it takes a win at once
            assert all(wins(after[i], mark) for i in best)
        waiting += [(each, other) for each in after.values()]
    assert len(met) == 4520  # positions of tic-tac-toe that are not over


def test_perfect_play_against_itself_is_drawn() -> None:
    env = make("tic-tac-toe", num_envs=4, seed=0)
    env.play_against(Opponents(groups=((env.make_rule_opponent("expert"),),)))
    played = play(env, 40, lambda observation: env.expert())
    assert {(total, outcome) for *_, total, outcome in played.values()} == {(0.0, 0.5)}


@pytest.mark.parametrize("name", GAMES)
def test_an_episode_is_the_same_however_many_actors_there_are(name: str) -> None:
    """Its seat, its opponent, and the moves of random opponents."""
    many, few = (make(name, num_envs=count, seed=3) for count in (12, 5))
    for env in (many, few):
        others = (env.make_rule_opponent("random"),), (Scripted(first_legal), Scripted(last_legal, "another"))
        env.play_against(Opponents(groups=others))
    played = play(many, 60)
    assert played == play(few, 60)
    assert {task for task, *_ in played.values()} == {f"seat={seat}" for seat in many.spec.seats}
    count = [opponent for _, opponent, *_ in played.values()].count("random")
    assert 15 < count < 45  # a group has half of the episodes, however many members the other has
    assert {opponent for _, opponent, *_ in played.values()} == {"random", "scripted", "another"}


def test_outcomes_are_those_of_the_returns() -> None:
    played = play(make("tic-tac-toe", num_envs=8, seed=0), 200).values()
    assert {(total, outcome) for *_, total, outcome in played} == {(1.0, 1.0), (0.0, 0.5), (-1.0, 0.0)}


def test_an_illegal_move_ends_the_game_and_costs_one() -> None:
    env = make("tic-tac-toe", num_envs=2, seed=0, params={"seat": "player_1"})
    env.play_against(Opponents(groups=((Scripted(last_legal),),)))
    env.reset()
    first = env.step(np.array([4, 4]))
    assert not first.terminated.any()
    second = env.step(np.array([4, 0]))  # the first actor's own cell; a free one
    np.testing.assert_array_equal(second.terminated, [True, False])
    np.testing.assert_array_equal(second.reward, [-1.0, 0.0])


def test_an_illegal_answer_of_the_opponent_wins_without_pay() -> None:
    env = make("tic-tac-toe", num_envs=1, seed=0, params={"seat": "player_1"})
    env.play_against(Opponents(groups=((Scripted(lambda seen: np.zeros(1, np.int32)),),)))
    env.reset()
    result = env.step(np.zeros(1, dtype=np.int64))
    assert (result.terminated[0], result.reward[0], result.success[0]) == (True, 0.0, True)


def test_a_game_that_the_opponent_ends_at_once_begins_again() -> None:
    env = make("tic-tac-toe", num_envs=3, seed=0, params={"seat": "player_2"})
    env.play_against(Opponents(groups=((Scripted(lambda seen: np.full(len(seen[MASK]), 99, np.int32)),),)))
    observation = env.reset()
    np.testing.assert_array_equal(observation[MASK].sum(axis=1), 8)


def test_opponents_are_told_their_own_last_move_reward_and_time() -> None:
    other = Scripted(first_legal)
    env = make("tic-tac-toe", num_envs=1, seed=0, params={"seat": "player_1"})
    env.play_against(Opponents(groups=((other,),)))
    env.reset()
    for action in (8, 7):
        env.step(np.array([action]))
    (place, actors, action, reward, time), (_, _, later, _, then) = other.seen
    assert (place, actors.tolist(), action.tolist(), reward.tolist(), time.tolist()) == (1, [0], [0], [0.0], [0])
    assert (later.tolist(), then.tolist()) == ([0], [1])


def test_evaluations_play_the_seats_in_turn() -> None:
    env = make("connect-four", num_envs=4, seed=0, split="test")
    env.play_evenly()
    env.reset()
    assert env.tasks(np.arange(4)) == ["seat=player_0", "seat=player_1"] * 2


def test_named_seats_are_played() -> None:
    env = make("connect-four", num_envs=3, seed=0)
    env.play_only(["seat=player_1"])
    env.reset()
    assert set(env.tasks(np.arange(3))) == {"seat=player_1"}
    with pytest.raises(InputMissing, match="'seat=player_7' is not a task"):
        env.play_only(["seat=player_7"])


def test_attempts_are_against_the_same_opponent_in_the_same_seat() -> None:
    env = make("tic-tac-toe", num_envs=6, seed=0, attempts=3)
    env.play_against(Opponents(groups=((Scripted(first_legal),), (Scripted(last_legal, "another"),))))
    observation = env.reset()
    before = env.tasks(np.arange(6)), env.opponents(np.arange(6))
    ended = np.zeros(6, int)
    while ended.max() < 3:
        result = env.step(last_legal(observation))
        observation, ended = result.observation, ended + result.attempt_end
        assert (env.tasks(np.arange(6)), env.opponents(np.arange(6))) == before


def test_an_unknown_seat_is_refused() -> None:
    with pytest.raises(UsageError, match="no seat 'north'") as caught:
        make("tic-tac-toe", num_envs=1, seed=0, params={"seat": "north"})
    assert caught.value.hint == "env.seat: player_1, player_2"


def test_opponents_of_a_single_seat_are_refused() -> None:
    with pytest.raises(UsageError, match="'tmaze' has a single seat"):
        make("tmaze", num_envs=1, seed=0).play_against(Opponents(groups=()))


def test_boards_are_drawn() -> None:
    env = make("tic-tac-toe", num_envs=1, seed=0, params={"seat": "player_1"})
    env.play_against(Opponents(groups=((Scripted(first_legal),),)))
    env.reset()
    blank = env.render()
    env.step(np.array([4]))
    assert env.render("ansi") == "O..\n.X.\n..."
    assert env.render().shape == blank.shape
    changed = (env.render() != blank).any(axis=2).reshape(3, 120, 3, 120).any(axis=(1, 3))
    np.testing.assert_array_equal(changed, [[True, False, False], [False, True, False], [False, False, False]])


def test_a_broken_game_fails_alone() -> None:
    class Breaking(LineGame):
        def move(self, games: np.ndarray, actions: np.ndarray) -> np.ndarray:
            if 1 in games and (self.board[1] > 0).sum() > 1:
                self.failures[1] = RuntimeError("spilt")
            return super().move(games, actions)

    game = Breaking(_RULES["tic-tac-toe"], 2)
    env = SeatedEnv("broken", game, SeatSettings(seat="player_1"), num_envs=2, seed=0, split="train")
    observation = env.step(last_legal(env.reset())).observation
    with pytest.raises(ActorsFailed, match=r"'broken' failed in step \(actor 1\): RuntimeError: spilt") as caught:
        env.step(last_legal(observation))
    assert [failure.actors for failure in caught.value.failures] == [(1,)]
    assert caught.value.brought.observation[MASK][0].sum() == 5
