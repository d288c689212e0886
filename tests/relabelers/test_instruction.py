"""Relabelled instructions: what the environment would have shown and paid, had it asked for them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.envs.goals import GOAL_SEQUENCES, GoalSequenceRule, is_same
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.lake.trajectory import Trajectory, TrajectoryInfo
from pipelines.relabelers.base import Chain, Context
from pipelines.relabelers.goals import Instruction, draw_different
from pipelines.relabelers.paths import Paths, make_keys
from tests.envs.literal_maze import LiteralMazeRunner
from tests.relabelers.trajectories import applied, collected, derive, laid, uid
from tests.tiers import examples

STRATEGIES = ["instruction:some", "instruction:all", "hindsight:final", "hindsight:future", "hindsight:random"]
RULE = GoalSequenceRule(reached=is_same)


def real_arrivals(rule, columns):
    """Times at which a trajectory's own goals were reached, in order."""
    return np.flatnonzero(rule.replay(columns[rule.achieved], columns[rule.goals][0])[1])


def assert_replays(rule, base, whole, success):
    """What is stored is what the literal rule says of the goals that are asked for at the beginning."""
    shown, reward, won = rule.replay(whole[rule.achieved], whole[rule.goals][0])
    np.testing.assert_array_equal(whole[rule.goals], shown)
    np.testing.assert_array_equal(whole["reward"], reward)
    assert whole["reward"][0] == 0
    last = len(reward) - 1
    assert bool(success) == won.any() == won[last]
    assert not whole["terminated"][:last].any()
    assert not whole["truncated"][:last].any()
    if won[last]:
        assert whole["terminated"][last] == 1
    else:
        assert len(whole["reward"]) == len(base["reward"])
        assert whole["terminated"][last] == base["terminated"][last]
        assert whole["truncated"][last] == base["truncated"][last]
    kept = real_arrivals(rule, base)
    assert set(kept.tolist()) <= set(np.flatnonzero(reward).tolist())  # real successes keep their times
    asked, before = whole[rule.goals][0], base[rule.goals][0]
    assert (asked != rule.done).any(axis=1).sum() == (before != rule.done).any(axis=1).sum()
    assert len(np.flatnonzero(reward)) > len(kept)


@pytest.mark.system
@examples(10)
@given(seed=st.integers(0, 10**6), strategy=st.sampled_from(STRATEGIES), goals=st.integers(1, 5))
def test_mazes_replay_through_the_rule_and_through_a_literal_maze(seed, strategy, goals):
    rule = GOAL_SEQUENCES.get("mazerunner")
    schema, found = collected("mazerunner", seed=seed, steps=320, size=9, goals=goals, max_episode_steps=40)
    chain = Chain([strategy], Context(schema=schema, env="mazerunner"), seed=seed)
    derived = derive(chain, found)
    for number, whole in enumerate(applied(derived, found)):
        base = found[derived.place[number]]
        assert_replays(rule, base.columns, whole, derived.success[number])
        _play(base.info.task, whole)
    if strategy == "instruction:all":
        assert (derived.success == 1).all()
        assert set(derived.place.tolist()) == {
            place for place, each in enumerate(found) if len(real_arrivals(rule, each.columns)) < goals
        }


def _play(task, whole):
    """The same moves in the literal maze that asks for the new goals."""
    size = len(task.split()[0].split("/"))
    cells = np.rint(whole["obs.goals"][0] * size).astype(int).tolist()
    words = [
        w if not w.startswith("goals=") else "goals=" + ";".join(f"{r},{c}" for r, c in cells) for w in task.split()
    ]
    maze = LiteralMazeRunner(" ".join(words), limit=40)
    for t in range(1, len(whole["reward"])):
        outcome = maze.step(int(whole["action"][t]))
        np.testing.assert_array_equal(np.array(outcome.observation["obs.goals"], np.float32), whole["obs.goals"][t])
        np.testing.assert_array_equal(
            np.array(outcome.observation["obs.observation"], np.float32), whole["obs.observation"][t]
        )
        assert outcome.reward == whole["reward"][t]
        assert (outcome.terminated, outcome.truncated) == (bool(whole["terminated"][t]), bool(whole["truncated"][t]))


def made(rng, *, several, goals, length, cells=4):
    """A trajectory that achieves up to `several` of a few cells a step, padded, and is told about its goals."""
    achieved = rng.integers(0, cells, (length + 1, several, 2)).astype(np.float32)
    achieved[rng.random((length + 1, several)) < 0.4] = RULE.done
    asked = rng.integers(0, cells, (goals, 2)).astype(np.float32)
    asked[rng.random(goals) < 0.2] = RULE.done
    shown, reward, won = RULE.replay(achieved, asked)
    rows = int(np.flatnonzero(won)[0]) + 1 if won.any() else length + 1
    flags = np.zeros((2, rows), np.uint8)
    flags[:, -1] = (won.any(), not won.any())
    columns = {"obs.achieved": achieved, "obs.goals": shown, "action": np.zeros(length + 1, np.int32), "reward": reward}
    columns = {name: values[:rows] for name, values in columns.items()}
    return columns | {"terminated": flags[0], "truncated": flags[1], "reset": np.zeros(rows, np.uint8)}


