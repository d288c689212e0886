"""What has ended is handed over in order, and short episodes together."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.lake.trajectory import Infos, Trajectories, TrajectoryInfo
from pipelines.rollout import episodes
from pipelines.rollout.episodes import EpisodeQueue, EpisodeStats, FinishedEpisodes


def told(number=1, *, rows=3, version=0, recorded=True):
    trajectories = None
    if recorded:
        infos = Infos(TrajectoryInfo(policy_version=version), {"seed": list(range(number))})
        trajectories = Trajectories({"reward": np.zeros(rows * number)}, [rows] * number, infos)
    return FinishedEpisodes(number=number, stats=EpisodeStats(episodes=number), trajectories=trajectories)


def taken(waiting, before=None):
    """All that may be taken, in the batches in which it is."""
    return list(iter(lambda: waiting.take(before), []))


def test_whoever_was_first_it_comes_in_the_order_of_rounds_and_parts():
    turns = [(1, 0), (0, 1), (2, 1), (0, 0), (2, 0)]
    waiting, by_turn = EpisodeQueue(), {turn: told() for turn in turns}
    for turn in turns:
        waiting.put(turn, by_turn[turn])
    assert waiting.take((0, 0)) == []
    assert [each is by_turn[turn] for each, turn in zip(waiting.take((2, 0)), sorted(turns), strict=False)] == [
        True
    ] * 3
    assert taken(waiting) == [[by_turn[2, 0], by_turn[2, 1]]]
    assert not waiting.due


def test_those_of_another_policy_are_stored_apart():
    waiting = EpisodeQueue()
    for turn, version in enumerate([0, 0, 1, 1, 0]):
        waiting.put((turn, 0), told(version=version))
    assert [len(batch) for batch in taken(waiting)] == [2, 2, 1]


def test_large_ones_are_not_copied_once_more():
    waiting, rows = EpisodeQueue(), episodes._LARGE // 8 // 2
    for turn, size in enumerate([rows, rows, 1, 3 * rows, 1, 1]):
        waiting.put((turn, 0), told(rows=size))
    assert [len(batch) for batch in taken(waiting)] == [2, 1, 1, 2]


def test_without_a_record_they_are_told_together():
    waiting = EpisodeQueue()
    for turn in range(3):
        waiting.put((turn, 0), told(recorded=False))
    waiting.put((3, 0), told())
    assert [len(batch) for batch in taken(waiting)] == [3, 1]


def test_who_is_alone_does_not_wait_and_those_who_follow_do_for_a_moment(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(episodes.time, "monotonic", lambda: now[0])
    waiting = EpisodeQueue()
    assert not waiting.due
    waiting.put((0, 0), told())
    assert waiting.due
    waiting.take()
    waiting.put((1, 0), told())
    waiting.put((2, 0), told())
    now[0] = 0.9 * episodes._APART_SECONDS
    assert not waiting.due
    now[0] = episodes._APART_SECONDS
    assert waiting.due
    assert len(waiting.take()) == 2
    assert not waiting.due


def test_many_do_not_wait():
    waiting = EpisodeQueue()
    waiting.put((0, 0), told())
    waiting.take()
    waiting.put((1, 0), told(number=episodes._MANY - 1))
    assert not waiting.due
    waiting.put((2, 0), told())
    assert waiting.due
    waiting.take()
    waiting.put((3, 0), told())
    assert not waiting.due


def test_what_had_to_wait_for_others_waits_no_longer(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(episodes.time, "monotonic", lambda: now[0])
    waiting = EpisodeQueue()
    waiting.put((4, 0), told())
    waiting.take()
    waiting.put((5, 0), told())
    now[0] = 1.0
    assert waiting.take((5, 0)) == []
    assert waiting.due


@pytest.mark.parametrize("number", [1, 2, 5])
def test_joined_trajectories_are_the_same_one_by_one(number):
    rng = np.random.default_rng(number)
    several = []
    for k in range(number):
        rows = rng.integers(2, 6, size=int(rng.integers(1, 4))).tolist()
        each = {"task": [f"{k}-{i}" for i in range(len(rows))], "epsilon": rng.random(len(rows))}
        each |= {"attempts": [(True, False)] * len(rows)} if k % 2 else {}
        each |= {"t_end": rng.random(len(rows)).tolist()} if k % 3 == 0 else {}
        shared = TrajectoryInfo(env="it", t_end=7.0)
        columns = {"obs": rng.random((sum(rows), 2)), "reward": rng.random(sum(rows))}
        several.append(Trajectories(columns, rows, Infos(shared, each)))
    joined = Trajectories.join(several)
    singly = [trajectory for trajectories in several for trajectory in trajectories]
    assert len(joined) == len(singly)
    assert joined.nbytes == sum(trajectories.nbytes for trajectories in several)
    for ours, theirs in zip(joined, singly, strict=True):
        assert ours.info == theirs.info
        assert all(np.array_equal(ours.columns[name], theirs.columns[name]) for name in ("obs", "reward"))
