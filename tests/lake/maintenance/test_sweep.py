"""Which files are removed, when, and what is left of the decisions to do so."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from pipelines.data.view import View
from pipelines.lake.folders import WATCHED_HOURS, list_all
from pipelines.lake.live import LiveTable
from pipelines.lake.log import lease, read_log
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.maintenance.files import FileTable, SweepResult, sweep
from pipelines.lake.maintenance.retention import RetentionLimits, expire, expire_orphans
from pipelines.lake.reading import Reader
from pipelines.lake.segment import StagedFiles
from pipelines.lake.store import Lake
from pipelines.lake.wal import Log
from tests.lake.factories import (
    IMAGES,
    SCHEMA,
    append_overlay,
    assert_same,
    derive,
    fill,
    overlay_writer,
    quarantine,
    remove,
    segment_files,
)
from tests.lake.windows import windows_of


def swept(lake: Lake, *, grace_seconds: float = 0.0) -> SweepResult:
    with lease(lake) as held:
        inventory = FileTable(lake)
        inventory.refresh()
        inventory.refresh()
        expire_orphans(inventory)
        return sweep(inventory, held, grace_seconds=grace_seconds)


def test_files_stay_for_the_grace_period(lake: Lake) -> None:
    fill(lake, [3, 4, 5], seal_every=1)
    assert compact(lake, grace_seconds=100.0).swept == SweepResult(segments=0, bytes=0, waiting=3)
    assert len(segment_files(lake)) == 4
    new = max(segment_files(lake))
    (entry,) = (lake.path / "log").iterdir()
    os.utime(entry, (entry.stat().st_mtime - 200, entry.stat().st_mtime - 200))
    assert swept(lake, grace_seconds=100.0).segments == 3
    assert segment_files(lake) == [new]
    expire(lake, RetentionLimits(max_trajectories=2), grace_seconds=0.0)
    assert segment_files(lake) == [new]
    expire(lake, RetentionLimits(where="true"), grace_seconds=100.0)
    assert segment_files(lake) == [new]
    assert swept(lake).segments == 1
    assert segment_files(lake) == []


def test_of_several_decisions_to_remove_a_segment_the_oldest_counts(lake: Lake) -> None:
    fill(lake, [3])
    (id,) = list_all(lake.storage)
    for time in (1.0, 2.0):
        remove(lake, time=time, reason="old", segments=(id,))
    assert swept(lake, grace_seconds=100.0) == SweepResult(segments=0, bytes=0, waiting=1)
    first, _ = sorted((lake.path / "log").iterdir())
    os.utime(first, (1, 1))
    assert swept(lake, grace_seconds=100.0).segments == 1
    assert segment_files(lake) == []


def test_wide_columns_go_with_their_segment(lake: Lake) -> None:
    fill(lake, [3, 4], schema=IMAGES, seal_every=1)
    compact(lake, grace_seconds=0.0)
    assert len(segment_files(lake)) == 2
    expire(lake, RetentionLimits(where="true"), grace_seconds=0.0)
    assert segment_files(lake) == []


def test_wide_columns_without_a_segment_go_unless_it_may_still_come(lake: Lake, monkeypatch) -> None:
    writer = lake.writer(IMAGES, seal_seconds=1e9)
    from pipelines.lake.trajectory import TrajectoryInfo
    from tests.lake.factories import columns

    writer.append(columns(np.random.default_rng(0), 3, IMAGES), TrajectoryInfo())
    writer._abandon()
    seen: list[int] = []
    real = StagedFiles.publish

    def publish(staged, storage, id) -> None:
        assert staged.blob is not None
        storage.publish(staged.blob, f"segments/{id}.blob.arrow")
        seen.append(len(segment_files(lake)))
        assert swept(lake) == SweepResult(0, 0, 0)  # its log is still there
        seen.append(len(segment_files(lake)))
        os.unlink(staged.main)

    monkeypatch.setattr(StagedFiles, "publish", publish)
    monkeypatch.setattr(Log, "drop", lambda self: self.close())
    lake.salvage()
    assert seen == [1, 1]
    monkeypatch.undo()
    assert StagedFiles.publish is real
    for log in (lake.path / "wal").iterdir():
        log.unlink()
    swept(lake)
    assert segment_files(lake) == []


def test_a_segment_whose_log_is_still_there_stays(lake: Lake, monkeypatch) -> None:
    """Salvage would publish its trajectories again."""
    monkeypatch.setattr(Log, "drop", lambda self: self.close())
    written = fill(lake, [3, 4], seal_every=1)
    monkeypatch.undo()
    with lease(lake) as held:
        from pipelines.lake.maintenance.compaction import rewrite

        parts = {id: np.ones(1, dtype=bool) for id in list_all(lake.storage)}
        assert rewrite(lake, parts, held) is not None
    assert swept(lake).segments == 0
    assert lake.salvage() == 0
    assert swept(lake).segments == 2
    assert sorted(Reader(lake).uids()) == sorted(written)


def test_an_overlay_of_what_has_expired_is_buried(lake: Lake) -> None:
    one, two = fill(lake, [5, 6], seal_every=1)
    reward = {"reward": np.ones(3, dtype=np.float32)}
    late, later = (overlay_writer(lake, dict.fromkeys(bases, reward)) for bases in ([one, two], [one]))
    with late, later:
        append_overlay(lake, late, one, reward)
        kept = append_overlay(lake, late, two, reward)
        append_overlay(lake, later, one, reward, copy=1)
        expire(lake, RetentionLimits(max_trajectories=1))
    assert Reader(lake).uids() == [two, kept]
    swept(lake)
    assert Reader(lake).uids() == [two, kept]
    assert len(list_all(lake.storage)) == 2
    told: list = []
    LiveTable(lake, told.append).refresh()
    assert not told


def test_an_overlay_waits_for_a_base_that_is_set_aside(lake: Lake) -> None:
    (base,) = fill(lake, [5])
    (id,) = list_all(lake.storage)
    (derived,) = derive(lake, {base: {"reward": np.ones(3, dtype=np.float32)}})
    quarantine(lake, id)
    assert Reader(lake).uids() == []
    assert swept(lake).segments == 0
    quarantine(lake, id, None)
    assert Reader(lake).uids() == [base, derived]


def test_a_view_that_has_seen_nothing_of_it_forgets_what_vanished(lake: Lake) -> None:
    written = fill(lake, [3, 4, 5], seal_every=1)
    view = View(lake, SCHEMA.id)
    view.refresh()
    expire(lake, RetentionLimits(max_trajectories=1), grace_seconds=0.0)
    assert not read_log(lake.storage).whole
    view.refresh(), view.refresh()
    assert view.num_trajectories == 1
    assert_same(next(windows_of(view)), written[list(written)[2]])


def test_a_log_of_which_nothing_matters_becomes_one_entry(lake: Lake) -> None:
    fill(lake, [3] * 5, seal_every=1)
    for left in (4, 3, 2):
        expire(lake, RetentionLimits(max_trajectories=left))
    assert len(lake.storage.names("log")) == 3
    swept(lake)
    one = read_log(lake.storage)
    assert (one.steps, one.whole, one.dead, len(one.names)) == ({"": 9}, set(), {}, 1)
    swept(lake)
    assert read_log(lake.storage).names == one.names


def test_a_crash_while_the_log_restarts_counts_nothing_twice(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(lake, [3, 4, 5], seal_every=1)
    for left in (2, 1):
        expire(lake, RetentionLimits(max_trajectories=left))

    def die(*keys: str) -> None:
        raise KeyboardInterrupt

    remove = lake.storage.remove
    monkeypatch.setattr(lake.storage, "remove", lambda *keys: die() if "log" in keys[0] else remove(*keys))
    with pytest.raises(KeyboardInterrupt):
        swept(lake)
    assert len(lake.storage.names("log")) == 3
    assert read_log(lake.storage).steps == {"": 7}
    monkeypatch.undo()
    swept(lake)
    assert read_log(lake.storage).steps == {"": 7}


@pytest.mark.parametrize("filled", [False, True])
def test_directories_of_hours_long_over_go_when_they_are_empty(lake: Lake, filled: bool) -> None:
    hours = [lake.path / "segments" / f"20010101{hour:02d}" for hour in range(3)]
    recent = [lake.path / "segments" / f"2002{i:06d}" for i in range(WATCHED_HOURS)]
    for hour in (*hours, *recent):
        hour.mkdir()
    if filled:
        Path(hours[1] / "notes.txt").write_text("mine")
    swept(lake)
    assert [hour.exists() for hour in hours] == [False, filled, False]
    assert all(hour.exists() for hour in recent)


def test_folders_filled_before_the_last_one_of_their_hour_go_when_they_are_empty_and_quiet(lake: Lake) -> None:
    names = ["2002010100", "2002010100_0001", "2002010100_0002", "2002010100_0003", "2002010101"]
    made = [lake.path / "segments" / name for name in names]
    for folder in made:
        folder.mkdir()
    (made[1] / "notes.txt").write_text("mine")
    for folder in (made[0], made[1], made[3]):
        os.utime(folder, (1, 1))
    swept(lake)
    assert [folder.exists() for folder in made] == [False, True, True, True, True]


@pytest.mark.system
def test_many_files_are_removed_by_few_calls(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an object store each call is a request. Segments go before their blobs."""
    fill(lake, [3] * 250, schema=IMAGES, seal_every=1)
    calls: list[tuple[str, ...]] = []
    remove = lake.storage.remove
    monkeypatch.setattr(lake.storage, "remove", lambda *keys: (calls.append(keys), remove(*keys)))
    before = {str(file.relative_to(lake.path)) for file in segment_files(lake)}
    assert compact(lake, grace_seconds=0.0).swept.segments == 250
    assert len(calls) == 7  # the last one removes the old files of the log
    gone: set[str] = set()
    for keys in calls:
        blobs = {key for key in keys if key.endswith(".blob.arrow")}
        assert {key.replace(".blob.arrow", ".arrow") for key in blobs} <= gone
        gone |= set(keys)
    assert before <= gone
    assert len(segment_files(lake)) == 2  # one segment and its blobs
