"""Episodes stored in pieces are those that would have been stored whole."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.data.gather import Gatherer
from pipelines.data.view import View
from pipelines.envs.env import ActorsFailed
from pipelines.envs.make import make
from pipelines.lake.reading import join_pieces
from pipelines.lake.schema import Schema
from pipelines.lake.sql.catalog import query, summary
from pipelines.lake.sql.describing import describe
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectory
from pipelines.learning.batch import TensorBatch
from pipelines.rollout.policies import RandomPolicy
from pipelines.rollout.rollout import Cutting, Recording, Rollout
from tests.tiers import examples

ENVS = {
    "meta-frozen-lake": {"size": 3, "attempts": 3},
    "dark-key-door": {"size": 2, "horizon": 20, "attempt_steps": 6},
    "tmaze": {"corridor": 4},
    "gym:Pendulum-v1": {"max_episode_steps": 15},
}


def play(name, *, steps, calls=1, chunk=0, kept=0, cut_between=0, seed=3):
    """Play with random actions; returns what was stored, the summaries of finished episodes, and the mean return."""
    env = make(name, num_envs=3, seed=seed, params=ENVS[name])
    stored, finished = [], []
    rollout = Rollout(
        env,
        RandomPolicy(env.spec.spaces.action, seed=seed),
        recording=Recording(
            sink=stored.extend, seed=seed, keep_unfinished=True, cutting=Cutting(steps=chunk, kept=kept)
        ),
        on_episode=finished.append,
    )
    means = []
    for call in range(calls):
        stats = rollout.run(steps=steps)
        means.append((stats.trajectories, stats.return_mean, stats.success_mean))
        if cut_between and call + 1 < calls:
            rollout.cut(cut_between)
    rollout.finish()
    return stored, finished, means, Schema(env.spec.spaces)


def join(stored: list[Trajectory]) -> list[Trajectory]:
    """Join the pieces of each episode by hand, in the order of their ends."""
    groups: dict[str, list[Trajectory]] = {}
    for number, each in enumerate(stored):
        groups.setdefault(each.info.episode or f"whole {number}", []).append(each)
    found = []
    for pieces in groups.values():
        infos, start = [piece.info for piece in pieces], 0
        assert [info.chunk for info in infos] == list(range(len(pieces)))
        assert [info.continues for info in infos] == [True] * (len(pieces) - 1) + [False]
        for piece in pieces:
            assert piece.info.first_step == start
            start += piece.length
            if piece.info.continues:
                assert piece.columns["truncated"][-1]
                assert not piece.columns["terminated"][-1]
                assert piece.info.success is None
        for before, after in pairwise(pieces):
            for column in before.columns:
                if column != "truncated":
                    np.testing.assert_array_equal(before.columns[column][-1], after.columns[column][0])
        attempts = tuple(success for info in infos for success in info.attempts)
        info = dataclasses.replace(infos[-1], attempts=attempts, episode="", chunk=0, first_step=0)
        found.append(Trajectory(join_pieces([piece.columns for piece in pieces]), info))
    return found


def keyed(trajectories):
    return sorted(trajectories, key=lambda each: (each.info.seed, each.info.task, each.columns["action"].tobytes()))


@examples(25)
@given(
    name=st.sampled_from(sorted(ENVS)),
    chunk=st.integers(1, 25),
    calls=st.integers(1, 4),
    cut=st.integers(0, 8),
    steps=st.integers(1, 90),
)
def test_pieces_join_to_the_episodes_that_are_stored_whole(name, chunk, calls, cut, steps):
    whole, finished, means, _ = play(name, steps=steps, calls=calls)
    pieces, same, same_means, _ = play(name, steps=steps, calls=calls, chunk=chunk, cut_between=cut, kept=5)
    assert [dataclasses.replace(e, achieved=None) for e in same] == [
        dataclasses.replace(e, achieved=None) for e in finished
    ]
    assert repr(same_means) == repr(means)
    assert all(piece.length <= chunk for piece in pieces)
    joined = join(pieces)
    assert len(joined) == len(whole)
    for left, right in zip(keyed(joined), keyed(whole), strict=True):
        for column, values in right.columns.items():
            assert values.dtype == left.columns[column].dtype
            np.testing.assert_array_equal(values, left.columns[column])
        plain = {"epsilon": 0.0, "t_start": 0.0, "t_end": 0.0}
        assert dataclasses.replace(left.info, **plain) == dataclasses.replace(right.info, **plain)


def fill(lake: Lake, stored: list[Trajectory], schema: Schema) -> Lake:
    with lake.writer(schema, seal_seconds=1e9) as writer:
        for place, each in enumerate(stored):
            writer.append(each.columns, each.info)
            if place % 3 == 2:
                writer.seal()
    return lake


@pytest.mark.system
@pytest.mark.parametrize("name", sorted(ENVS))
def test_a_lake_of_pieces_counts_each_episode_once(name, tmp_path):
    stored, *_, schema = play(name, steps=200)
    pieces, *_ = play(name, steps=200, chunk=4)
    whole, chunked = (
        fill(Lake.create(tmp_path / place), given, schema) for place, given in (("whole", stored), ("pieces", pieces))
    )
    assert len(pieces) > len(stored)
    columns = 'length, "return", success, attempts, terminated, truncated, seed, task, complete, policy_version'
    text = f"select {columns} from episodes order by all"
    assert query(chunked, text) == query(whole, text)
    assert summary(chunked)["episodes"] == summary(whole)["episodes"] == len(stored)
    assert summary(chunked)["trajectories"] == len(pieces)
    ours, theirs = describe(chunked), describe(whole)
    for table in ("tasks", "sources"):
        tables = (sorted(each[table], key=lambda row: (row["env"], row.get("task", ""))) for each in (ours, theirs))
        for mine, other in zip(*tables, strict=True):
            assert {**mine, "trajectories": 0} == {**other, "trajectories": 0}
    (uids,) = query(chunked, "select list(uid) from trajectories")[1][0]
    (listed,) = query(chunked, "select flatten(list(uids)) from episodes")[1][0]
    assert sorted(uids) == sorted(listed)


def test_an_episode_without_its_last_or_a_middle_piece_is_not_complete(tmp_path):
    pieces, *_, schema = play("gym:Pendulum-v1", steps=3 * 15, chunk=4)
    assert [piece.info.chunk for piece in pieces].count(3) == 3
    first = pieces[0].info.episode
    second = next(piece.info.episode for piece in pieces if piece.info.episode != first)
    missing = {(first, 3), (second, 1)}
    kept = [piece for piece in pieces if (piece.info.episode, piece.info.chunk) not in missing]
    lake = fill(Lake.create(tmp_path / "lake"), kept, schema)
    assert query(lake, "select complete, count(*) from episodes group by 1 order by 1")[1] == [(False, 2), (True, 1)]
    (task,) = describe(lake)["tasks"]
    assert (task["episodes"], task["length_max"], task["trajectories"]) == (1, 15, 10)


def test_windows_inside_pieces_are_those_of_whole_episodes(tmp_path):
    """Also their times and what led to their first rows: the network sees the same."""
    name, window = "meta-frozen-lake", 4
    stored, *_, schema = play(name, steps=200)
    pieces, *_ = play(name, steps=200, chunk=7)
    lakes = [fill(Lake.create(tmp_path / place), given, schema) for place, given in (("a", stored), ("b", pieces))]
    views = [View(lake, schema.id) for lake in lakes]
    for view in views:
        view.refresh()
    batches = []
    for view, filled, joined in zip(views, (stored, pieces), (stored, join(pieces)), strict=True):
        number = {id(each): place for place, each in enumerate(keyed(joined))}
        places, starts, stops, keys = [], [], [], []
        episodes = {}
        for row, each in enumerate(filled):
            episodes.setdefault(each.info.episode or row, []).append((row, each))
        for (_, rows), whole in zip(episodes.items(), joined, strict=True):
            for row, each in rows:
                for start in range(each.length):
                    at = each.info.first_step + start
                    stop = min(start + window, each.length)
                    places.append(row), starts.append(start), stops.append(stop)
                    keys.append((number[id(whole)], at, stop - start))
        found = Gatherer(view, window + 1).gather(np.array(places), np.array(starts), np.array(stops))
        batches.append((found, keys, np.array(places), np.array(starts)))
    tensors = [TensorBatch.from_numpy(found, schema.spaces) for found, *_ in batches]
    rows = []
    for (found, keys, places, starts), tensor, filled in zip(batches, tensors, (stored, pieces), strict=True):
        known = dict(zip(zip(places.tolist(), starts.tolist(), strict=True), keys, strict=True))
        begins = [filled[row].info.first_step for row in found.trajectory]
        local = found.start - np.array(begins)
        rows.append(
            {known[row, at]: place for place, (row, at) in enumerate(zip(found.trajectory, local, strict=True))}
        )
        assert (tensor.time[:, 0].numpy() == found.start).all()
    shared = rows[0].keys() & rows[1].keys()
    assert len(shared) > len(rows[1]) / 2
    for key in shared:
        one, other = rows[0][key], rows[1][key]
        for tensor in ("action", "reward", "time", "terminated", "mask", "valid_rows"):
            left, right = (getattr(each, tensor)[place] for each, place in zip(tensors, (one, other), strict=True))
            assert left.equal(right), (tensor, key)
        for column in schema.spaces.observation:
            assert tensors[0].observation[column][one].equal(tensors[1].observation[column][other])


def test_a_failure_loses_the_running_piece_only():
    stored = []
    env = make("tests.envs.own:Line", num_envs=2, seed=0, params={"fault": "raise"})
    recording = Recording(sink=stored.extend, cutting=Cutting(steps=2))
    rollout = Rollout(env, RandomPolicy(env.spec.spaces.action, seed=0), recording=recording)
    with pytest.raises(ActorsFailed):
        rollout.run(steps=20)
    assert [(each.length, each.info.chunk, each.info.continues) for each in stored] == [(2, 0, True)] * 2
    assert rollout.total_steps == sum(each.length for each in stored)
    assert rollout.episodes_dropped == 2


def test_a_cut_episode_keeps_the_rows_that_a_new_policy_reads():
    env = make("gym:Pendulum-v1", num_envs=2, seed=0, params={"max_episode_steps": 200})
    whole, cut = [], []
    for stored, kept in ((whole, {}), (cut, {"steps": 7, "kept": 30})):
        twin = make("gym:Pendulum-v1", num_envs=2, seed=0, params={"max_episode_steps": 200})
        policy = RandomPolicy(env.spec.spaces.action, seed=0)
        rollout = Rollout(twin, policy, recording=Recording(sink=lambda found: None, cutting=Cutting(**kept)))
        rollout.run(steps=2 * 150)
        stored.extend(rollout.prefixes())
        assert rollout.time.tolist() == [150, 150]
    for left, right in zip(whole, cut, strict=True):
        assert len(left["reward"]) == 150
        assert 30 <= len(right["reward"]) < 60
        for name, values in right.items():
            np.testing.assert_array_equal(values, left[name][150 - len(values) :])
