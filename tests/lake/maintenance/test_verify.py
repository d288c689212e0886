import errno
import os

import numpy as np
import pytest

from pipelines.errors import InputMissing, StageFailed
from pipelines.events import Progress
from pipelines.files import atomic
from pipelines.lake import footer, reading
from pipelines.lake.live import LiveTable
from pipelines.lake.log import read_log
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.maintenance.verify import verify
from pipelines.lake.sql import catalog
from pipelines.lake.store import Lake
from tests.lake.factories import IMAGES, MIXED, SCHEMA, assert_same, fill, footer_at, segment_files
from tests.tiers import some, trials


@pytest.mark.parametrize("schema", some([SCHEMA, IMAGES, MIXED], 1), ids=["plain", "images", "mixed"])
def test_a_whole_lake_is_clean(lake: Lake, schema) -> None:
    fill(lake, [5, 40, 7, 33], schema=schema, seal_every=2)
    told: list = []
    report = verify(lake, told.append)
    assert (report.segments_checked, report.trajectories, report.corrupt, report.foreign) == (2, 4, (), ())
    assert report.bytes == sum(p.stat().st_size for p in segment_files(lake))
    assert told[-1] == Progress(stage="verify", done=2, total=2, unit="segments")


def test_a_flipped_bit_names_the_trajectory_and_takes_the_segment_out_of_sight(lake: Lake) -> None:
    written = fill(lake, [5, 6, 7, 8], seal_every=2)
    second = list(written)[1]
    path = segment_files(lake)[0]
    values = written[second]["obs.state"]
    data = bytearray(path.read_bytes())
    data[data.find(values.tobytes()) + 10] ^= 16
    path.write_bytes(data)
    told: list = []
    report = verify(lake, told.append)
    (found,) = report.corrupt
    assert found.trajectories == tuple(list(written)[:2])
    assert found.damaged == (second,)
    assert "obs.state" in found.reason
    assert any("quarantined" in getattr(event, "text", "") for event in told)
    assert LiveTable(lake).refresh().added == 2
    assert catalog.query(lake, "select count(*) from trajectories")[1] == [(2,)]
    (damage,) = read_log(lake.storage).quarantined.values()
    assert damage["trajectories"] == list(written)[:2]
    assert verify(lake).corrupt == (found,)  # said again, not forgotten


def test_a_segment_that_is_whole_again_comes_back(lake: Lake) -> None:
    written = fill(lake, [5, 6], seal_every=1)
    path = segment_files(lake)[0]
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    catalog.refresh(lake)
    assert len(verify(lake).corrupt) == 1
    path.write_bytes(data)
    assert verify(lake).corrupt == ()
    assert set(reading.Reader(lake).uids()) == set(written)


def test_a_truncated_segment_is_listed_with_what_the_index_remembers(lake: Lake) -> None:
    written = fill(lake, [5, 6], seal_every=1)
    catalog.refresh(lake)
    path = segment_files(lake)[0]
    path.write_bytes(path.read_bytes()[:300])
    (found,) = verify(lake).corrupt
    assert found.trajectories == (next(iter(written)),)


