import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.errors import StageFailed, StorageError
from pipelines.events import Notice
from pipelines.lake.folders import list_all
from pipelines.lake.footer import hex_uids
from pipelines.lake.live import LiveTable
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.reading import Reader
from pipelines.lake.sql import catalog
from pipelines.lake.storage import LocalStorage
from pipelines.lake.store import Lake
from tests.lake.factories import derive, fill, live_ids, quarantine, remove, segment_files
from tests.tiers import some


def test_refresh_counts_what_is_new_and_keeps_what_it_knows(lake: Lake) -> None:
    follower = LiveTable(lake)
    assert follower.refresh().added == 0
    fill(lake, [3, 4, 5], seal_every=1)
    assert follower.refresh().added == 3
    first = list(follower.segments)
    assert follower.refresh().added == 0
    fill(lake, [6])
    assert follower.refresh().added == 1
    assert follower.segments[:3] == first
    assert [s.number for s in follower.segments] == [0, 1, 2, 3]
    assert [int(s.length[0]) for s in follower.segments] == [3, 4, 5, 6]


def test_a_new_follower_sees_the_same_order(lake: Lake) -> None:
    fill(lake, [3] * 8, seal_every=1)
    one, two = LiveTable(lake), LiveTable(lake)
    one.refresh(), two.refresh()
    assert [s.id for s in one.segments] == [s.id for s in two.segments] == live_ids(lake)


def test_a_segment_that_comes_late_into_an_old_hour_is_seen(lake: Lake) -> None:
    """A writer whose clock is off, or that was stopped between naming and publishing."""
    fill(lake, [3, 4], seal_every=1)
    late = segment_files(lake)[0]
    old = lake.path / "segments" / "2001010100"
    old.mkdir()
    held = lake.path / "tmp" / "held"
    shutil.move(late, held)
    follower = LiveTable(lake)
    assert follower.refresh().added == 1
    shutil.move(held, old / late.name)
    assert follower.refresh().added == 1


def test_a_quiet_directory_is_not_listed_again(lake: Lake, monkeypatch) -> None:
    fill(lake, [3])
    hour = segment_files(lake)[0].parent
    os.utime(hour, (1, 1))
    follower = LiveTable(lake)
    follower.refresh()
    listed = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(str(path)) or real(path))
    assert follower.refresh().added == 0
    assert str(hour) not in listed


def test_what_cannot_be_read_is_told_once_and_passed_over(lake: Lake) -> None:
    fill(lake, [3, 4, 5], seal_every=1)
    path = segment_files(lake)[1]
    path.write_bytes(path.read_bytes()[:-50])
    (path.parent / "notes.txt").write_text("hello")
    (path.parent / "0000-foreign.arrow").write_bytes(b"not arrow")
    (lake.path / "segments" / "stray").write_text("x")
    told: list = []
    follower = LiveTable(lake, told.append)
    assert follower.refresh().added == 2
    assert follower.refresh().added == 0
    assert len(told) == len(follower.unreadable) == 2
    assert all(isinstance(event, Notice) and "amago lake verify" in event.text for event in told)


def test_hidden_segments_are_out_of_sight(lake: Lake) -> None:
    fill(lake, [3, 4, 5], seal_every=1)
    ids = live_ids(lake)
    remove(lake, time=0.0, reason="test", segments=(ids[0],))
    quarantine(lake, ids[1])
    assert live_ids(lake) == ids[2:]
    assert LiveTable(lake).refresh().added == 1
    assert LiveTable(lake).restore(ids).added == 1


def test_a_trajectory_published_twice_counts_once(lake: Lake) -> None:
    fill(lake, [3, 4])
    path = segment_files(lake)[0]
    shutil.copy(path, path.with_name("f" + path.name[1:]))
    follower = LiveTable(lake)
    assert follower.refresh().added == 2
    assert sum(len(s.uids) for s in follower.segments) == 2
    fill(lake, [5])
    assert follower.refresh().added == 1


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("all_of_it", [False, True])
def test_what_expired_and_is_derived_again_is_live_again(lake: Lake, looks: bool, all_of_it: bool) -> None:
    """By an open table and a new one, whether or not the table has looked between the two; SQL agrees."""
    bases = list(fill(lake, [3, 4]))
    derived = derive(
        lake, {base: {"reward": np.ones(rows, np.float32)} for base, rows in zip(bases, (4, 5), strict=True)}
    )
    follower, ranks = LiveTable(lake), LiveTable(lake)
    follower.refresh(), ranks.repeat(follower.collect_findings())
    gone = derived if all_of_it else derived[:1]
    expire(lake, RetentionLimits(where="uid in ({})".format(", ".join(f"'{uid}'" for uid in gone))), grace_seconds=600)
    if looks:
        follower.refresh()
    derive(lake, {bases[0]: {"reward": np.full(4, 2, np.float32)}})
    follower.refresh(), ranks.repeat(follower.collect_findings())
    fresh = LiveTable(lake)
    fresh.refresh()
    expected = sorted({*bases, *derived} - {*gone} | {derived[0]})
    for table in (follower, ranks, fresh):
        assert sorted(uid for segment in table.segments for uid in hex_uids(segment.uids)) == expected
    assert [uid for (uid,) in catalog.query(lake, "select uid from trajectories order by uid")[1]] == expected


