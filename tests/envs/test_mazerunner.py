"""MazeRunner equals a literal one; its mazes grow as the rules say; its goals can be replayed by their rule."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.envs.draws import Draws
from pipelines.envs.goals import GOAL_SEQUENCES
from pipelines.envs.make import make
from pipelines.envs.suites import mazerunner
from pipelines.envs.suites.lake_maps import is_held_out
from pipelines.errors import UsageError
from tests.envs.literal import assert_equal
from tests.envs.literal_maze import LiteralMazeRunner, grow
from tests.tiers import crossed, some


def made(num_envs=8, *, seed=3, split="train", **params):
    return make("mazerunner", num_envs=num_envs, seed=seed, split=split, params=params)


@pytest.mark.parametrize(
    ("params", "good"),
    crossed(
        [
            {"max_episode_steps": 30},
            {"size": 10, "goals": 2, "max_episode_steps": 25},
            {"size": 9, "goals": 1, "shuffle_actions": True, "max_episode_steps": 40},
            {"size": 15, "goals": 5, "max_episode_steps": 60},
        ],
        [0.0, 0.9],
    ),
    ids=str,
)
def test_equals_the_literal_maze(params, good):
    env = made(num_envs=5, **params)
    assert (
        assert_equal(
            env,
            lambda i: LiteralMazeRunner(env.tasks(np.array([i]))[0], limit=env.spec.horizon),
            steps=130,
            good=good,
        )
        > 5
    )


@pytest.mark.parametrize("size", some([9, 11, 14], 0))
def test_mazes_grow_as_the_literal_ones(size):
    draws, side = Draws(1, "train", "maze"), size // 2 * 2 + 1
    episodes, candidates = np.arange(6), np.array([0, 0, 1, 1, 2, 5])
    stride = int(0.75 * (side // 2) ** 2) * (2 + int(0.75 * 10 * side))  # draws of a candidate
    for walls, episode, candidate in zip(
        mazerunner.grow(draws, 4, episodes, candidates, side), episodes, candidates, strict=True
    ):
        literal = grow(
            size, lambda n, e=episode, c=candidate: float(draws.uniform(np.array([e]), 4, c * stride + n)[0])
        )
        np.testing.assert_array_equal(walls.reshape(side, side), literal)


@pytest.mark.parametrize("size", some([9, 11, 21, 31], 1))
def test_every_free_cell_can_be_reached_from_the_start(size):
    walls = mazerunner.grow(Draws(0, "train", "maze"), 0, np.arange(300), np.zeros(300, dtype=np.int64), size)
    boards = walls.reshape(-1, size, size)
    reach = np.zeros_like(boards)
    reach[:, size - 2, size // 2] = True
    for _ in range(size * size):
        before = reach.sum()
        spread = reach.copy()
        spread[:, 1:] |= reach[:, :-1]
        spread[:, :-1] |= reach[:, 1:]
        spread[:, :, 1:] |= reach[:, :, :-1]
        spread[:, :, :-1] |= reach[:, :, 1:]
        reach = spread & ~boards
        if reach.sum() == before:
            break
    np.testing.assert_array_equal(reach, ~boards)
    assert (~walls).sum(axis=1).min() - 1 >= mazerunner.count_free(size)
    assert len(np.unique(walls, axis=0)) > 40


def test_the_start_is_in_a_dead_end():
    env = made()
    first = env.reset()["obs.observation"]
    np.testing.assert_array_equal(first[:, [2, 4, 5]], 0)  # west, east, south
    assert (first[:, 3] >= np.float32(3 / 11)).all()


def test_goals_are_distinct_free_cells_but_not_the_start():
    env = made(num_envs=2000, size=9, goals=12, holdout=0)
    env.reset()
    assert not np.take_along_axis(env.walls, env.goals, axis=1).any()
    assert (env.goals != mazerunner.find_start(9)).all()
    assert (np.diff(np.sort(env.goals, axis=1), axis=1) > 0).all()
    free = ~env.walls
    free[:, mazerunner.find_start(9)] = False
    expected = (free / free.sum(axis=1, keepdims=True)).mean(axis=0)
    first = np.bincount(env.goals[:, 0], minlength=81) / 2000
    np.testing.assert_allclose(first, expected, atol=0.02)


@pytest.mark.parametrize("size", some([9, 11], 0))
def test_train_and_test_share_no_maze(size):
    sides = {}
    for split in ("train", "test"):
        env = made(num_envs=400, split=split, size=size)
        env.reset()
        assert (is_held_out(env.walls, 0.2) == (split == "test")).all()
        sides[split] = {walls.tobytes() for walls in env.walls}
    assert not sides["train"] & sides["test"]


def test_a_maze_does_not_depend_on_what_was_made_ahead():
    one, many = made(num_envs=1), made(num_envs=7)
    many.reset()
    for i in range(7):
        one.reset()
        assert one.tasks(np.array([0])) == many.tasks(np.array([i]))


def test_impossible_wishes_are_refused(monkeypatch):
    with pytest.raises(UsageError) as caught:
        made(size=9, goals=60)
    assert "at most 29" in " ".join(caught.value.problems)
    monkeypatch.setattr(mazerunner, "_AHEAD", 1)
    with pytest.raises(UsageError, match="hardly a train maze"):
        made(num_envs=1, size=9, holdout=0.9999).reset()


@pytest.mark.parametrize("good", [0.3, 0.9])
def test_the_goal_rule_replays_what_the_maze_said(good):
    env = made(num_envs=12, size=9, goals=3, max_episode_steps=80)
    rule = GOAL_SEQUENCES.get("mazerunner")
    rng = np.random.default_rng(0)
    rows = [(env.reset(), np.zeros(12, dtype=np.float32), np.zeros(12, dtype=bool))]
    ends = np.full(12, 80)
    for step in range(80):
        actions = np.where(rng.random(12) < good, env.expert(), rng.integers(5, size=12))
        result = env.step(actions)
        rows.append((result.observation, result.reward, result.success))
        ends[result.success & (ends == 80)] = step + 1
    for i, end in enumerate(ends):
        column = {name: np.stack([row[0][name][i] for row in rows[: end + 1]]) for name in rows[0][0]}
        goals, reward, success = rule.replay(column[rule.achieved], column[rule.goals][0])
        np.testing.assert_array_equal(goals, column[rule.goals])
        np.testing.assert_array_equal(reward, [row[1][i] for row in rows[: end + 1]])
        np.testing.assert_array_equal(success, [row[2][i] for row in rows[: end + 1]])


def test_the_goal_rule_by_hand():
    """On a line: the first row reaches nothing, a goal out of turn is not reached, one that is done is passed."""
    rule = GOAL_SEQUENCES.get("mazerunner")
    path = np.array([[[x, 0.0]] for x in (1, 2, 1, 3, 2)], dtype=np.float32)
    goals = np.array([[-1, -1], [1, 0], [2, 0]], dtype=np.float32)
    shown, reward, success = rule.replay(path, goals)
    assert reward.tolist() == [0, 0, 1, 0, 1]
    assert success.tolist() == [False, False, False, False, True]
    assert shown[:, 1, 0].tolist() == [1, 1, -1, -1, -1]
    assert shown[:, 2, 0].tolist() == [2, 2, 2, 2, -1]
    shown, reward, success = rule.replay(path[:1], goals)
    assert not reward.any()
    assert not success.any()


@pytest.mark.system
def test_expert_reaches_all_goals():
    env = made(num_envs=100)
    env.reset()
    total, solved = np.zeros(100), np.zeros(100, dtype=bool)
    for _ in range(250):
        result = env.step(env.expert())
        total += result.reward * ~solved
        solved |= result.success
    assert solved.all()
    assert (total == 3).all()
