from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from pipelines.errors import IntegrityError, Locked
from pipelines.lake.folders import list_all
from pipelines.lake.log import lease, read_log
from pipelines.lake.maintenance import verify as repairing
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.maintenance.copying import copy
from pipelines.lake.maintenance.verify import RepairResult, repair, verify
from pipelines.lake.reading import Reader
from pipelines.lake.schema import Schema
from pipelines.lake.sql import catalog
from pipelines.lake.store import Lake
from tests.lake.factories import IMAGES, MIXED, SCHEMA, assert_same, derive, fill, remove, segment_files
from tests.tiers import some

SCHEMAS = pytest.mark.parametrize("schema", some([SCHEMA, IMAGES, MIXED], 1), ids=["plain", "images", "mixed"])


def flip(path: Path, values: np.ndarray) -> None:
    """Damage one byte of where these values are stored."""
    data = bytearray(path.read_bytes())
    place = data.find(np.ascontiguousarray(values).tobytes())
    assert place >= 0
    data[place + 2] ^= 4
    path.write_bytes(data)


def cut_footer(path: Path) -> bytes:
    """Damage the end of a file, where its footer is; returns what the whole file was."""
    whole = path.read_bytes()
    path.write_bytes(whole[:-300] + bytes(300))
    return whole


def mended(lake: Lake) -> RepairResult:
    return repair(lake, verify(lake))


def assert_sound(lake: Lake, written: dict[str, dict[str, np.ndarray]], uids: list[str]) -> None:
    reader = Reader(lake)
    assert sorted(reader.uids()) == sorted(uids)
    for uid in uids:
        if uid in written:
            assert_same(dict(reader.read(uid).columns), written[uid])
    assert not verify(lake).corrupt
    assert {uid for (uid,) in catalog.query(lake, "select uid from trajectories")[1]} == set(uids)
    assert not list((lake.local / "tmp").iterdir())


@SCHEMAS
def test_the_whole_trajectories_of_a_damaged_segment_live_on(lake: Lake, schema: Schema) -> None:
    written = fill(lake, [5, 40, 7, 9], schema=schema, seal_every=3)
    first, second, third, fourth = written
    (id, _) = list_all(lake.storage)
    flip(segment_files(lake)[0], written[second]["reward"][1:])
    damaged = segment_files(lake)[0].read_bytes()
    done = mended(lake)
    assert done.lost == (second,)
    assert not done.complete
    assert list(done.segments) == [id]
    assert_sound(lake, written, [first, third, fourth])
    name = id.rpartition("/")[2]
    assert (lake.path / "quarantine" / f"{name}.arrow").read_bytes() == damaged
    damage = read_log(lake.storage).quarantined[id]
    assert (damage["lost"], damage["into"]) == ([second], done.segments[id])
    assert mended(lake) == RepairResult(segments={})


def test_overlays_find_their_bases_where_they_are_now_and_orphans_are_told(lake: Lake) -> None:
    written = fill(lake, [5, 6])
    lost, kept = written
    derived = [
        derive(lake, {uid: {"reward": np.ones(len(values["reward"]), np.float32)}})[0]
        for uid, values in written.items()
    ]
    flip(next(path for path in segment_files(lake) if ".ovl" not in path.name), written[lost]["obs.state"])
    done = mended(lake)
    assert (done.lost, done.orphans) == ((lost,), (derived[0],))
    assert_sound(lake, written, [kept, derived[1]])
    assert Reader(lake).row(derived[1])["base_uid"].hex() == kept


@pytest.mark.system
@SCHEMAS
def test_a_footer_that_cannot_be_read_is_made_again_from_what_the_index_remembers(lake: Lake, schema: Schema) -> None:
    written = fill(lake, [5, 40, 7], schema=schema)
    catalog.refresh(lake)
    whole = cut_footer(segment_files(lake)[0])
    (id,) = list_all(lake.storage)
    report = verify(lake)
    catalog.refresh(lake)  # which forgets the segment
    done = repair(lake, report)
    assert done == RepairResult(segments={id: id})
    assert_sound(lake, written, list(written))
    assert not read_log(lake.storage).quarantined
    reader = Reader(lake)
    assert reader.row(next(iter(written)))["env"] == "maze"
    assert segment_files(lake)[0].read_bytes() != whole  # another commit's footer, the same rows


@pytest.mark.system
def test_a_footer_made_again_does_not_vouch_for_damaged_columns(lake: Lake) -> None:
    written = fill(lake, [5, 6, 7])
    first, second, third = written
    catalog.refresh(lake)
    path = segment_files(lake)[0]
    flip(path, written[second]["obs.state"])
    cut_footer(path)
    done = mended(lake)
    assert done.lost == (second,)
    assert_sound(lake, written, [first, third])


def test_what_nobody_remembers_is_kept_and_told(lake: Lake) -> None:
    written = fill(lake, [5, 6], seal_every=1)
    one, _ = list_all(lake.storage)
    cut_footer(segment_files(lake)[0])
    done = mended(lake)
    assert (done.unknown, done.segments) == ((one,), {one: None})
    assert not done.complete
    assert_sound(lake, written, list(written)[1:])
    assert (lake.path / "quarantine" / f"{one.rpartition('/')[2]}.arrow").exists()


def test_a_missing_picture_file_loses_what_it_held(lake: Lake) -> None:
    written = fill(lake, [50, 60], schema=IMAGES, seal_every=1)
    next(path for path in segment_files(lake) if ".blob" in path.name).unlink()
    done = mended(lake)
    assert done.lost == (next(iter(written)),)
    assert_sound(lake, written, list(written)[1:])