def test_a_copy_is_live_when_the_first_one_expires(lake: Lake) -> None:
    """Also for a table that saw both together, and after the copy was rewritten."""
    fill(lake, [3, 4])
    path = segment_files(lake)[0]
    shutil.copy(path, path.with_name("f" + path.name[1:]))
    first, copy = live_ids(lake)
    follower, ranks = LiveTable(lake), LiveTable(lake)
    follower.refresh(), ranks.repeat(follower.collect_findings())
    fill(lake, [5])
    assert [len(segment.uids) for segment in follower.segments] == [2, 0]
    uid = hex_uids(follower.segments[0].uids)[1]
    remove(lake, time=0.0, reason="test", trajectories={first: [uid]})
    assert follower.refresh().added == 2
    ranks.repeat(follower.collect_findings())
    for table in (follower, ranks):
        assert [(segment.id, len(segment.uids)) for segment in table.segments[:2]] == [(first, 1), (copy, 0)]
        assert sorted(len(segment.uids) for segment in table.segments[2:]) == [1, 1]
        assert [hex_uids(each.uids) for each in table.segments[2:] if each.id == copy] == [[uid]]
    remove(lake, time=0.0, reason="test", trajectories={copy: [uid]})
    assert follower.refresh().added == 0
    assert len(follower.segments) == 4
    assert sum(len(segment.uids) for segment in follower.segments) == 2


def test_restore_repeats_an_order(lake: Lake) -> None:
    follower = LiveTable(lake)
    fill(lake, [3, 4], seal_every=1)
    follower.refresh()
    ids = [s.id for s in follower.segments][::-1]
    again = LiveTable(lake)
    again.restore(ids)
    assert [s.id for s in again.segments] == ids
    fill(lake, [5])
    assert again.refresh().added == 1
    assert [s.file for s in again.segments[:2]] == ids


SHORT = {"reward": np.ones(3, dtype=np.float32)}


def test_what_expired_in_a_rewritten_segment_that_is_still_unknown_is_dead(lake: Lake) -> None:
    one, two = fill(lake, [3, 4], seal_every=1)
    follower = LiveTable(lake)
    follower.refresh()
    compact(lake)
    expire(lake, RetentionLimits(max_trajectories=1))
    follower.refresh()
    assert [len(segment.uids) for segment in follower.segments[:2]] == [0, 1]
    assert one != two


def test_an_overlay_that_died_with_its_base_stays_dead_when_it_is_named_itself(lake: Lake) -> None:
    one, two = fill(lake, [5, 6])
    derive(lake, {one: SHORT})
    derive(lake, dict.fromkeys((one, two), SHORT), copy=1)
    follower = LiveTable(lake)
    follower.refresh()
    bases, first, second = follower.segments
    victim, unknown = hex_uids(bases.uids)[0], "00" * 16
    partial = {bases.id: (victim,), second.id: (unknown,)}
    remove(lake, time=0.0, reason="test", trajectories=partial)
    follower.refresh()
    assert [len(segment.uids) for segment in follower.segments] == [1, 0, 1]
    assert first.is_overlay


def test_an_overlay_that_waited_for_its_base_may_be_rewritten_meanwhile(lake: Lake) -> None:
    one, two = fill(lake, [5, 6], seal_every=1)
    derived = {uid for base in (one, two) for uid in derive(lake, {base: SHORT})}
    base, *_ = segment_files(lake)
    held = lake.path / "tmp" / "held"
    shutil.move(base, held)
    follower = LiveTable(lake)
    follower.refresh()
    shutil.move(held, base)
    compact(lake, grace_seconds=0.0)
    for _ in range(3):
        follower.refresh()
    assert derived <= {uid for segment in follower.segments for uid in hex_uids(segment.uids)}


def test_a_marker_on_a_file_that_was_rewritten_hides_nothing(lake: Lake) -> None:
    written = fill(lake, [3, 4], seal_every=1)
    ids = live_ids(lake)
    compact(lake)
    quarantine(lake, ids[0])
    again = LiveTable(lake)
    assert again.restore(ids).added == len(written)


def test_what_vanished_is_dead_at_the_second_look(lake: Lake) -> None:
    fill(lake, [3, 4], seal_every=1)
    follower = LiveTable(lake)
    follower.refresh()
    segment_files(lake)[0].unlink()
    follower.refresh()
    assert follower.refresh().changed == (0,)
    assert [len(segment.uids) for segment in follower.segments] == [0, 1]


