"""relabel: goals of episodes in pieces are those of whole episodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelines.envs.goals import GOAL_RULES
from pipelines.lake.reading import Reader, group_by_episode, read_pieces
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectory
from pipelines.stages import collect, relabel
from tests.lake.factories import assert_same
from tests.stages.recipes import tiny

GOALS = {"name": "goal-frozen-lake"}


def collected(place: Path, chunk_steps: int) -> Lake:
    collect.run(tiny(env=GOALS, collect={"steps": 400, "chunk_steps": chunk_steps}), lake=place)
    return Lake(place)


@pytest.fixture
def pieces(tmp_path: Path) -> Lake:
    return collected(tmp_path / "pieces", 3)


def derived(lake: Lake) -> list[Trajectory]:
    """Read derived episodes, joined."""
    uids = [uid for (uid,) in query(lake, "select uid from trajectories where base_uid is not null order by uid")[1]]
    reader = Reader(lake)
    return [read_pieces(reader, group) for group in group_by_episode(lake, uids)]


def by_content(found: list[Trajectory]) -> list[Trajectory]:
    return sorted(found, key=lambda each: b"".join(each.columns[name].tobytes() for name in sorted(each.columns)))


def relabelled(lake: Lake, **wanted: object) -> int:
    settings = tiny(env=GOALS, relabel=wanted)
    return int(relabel.run(settings, lake=lake.path).metrics["trajectories"])


@pytest.mark.system
def test_hindsight_sees_the_whole_episode(tmp_path: Path, pieces: Lake) -> None:
    """Final goals follow from the episodes alone, not from their uids."""
    whole = collected(tmp_path / "whole", 0)
    for lake in (whole, pieces):
        assert relabelled(lake, relabeler="hindsight:final") > 10
    ours, theirs = by_content(derived(pieces)), by_content(derived(whole))
    assert len(ours) == len(theirs)
    for left, right in zip(ours, theirs, strict=True):
        assert_same(dict(left.columns), dict(right.columns))
        assert (left.info.success, left.info.task) == (right.info.success, right.info.task)
    columns = 'length, "return", success, terminated, truncated, task, complete'
    text = f"select {columns} from episodes where base_uid is not null order by all"
    assert query(pieces, text) == query(whole, text)
    assert query(pieces, "select max(chunks) from episodes where base_uid is not null")[1][0][0] > 1


@pytest.mark.system
@pytest.mark.parametrize("strategy", ["future", "random"])
def test_derived_episodes_obey_the_goal_rule_and_times_go_on(pieces: Lake, strategy: str) -> None:
    relabelled(pieces, relabeler=f"hindsight:{strategy}", copies=3)
    found = derived(pieces)
    assert len(found) > 30
    for each in found:
        reward, success = GOAL_RULES.get("goal-frozen-lake").outcome(each.columns)
        np.testing.assert_array_equal(each.columns["reward"], reward)
        np.testing.assert_array_equal(np.flatnonzero(success), [each.length])
        assert each.columns["terminated"][-1] == 1
        assert not each.columns["truncated"].any()
        assert each.columns["action"][0] == each.columns["reward"][0] == 0
    rows = query(pieces, "select episode, chunk, first_step, length from trajectories where base_uid is not null")[1]
    ends = {(episode, chunk): first + length for episode, chunk, first, length in rows}
    assert all(first == ends.get((episode, chunk - 1), 0) for episode, chunk, first, _ in rows)
    assert query(pieces, "select count(*) from episodes where not complete")[1] == [(0,)]


@pytest.mark.system
def test_repeating_adds_nothing_and_a_partial_version_is_completed(pieces: Lake) -> None:
    from pipelines.lake.maintenance.retention import RetentionLimits, expire

    count = relabelled(pieces, relabeler="hindsight:final")
    assert relabelled(pieces, relabeler="hindsight:final") == 0
    lost = query(pieces, "select uid from trajectories where base_uid is not null and chunk = 1 order by uid limit 3")[
        1
    ]
    names = ", ".join(f"'{uid}'" for (uid,) in lost)
    expire(pieces, RetentionLimits(where=f"uid in ({names})"), grace_seconds=0)
    assert query(pieces, "select count(*) from trajectories where base_uid is not null")[1][0][0] == count - 3
    assert relabelled(pieces, relabeler="hindsight:final") == 3
    assert query(pieces, "select count(*) from episodes where not complete")[1] == [(0,)]


@pytest.mark.system
def test_an_episode_that_is_still_running_waits(tmp_path: Path, pieces: Lake) -> None:
    (last,) = query(pieces, "select uid, length from trajectories where chunk = 2 and not continues limit 1")[1]
    reader, kept = Reader(pieces), Lake.create(tmp_path / "kept")
    stored = [reader.read(uid) for uid in reader.uids() if uid != last[0]]
    running = reader.read(last[0])
    with kept.writer(pieces.only_schema()) as writer:
        for each in stored:
            writer.append(each.columns, each.info)
    relabelled(kept, relabeler="hindsight:final")
    before = len(derived(kept))
    with kept.writer(pieces.only_schema()) as writer:
        writer.append(running.columns, running.info)
    assert relabelled(kept, relabeler="hindsight:final") in (2, 3)
    assert len(derived(kept)) == before + 1


@pytest.mark.system
def test_a_share_is_one_of_episodes(pieces: Lake) -> None:
    relabelled(pieces, relabeler="hindsight:final", fraction=0.5)
    text = "select count(distinct b.episode) from trajectories t join trajectories b on t.base_uid = b.uid"
    chosen = query(pieces, f"{text} where b.episode <> b.uid")[1][0][0]
    total = query(pieces, "select count(*) from episodes where chunks > 1 and base_uid is null")[1][0][0]
    assert 0 < chosen < total
    assert query(pieces, "select count(*) from episodes where not complete")[1] == [(0,)]