@examples(60)
@given(
    seed=st.integers(0, 10**6),
    strategy=st.sampled_from(["some", "all", "final", "future", "random", "none"]),
    several=st.integers(1, 3),
    goals=st.integers(1, 4),
)
def test_every_relabelled_trajectory_replays_whatever_was_achieved(seed, strategy, several, goals):
    rng = np.random.default_rng(seed)
    found = [
        Trajectory(made(rng, several=several, goals=goals, length=rng.integers(1, 12)), TrajectoryInfo(), uid(i))
        for i in range(12)
    ]
    columns, rows = laid([each.columns for each in found])
    before = {name: values.copy() for name, values in columns.items()}
    uids = np.array([bytes.fromhex(each.uid) for each in found], "S16")
    paths = Instruction(RULE, strategy).relabel(Paths.of(columns, rows, uids, make_keys(seed, uids, 0)))
    for name, values in before.items():
        np.testing.assert_array_equal(columns[name], values)
    derived = paths.as_overlay(("obs.goals", "reward", "terminated", "truncated"))
    assert strategy != "none" or len(derived) == 0
    for number, whole in enumerate(applied(derived, found)):
        assert_replays(RULE, found[derived.place[number]].columns, whole, derived.success[number])


def by_hand(cells, goals):
    """A trajectory over cells of a line, told about its goals."""
    achieved = np.array([[[0, cell]] for cell in cells], np.float32)
    shown, reward, _ = RULE.replay(achieved, np.array([[0, goal] for goal in goals], np.float32))
    zeros = np.zeros(len(cells), np.uint8)
    return {"obs.achieved": achieved, "obs.goals": shown, "reward": reward, "terminated": zeros, "truncated": zeros}


def versions(columns, strategy, count):
    columns, rows = laid([columns] * count)
    uids = np.array([b"u" * 16] * count, "S16")
    paths = Instruction(RULE, strategy).relabel(Paths.of(columns, rows, uids, make_keys(1, uids, np.arange(count))))
    for start, stop in zip(paths.first, paths.last + 1, strict=True):
        yield paths.columns["obs.goals"][start][:, 1].tolist(), paths.columns["reward"][start:stop].tolist()


def test_all_fills_the_sequence_and_keeps_the_real_success_in_its_place():
    # cells 1 2 3 4 at times 1 2 3 4 (5 at the start); asked for 3, then 9, then 8: one real success, at time 3
    found = set()
    for goals, reward in versions(by_hand([5, 1, 2, 3, 4], [3, 9, 8]), "all", 60):
        assert goals == sorted(goals)
        assert len(set(goals)) == 3
        assert 3 in goals
        assert reward == [0.0, *(float(t in goals) for t in range(1, len(reward)))]
        found.add(tuple(goals))
    assert found == {(1, 2, 3), (1, 3, 4), (2, 3, 4)}


def test_some_keeps_what_was_not_reached_at_the_end_while_there_is_room():
    found = {tuple(goals) for goals, _ in versions(by_hand([5, 1, 2], [9, 8]), "some", 80)}
    assert found == {(1, 9), (2, 9), (1, 2)}


def test_a_goal_of_the_first_row_is_not_paid_there():
    for goals, reward in versions(by_hand([5, 5, 6], [9]), "all", 20):
        assert reward == ([0.0, 1.0] if goals == [5] else [0.0, 0.0, 1.0])


def test_final_takes_the_last_and_future_what_came_after_the_last_success():
    columns = by_hand([5, 1, 2, 3, 4], [2, 9])
    assert {tuple(goals) for goals, _ in versions(columns, "final", 5)} == {(2, 4)}
    assert {tuple(goals) for goals, _ in versions(columns, "future", 40)} == {(2, 3), (2, 4)}
    assert {tuple(goals) for goals, _ in versions(columns, "random", 60)} == {(1, 2), (2, 3), (2, 4)}


def test_different_numbers_are_different_and_every_set_is_as_likely():
    u = np.random.default_rng(0).random((30_000, 4))
    chosen = draw_different(np.full(30_000, 5), np.full(30_000, 2), u)
    assert (chosen[:, 2:] == -1).all()
    sets, counts = np.unique(np.sort(chosen[:, :2], axis=1), axis=0, return_counts=True)
    assert len(sets) == 10
    assert (sets[:, 0] < sets[:, 1]).all()
    assert np.abs(counts - 3000).max() < 5 * np.sqrt(3000)
    assert draw_different(np.array([2, 0]), np.array([4, 1]), u[:2, :4])[0].tolist()[:2] in ([0, 1], [1, 0])
    assert draw_different(np.array([2, 0]), np.array([4, 1]), u[:2])[1].tolist() == [-1] * 4


@pytest.mark.parametrize("strategy", ["instruction:some", "hindsight:future"])
def test_a_version_does_not_depend_on_what_is_relabelled_beside_it(strategy):
    schema, found = collected("mazerunner", seed=5, steps=400, size=9, max_episode_steps=30)
    chain = Chain([strategy, "scale:2"], Context(schema=schema, env="mazerunner"), seed=3)
    together = derive(chain, found, copies=2)
    wholes = dict(zip(together.place.tolist(), applied(together, found), strict=True))
    for place, each in enumerate(found):
        alone = derive(chain, [each], copies=2)
        assert len(alone) == (place in wholes)
        for whole in applied(alone, [each]):
            for name, values in whole.items():
                np.testing.assert_array_equal(values, wholes[place][name])


def test_goals_of_another_shape_than_what_is_achieved_are_refused():
    from pipelines.errors import InputMissing

    spaces = Spaces(
        observation={"obs.achieved": Box(shape=(1, 3)), "obs.goals": Box(shape=(2, 2))}, action=Discrete(n=2)
    )
    with pytest.raises(InputMissing, match=r"\(m, d\) and \(k, d\) a step fit"):
        Chain(["instruction:all"], Context(schema=Schema(spaces), env="mazerunner"), seed=0)