def test_what_vanished_and_is_back_at_the_second_look_stays(lake: Lake) -> None:
    """As a listing of a file system over a network may leave out a file that is there."""
    fill(lake, [3, 4], seal_every=1)
    follower = LiveTable(lake)
    follower.refresh()
    (path, _), away = segment_files(lake), lake.path / "tmp" / "away"
    path.rename(away)
    follower.refresh()
    away.rename(path)
    assert follower.refresh().changed == ()
    assert [len(segment.uids) for segment in follower.segments] == [1, 1]


@pytest.mark.parametrize("seed", some(range(8), 0, 1, 2))
def test_a_follower_whose_storage_fails_now_and_then_misses_nothing(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lake = Lake.create(tmp_path / "lake")

    class Failing(LocalStorage):
        armed = False

        def __getattribute__(self, name: str) -> Any:
            asked = ("names", "folders", "listings", "tail", "read", "exists")
            if name in asked and Failing.armed and rng.random() < 0.3:
                raise StorageError("no connection")
            return super().__getattribute__(name)

    watched = Lake(tmp_path / "lake")
    watched.storage = Failing(tmp_path / "lake")
    follower, added = LiveTable(watched), 0
    for step in range(12):
        fill(lake, [3, 5, 4], seed=step)
        if step == 4:
            ids = live_ids(lake)
            remove(lake, time=0.0, reason="", segments=(ids[1],))
        if step == 6:
            compact(lake, grace_seconds=0.0)
        if step == 8:
            expire(lake, RetentionLimits(max_steps=60))
        Failing.armed = True
        for _ in range(4):
            with contextlib.suppress(StorageError, StageFailed):
                added += follower.refresh().added
        Failing.armed = False
    added += follower.refresh().added
    follower.refresh()
    fresh = LiveTable(lake)
    fresh.refresh()
    assert sorted(_lying(follower)) == sorted(_lying(fresh))
    assert not follower.unreadable
    assert added >= sum(len(segment.uids) for segment in fresh.segments)


def _lying(follower: LiveTable) -> list[tuple[str, int, str, int]]:
    """Every live trajectory: file, first row, uid, length."""
    return [
        (segment.file, int(row0), uid, int(length))
        for segment in follower.segments
        for row0, uid, length in zip(segment.row0, hex_uids(segment.uids), segment.length, strict=True)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_another_process_repeats_what_was_found_without_listing_anything(
    lake: Lake, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 lists a lake that changes in every way; the others take its findings, of several looks at once."""
    rng = np.random.default_rng(seed)
    first, other = LiveTable(lake), LiveTable(Lake(lake.path))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("listed")

    for name in ("names", "folders", "listings", "keys", "stamp", "read"):
        monkeypatch.setattr(other._storage, name, refuse, raising=False)
    changes = ["fill", *rng.permutation(["fill", "derive", "compact", "expire", "quarantine", "delete"] * 3)]
    for change in changes:
        uids = Reader(lake).uids()
        if change == "fill":
            fill(lake, rng.integers(1, 9, 6).tolist(), seed=int(rng.integers(1 << 30)), seal_every=2)
        elif change == "derive" and uids:
            derive(lake, {uid: {"reward": Reader(lake).read(uid).columns["reward"] + 1} for uid in uids[:2]})
        elif change == "compact":
            compact(lake, grace_seconds=0.0)
        elif change == "expire":
            expire(lake, RetentionLimits(max_steps=30), grace_seconds=float(rng.choice([0, 1e9])))
        elif change == "quarantine" and uids:
            quarantine(lake, list_all(lake.storage)[0])
        elif change == "delete" and uids:
            segment_files(lake)[0].unlink()
        for _ in range(int(rng.integers(1, 4))):
            first.refresh()
        other.repeat(first.collect_findings())
        assert _lying(other) == _lying(first)
        assert [segment.id for segment in other.segments] == [segment.id for segment in first.segments]
        assert other.log.steps == first.log.steps
    assert len(first.segments) > 8


def test_an_overlay_is_live_while_any_copy_of_its_base_is(lake: Lake) -> None:
    (uid, columns), *_ = fill(lake, [5]).items()
    (path,) = segment_files(lake)
    (overlay,) = derive(lake, {uid: {"reward": columns["reward"] + 1}})
    follower = LiveTable(lake)
    follower.refresh()
    folder = path.parent.parent / "2001010100"  # its copy sorts before it, and counts in its place for new readers
    folder.mkdir()
    shutil.copy(path, folder / path.name)

    def lives() -> None:
        follower.refresh()
        new = LiveTable(lake)
        new.refresh()
        for table in (follower, new):
            found = {each: segment for segment in table.segments for each in hex_uids(segment.uids)}
            assert found.keys() == {uid, overlay}
            assert found[overlay].base.tolist() == [found[uid].number]
        assert {each for (each,) in catalog.query(lake, "select uid from trajectories")[1]} == {uid, overlay}
        assert Reader(lake).read(overlay).columns["reward"].tolist() == (columns["reward"] + 1).tolist()

    lives()
    quarantine(lake, f"{path.parent.name}/{path.stem}")
    lives()