def test_a_damaged_or_missing_picture_file_is_found(lake: Lake) -> None:
    fill(lake, [50, 60], schema=IMAGES, seal_every=1)
    one, two = [p for p in segment_files(lake) if ".blob" in p.name]
    data = bytearray(one.read_bytes())
    data[len(data) // 2] ^= 1
    one.write_bytes(data)
    two.unlink()
    assert len(verify(lake).corrupt) == 2


def test_foreign_files_are_reported_and_harm_nobody(lake: Lake) -> None:
    fill(lake, [5])
    hour = segment_files(lake)[0].parent
    (hour / "notes.txt").write_text("x")
    (hour / "zz.arrow").write_bytes(b"ARROW1 but not really")
    (hour / "lonely.blob.arrow").write_bytes(b"")
    (lake.path / "segments" / "README").write_text("x")
    report = verify(lake)
    assert [found.segment for found in report.corrupt] == [f"{hour.name}/zz"]
    assert {path.rsplit("/", 1)[1] for path in report.foreign} == {"notes.txt", "lonely.blob.arrow", "README"}
    assert LiveTable(lake).refresh().added == 1


@pytest.mark.system
@pytest.mark.trials
@pytest.mark.parametrize("schema", some([SCHEMA, IMAGES], 1), ids=["plain", "images"])
def test_damage_anywhere_is_found_or_harmless(lake: Lake, schema) -> None:
    """Bits flipped and files cut at random places: verify finds it, or every byte still reads as it was written."""
    written = fill(lake, [30, 20], schema=schema)
    files = segment_files(lake)
    rng, found = np.random.default_rng(0), 0
    for trial in range(trials(80, quick=24)):
        path = files[trial % len(files)]
        whole = path.read_bytes()
        data = bytearray(whole)
        if trial % 4 == 3:
            data = data[: int(rng.integers(0, len(data)))]
        else:
            data[int(rng.integers(0, len(data)))] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(data)
        follower = LiveTable(lake)
        follower.refresh()
        if verify(lake).corrupt:
            found += 1
        else:
            assert follower.refresh().added == 0
            for uid, values in written.items():
                assert_same(dict(reading.read(lake, uid).columns), values)
            rows = {row["uid"].hex(): row["length"] for row in footer_at(files[0]).trajectories.to_pylist()}
            assert rows == {uid: len(values["reward"]) - 1 for uid, values in written.items()}
        path.write_bytes(whole)
        assert verify(lake).corrupt == ()
    assert found > trials(80, quick=24) * 0.75


def test_a_segment_of_a_newer_version_is_not_set_aside(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(footer, "FORMAT", 9)
        fill(lake, [5])
    with pytest.raises(InputMissing, match="upgrade amago"):
        verify(lake)
    told: list = []
    assert LiveTable(lake, told.append).refresh().added == 0
    assert "upgrade amago" in told[0].text
    assert not (lake.path / "log").exists()


def test_the_pictures_of_a_segment_that_was_never_published_are_reported_unless_salvage_removes_them(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.register(IMAGES)
    child = os.fork()
    if not child:  # dies between the two files of a segment, as by kill -9
        monkeypatch.setattr(atomic, "publish", lambda staged, target: (os.replace(staged, target), os._exit(9)))
        fill(lake, [5], schema=IMAGES)
    os.waitpid(child, 0)
    (orphan,) = segment_files(lake)
    assert verify(lake).foreign == (str(orphan),)
    assert lake.salvage() == 1
    report = verify(lake)
    assert (report.trajectories, report.foreign, report.corrupt) == (1, (), ())
    assert not list((lake.path / "tmp").iterdir())


def test_a_refused_publication_leaves_no_picture_file(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.register(IMAGES)
    publish = atomic.publish

    def refuse(staged, target):  # type: ignore[no-untyped-def]
        if ".blob" not in target.name:
            raise OSError(errno.ENOSPC, "full")
        publish(staged, target)

    monkeypatch.setattr(atomic, "publish", refuse)
    with pytest.raises(StageFailed):
        fill(lake, [5], schema=IMAGES)
    assert not segment_files(lake)
    monkeypatch.undo()
    assert lake.salvage() == 1


def test_what_was_made_into_another_segment_is_not_counted_twice(lake: Lake) -> None:
    fill(lake, [3, 4, 5], seal_every=1)
    compact(lake, grace_seconds=3600)
    report = verify(lake)
    assert (report.segments_checked, report.trajectories) == (4, 3)


@pytest.mark.system
def test_a_segment_overwritten_by_another_one_is_found(lake: Lake) -> None:
    """By one of another writer, or by another one of the same writer: all checksums fit."""
    lost = list(fill(lake, [5, 6, 7], seal_every=1))
    fill(lake, [8], seed=1)
    catalog.refresh(lake)
    first, *others = segment_files(lake)
    whole = first.read_bytes()
    for other in others:
        first.write_bytes(other.read_bytes())
        (found,) = verify(lake).corrupt
        assert "overwritten" in found.reason
        assert found.trajectories == (lost[0],)
    assert catalog.query(lake, "select count(*) from trajectories")[1] == [(3,)]
    first.write_bytes(whole)
    assert verify(lake).corrupt == ()
    assert catalog.query(lake, "select count(*) from trajectories")[1] == [(4,)]


def test_a_segment_that_the_index_knew_and_that_is_gone_is_reported(lake: Lake) -> None:
    fill(lake, [5, 6, 7, 8, 9], seal_every=2)
    catalog.refresh(lake)
    gone = segment_files(lake)[1]
    gone.unlink()
    assert verify(lake).missing == {f"{gone.parent.name}/{gone.stem}": 2}


@pytest.mark.system
def test_what_was_merged_expired_or_put_away_is_not_missed(lake: Lake) -> None:
    fill(lake, [5, 6, 7, 8, 9, 10], seal_every=1)
    catalog.refresh(lake)
    index = lake.path / "index.duckdb"
    known = index.read_bytes()
    compact(lake, grace_seconds=0)
    index.write_bytes(known)
    assert verify(lake).missing == {}
    expire(lake, RetentionLimits(where="length < 7"), grace_seconds=0)
    for _ in range(2):
        compact(lake, grace_seconds=0)
        index.write_bytes(known)
        os.utime(index, (1, 1))
        assert verify(lake).missing == {}