def test_what_had_expired_is_not_lost(lake: Lake) -> None:
    written = fill(lake, [5, 6])
    first, second = written
    (id,) = list_all(lake.storage)
    remove(lake, time=1.0, reason="x", trajectories={id: (first,)})
    flip(segment_files(lake)[0], written[first]["obs.state"])
    done = mended(lake)
    assert done.complete
    assert_sound(lake, written, [second])
    assert not read_log(lake.storage).quarantined


def test_a_damaged_segment_that_was_rewritten_before_is_only_quarantined(lake: Lake) -> None:
    written = fill(lake, [5, 6], seal_every=1)
    compact(lake)
    old = segment_files(lake)[0]
    flip(old, next(iter(written.values()))["obs.state"])
    done = mended(lake)
    assert done.complete
    assert not old.exists()
    assert_sound(lake, written, list(written))


def test_a_damaged_rewritten_segment_loses_nothing_while_its_parts_are_there(lake: Lake) -> None:
    written = fill(lake, [5, 6], seal_every=1)
    compact(lake, grace_seconds=1e9)
    new = segment_files(lake)[-1]
    flip(new, next(iter(written.values()))["obs.state"])
    done = mended(lake)
    assert done.complete
    assert_sound(lake, written, list(written))


def test_a_foreign_file_is_quarantined_and_nothing_is_lost(lake: Lake) -> None:
    written = fill(lake, [5])
    (segment_files(lake)[0].parent / "zz.arrow").write_bytes(b"ARROW1 but not really")
    assert mended(lake).complete
    assert (lake.path / "quarantine" / "zz.arrow").read_bytes() == b"ARROW1 but not really"
    assert_sound(lake, written, list(written))


def test_a_repair_that_died_half_way_is_finished_by_the_next(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.lake.maintenance import verify as module

    written = fill(lake, [5, 6, 7])
    first, second, third = written
    flip(segment_files(lake)[0], written[second]["obs.state"])

    def die(*arguments: object) -> None:
        raise KeyboardInterrupt

    set_aside = module.Quarantine.set_aside
    monkeypatch.setattr(module.Quarantine, "set_aside", die)
    with pytest.raises(KeyboardInterrupt):
        mended(lake)
    monkeypatch.setattr(module.Quarantine, "set_aside", set_aside)
    done = mended(lake)
    assert done.lost == (second,)
    assert_sound(lake, written, [first, third])


def test_one_maintainer_at_a_time(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairing, "lease", functools.partial(lease, wait_seconds=0.0))
    written = fill(lake, [5])
    flip(segment_files(lake)[0], next(iter(written.values()))["obs.state"])
    report = verify(lake)
    with lease(lake), pytest.raises(Locked, match="being maintained"):
        repair(lake, report)


def test_in_an_object_store(bucket: str) -> None:
    lake = Lake.create(f"s3://{bucket}/lake")
    written = fill(lake, [5, 6, 7])
    first, second, third = written
    (id,) = list_all(lake.storage)
    data = bytearray(lake.storage.read(f"segments/{id}.arrow"))
    data[data.find(written[second]["obs.state"].tobytes()) + 2] ^= 4
    lake.storage.write(f"segments/{id}.arrow", bytes(data))
    lake.storage.forget(f"segments/{id}.arrow")
    done = mended(lake)
    assert done.lost == (second,)
    assert_sound(lake, written, [first, third])
    assert lake.storage.read(f"quarantine/{id.rpartition('/')[2]}.arrow") == bytes(data)


@pytest.mark.parametrize("damage", ["missing", "unreadable"])
def test_segments_whose_schema_is_lost_stay_where_they_are(lake: Lake, damage: str) -> None:
    written = fill(lake, [5, 6], seal_every=1)
    (path,) = (lake.path / "schemas").iterdir()
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"{")
    damaged = Lake(lake.path)
    report = verify(damaged)
    assert len(report.corrupt) == 2
    with pytest.raises(IntegrityError, match="its segments are left as they are; restore it from a copy"):
        repair(damaged, report)
    assert len(segment_files(lake)) == 2
    path.write_bytes(content)
    assert_sound(Lake(lake.path), written, list(written))


def test_what_is_lost_is_listed_whatever_was_asked_meanwhile(lake: Lake) -> None:
    written = fill(lake, [5, 6], seal_every=2)
    catalog.refresh(lake)
    (path,) = segment_files(lake)
    path.write_bytes(path.read_bytes()[:500])
    verify(lake)
    catalog.refresh(lake)  # which forgets the segment
    assert sorted(mended(lake).lost) == sorted(written)


def test_readers_are_told_of_a_damaged_segment_until_it_is_repaired(lake: Lake, tmp_path: Path) -> None:
    written = fill(lake, [5, 6, 7, 8], seal_every=2)
    second = list(written)[1]
    flip(segment_files(lake)[0], written[second]["obs.state"])
    verify(lake)
    for read in (lambda tell: Reader(lake, listener=tell).refresh(), lambda tell: catalog.refresh(lake, listener=tell)):
        told: list = []
        read(told.append)
        (notice,) = [event.text for event in told if "--repair recovers its intact" in getattr(event, "text", "")]
        assert list_all(lake.storage)[0] in notice
    copied = copy(lake, Lake.create(tmp_path / "copy"))
    assert (copied.trajectories, copied.damaged) == (2, [list_all(lake.storage)[0]])
    mended(lake)
    told = []
    Reader(lake, listener=told.append).refresh()
    catalog.refresh(lake, listener=told.append)
    assert not [event for event in told if "--repair" in getattr(event, "text", "")]
    assert copy(lake, Lake(tmp_path / "copy")).damaged == []
