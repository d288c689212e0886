"""What maintenance does to episodes in pieces: they stay together, or are not counted."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.maintenance.copying import copy
from pipelines.lake.maintenance.files import FileTable
from pipelines.lake.maintenance.retention import RetentionLimits, expire, make_plan
from pipelines.lake.maintenance.verify import verify
from pipelines.lake.reading import Reader, group_by_episode, read_pieces
from pipelines.lake.sql.catalog import query, summary
from pipelines.lake.sql.describing import describe
from pipelines.lake.store import Lake
from pipelines.lake.writer import Writer
from tests.lake.factories import assert_same
from tests.lake.pieces import fill_twice

LENGTHS = [7, 3, 12, 4, 20, 9]
EPISODES = 'select episode, uids, chunks, complete, length, "return", success, attempts from episodes order by episode'


@pytest.fixture
def lakes(tmp_path: Path) -> tuple[Lake, Lake]:
    whole, pieces = (Lake.create(tmp_path / name) for name in ("whole", "pieces"))
    fill_twice(whole, pieces, LENGTHS, steps=4)
    return whole, pieces


def joined(lake: Lake) -> list[dict[str, np.ndarray]]:
    reader = Reader(lake)
    found = [read_pieces(reader, group) for group in group_by_episode(lake, reader.uids())]
    return [dict(each.columns) for each in sorted(found, key=lambda each: each.info.seed)]


def assert_equal_episodes(ours: Lake, theirs: Lake) -> None:
    for left, right in zip(joined(ours), joined(theirs), strict=True):
        assert_same(left, right)


@pytest.mark.system
def test_compaction_keeps_episodes(lakes: tuple[Lake, Lake]) -> None:
    whole, pieces = lakes
    before = query(pieces, EPISODES)
    assert len(compact(pieces, grace_seconds=0).runs) == 1
    assert query(pieces, EPISODES) == before
    assert_equal_episodes(pieces, whole)
    assert not verify(pieces).corrupt


@pytest.mark.system
def test_a_copy_has_the_same_episodes_and_one_piece_brings_the_others(lakes: tuple[Lake, Lake], tmp_path: Path) -> None:
    whole, pieces = lakes
    target = Lake.create(tmp_path / "copy")
    copy(pieces, target, where="success and length < 4")
    some = query(target, "select length, complete from episodes order by 1")[1]
    assert some == [(3, True), (7, True), (9, True)]
    copy(pieces, target)
    assert query(target, EPISODES) == query(pieces, EPISODES)
    assert_equal_episodes(target, whole)


@pytest.mark.system
def test_what_is_left_of_an_episode_is_not_counted_as_one(lakes: tuple[Lake, Lake]) -> None:
    whole, pieces = lakes
    expire(pieces, RetentionLimits(where="chunk = 1 and length < 4"), grace_seconds=0)
    left = query(pieces, 'select length, "return" from episodes where complete order by all')[1]
    stored = query(whole, 'select length, "return" from episodes order by all')[1]
    assert set(left) <= set(stored)
    assert summary(pieces)["episodes"] == len(left) < len(LENGTHS)
    incomplete = query(pieces, "select count(*) from episodes where not complete")[1][0][0]
    assert incomplete > 0
    tasks = describe(pieces)["tasks"]
    assert sum(task["episodes"] for task in tasks) == len(left)
    assert max(task["length_max"] or 0 for task in tasks) == max(length for length, _ in left)


@pytest.mark.system
def test_pieces_expire_together_the_episode_that_ended_first_before_others(lakes: tuple[Lake, Lake]) -> None:
    """They are stored one piece of each episode in turn, so the shorter ones end first."""
    _, pieces = lakes
    for limits, left in (
        (RetentionLimits(max_steps=50), [7, 9, 12, 20]),
        (RetentionLimits(max_steps=42), [9, 12, 20]),
        (RetentionLimits(max_trajectories=6), [20]),
    ):
        expire(pieces, limits, grace_seconds=0)
        assert query(pieces, "select length, complete from episodes order by 1")[1] == [(n, True) for n in left]


def test_an_episode_is_as_old_as_its_newest_piece(lakes: tuple[Lake, Lake]) -> None:
    _, pieces = lakes
    text = "select max(t_commit) from trajectories where episode = (select episode from episodes where length = 12)"
    ((newest,),) = query(pieces, text)[1]
    inventory = FileTable(pieces)
    inventory.refresh()
    plan = make_plan(inventory, RetentionLimits(max_age=100.0), now=newest + 100.0)
    plan.carry_out(pieces, reason="age")
    left = query(pieces, "select length, complete from episodes order by 1")[1]
    assert left == [(n, True) for n in (12, 20)] or left == [(n, True) for n in (9, 12, 20)]


@pytest.mark.system
def test_pieces_of_a_writer_that_was_killed_are_saved(lakes: tuple[Lake, Lake], tmp_path: Path) -> None:
    whole, pieces = lakes
    lake = Lake.create(tmp_path / "killed")
    stored = [Reader(pieces).read(uid) for uid in Reader(pieces).uids()]
    writer: Writer = lake.writer(pieces.only_schema(), seal_seconds=1e9)
    for each in stored:
        writer.append(each.columns, each.info)
    copied = tmp_path / "after"  # as if the writer had been killed: its lock is not copied
    shutil.copytree(lake.path, copied)
    assert Lake(copied).salvage() == len(stored)
    columns = 'episode, length, "return", complete, attempts, seed'
    text = f"select {columns} from episodes where chunks > 1 order by episode"
    assert query(Lake(copied), text) == query(pieces, text)
    assert_equal_episodes(Lake(copied), whole)
    writer.close()
