from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from pipelines.errors import IntegrityError, Locked, StageFailed, UsageError
from pipelines.events import Notice
from pipelines.files import atomic
from pipelines.lake import collectors
from pipelines.lake.folders import list_all
from pipelines.lake.footer import hex_uids
from pipelines.lake.maintenance import retention
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.maintenance.copying import copy
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.maintenance.verify import verify
from pipelines.lake.reading import Reader
from pipelines.lake.schema import Schema
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from tests.lake import factories
from tests.lake.factories import IMAGES, INFO, MIXED, SCHEMA, assert_same, columns, fill, remove, segment_files
from tests.tiers import some


@pytest.fixture
def target(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "target")


def ids(lake: Lake) -> list[str]:
    return list_all(lake.storage)


def derive(lake: Lake, base: str, actions: int, value: float = 7.0) -> str:
    reward = np.full(actions + 1, value, dtype=np.float32)
    return factories.derive(lake, {base: {"reward": reward}}, copy=int(value))[0]


def same_trajectories(lake: Lake, other: Lake, uids: list[str]) -> None:
    """`other` has exactly `uids`, as `lake` has them, each once in every table."""
    mine, theirs = Reader(lake), Reader(other)
    assert sorted(theirs.uids()) == sorted(uids)
    for uid in uids:
        assert_same(dict(theirs.read(uid).columns), dict(mine.read(uid).columns))
        assert theirs.read(uid).info == mine.read(uid).info
        assert theirs.row(uid)["t_commit"] == mine.row(uid)["t_commit"]
    assert query(other, "select count(*), count(distinct uid) from trajectories")[1] == [(len(uids),) * 2]
    assert not verify(other).corrupt
    assert not list((other.local / "tmp").iterdir())


@pytest.mark.system
@pytest.mark.parametrize("schema", some([SCHEMA, IMAGES, MIXED], 1), ids=["plain", "images", "mixed"])
def test_segments_are_copied_as_they_are_and_only_once(lake: Lake, target: Lake, schema: Schema) -> None:
    written = fill(lake, [5, 40, 7, 33, 2], schema=schema, seal_every=2)
    done = copy(lake, target)
    assert (done.segments, done.rewritten, done.trajectories, done.present) == (3, 0, 5, 0)
    same_trajectories(lake, target, list(written))
    for mine, theirs in zip(segment_files(lake), segment_files(target), strict=True):
        assert mine.read_bytes() == theirs.read_bytes()
    again = copy(lake, target)
    assert (again.segments, again.rewritten, again.trajectories, again.present) == (0, 0, 0, 5)
    more = fill(lake, [4], schema=schema, seed=1)
    assert copy(lake, target).trajectories == 1
    same_trajectories(lake, target, [*written, *more])


@pytest.mark.system
def test_a_predicate_chooses_and_what_was_left_out_can_follow(lake: Lake, target: Lake) -> None:
    written = fill(lake, [5, 6, 7, 8], seal_every=2)
    chosen = [uid for uid, values in written.items() if len(values["reward"]) - 1 in (6, 7, 8)]
    done = copy(lake, target, where="length > 5")
    assert (done.segments, done.rewritten) == (1, 1)
    same_trajectories(lake, target, chosen)
    assert copy(lake, target, where="length > 5").trajectories == 0
    assert copy(lake, target).trajectories == 1
    same_trajectories(lake, target, list(written))


def test_derived_trajectories_come_with_their_bases(lake: Lake, target: Lake) -> None:
    written = fill(lake, [5, 6], seal_every=1)
    derived = [derive(lake, uid, len(values["reward"]) - 1) for uid, values in written.items()]
    done = copy(lake, target)
    assert (done.segments, done.rewritten) == (4, 0)
    same_trajectories(lake, target, [*written, *derived])
    assert sum(".ovl" in id for id in ids(target)) == 2


def test_a_chosen_one_keeps_a_chosen_base_and_is_written_whole_without(lake: Lake, target: Lake) -> None:
    (a, b) = written = fill(lake, [5, 6])
    of_a, of_b = derive(lake, a, 5), derive(lake, b, 6)
    copy(lake, target, where=f"uid in ('{a}', '{of_a}', '{of_b}')")
    reader = Reader(target)
    assert sorted(reader.uids()) == sorted([a, of_a, of_b])
    for uid in (a, of_a, of_b):
        assert_same(dict(reader.read(uid).columns), dict(Reader(lake).read(uid).columns))
    assert (reader.row(of_a)["base_uid"].hex(), reader.row(of_b)["base_uid"]) == (a, None)
    assert reader.row(of_b)["relabel_method"] == "m"
    assert not verify(target).corrupt
    assert copy(lake, target).trajectories == 1
    assert sorted(Reader(target).uids()) == sorted([*written, of_a, of_b])


def test_what_expired_in_the_source_stays_behind(lake: Lake, target: Lake) -> None:
    written = list(fill(lake, [5, 6, 7, 8], seal_every=2))
    derived = derive(lake, written[0], 5)
    one, two, _ = ids(lake)
    remove(lake, time=1.0, reason="x", trajectories={one: (written[0],)})
    remove(lake, time=1.0, reason="x", segments=(two,))
    copy(lake, target)
    assert Reader(target).uids() == [written[1]]
    assert derived not in Reader(target).uids()


def test_what_expired_in_the_target_does_not_come_back(lake: Lake, target: Lake) -> None:
    written = list(fill(lake, [5, 6, 7], seal_every=1))
    copy(lake, target)
    one, two, _ = ids(target)
    remove(target, time=1.0, reason="x", segments=(one,))
    remove(target, time=1.0, reason="x", trajectories={two: (written[1],)})
    assert copy(lake, target).trajectories == 0
    assert Reader(target).uids() == written[2:]


@pytest.mark.system
@pytest.mark.parametrize("first", ["source", "target"])
def test_segments_rewritten_on_either_side_are_known_again(lake: Lake, target: Lake, first: str) -> None:
    written = fill(lake, [5, 6, 7, 8], seal_every=1)
    derived = [derive(lake, uid, len(values["reward"]) - 1) for uid, values in written.items()]
    copy(lake, target)
    compact({"source": lake, "target": target}[first], grace_seconds=0)
    assert copy(lake, target).trajectories == 0
    more = fill(lake, [9], seed=2)
    compact(lake, grace_seconds=0)
    assert copy(lake, target).trajectories == 1
    same_trajectories(lake, target, [*written, *derived, *more])


def test_a_compacted_lake_is_copied_with_what_hangs_on_it(lake: Lake, target: Lake) -> None:
    written = fill(lake, [5, 6, 7], seal_every=1)
    derived = [derive(lake, uid, len(values["reward"]) - 1) for uid, values in written.items()]
    compact(lake, grace_seconds=0)
    done = copy(lake, target)
    assert (done.segments, done.rewritten) == (2, 0)
    same_trajectories(lake, target, [*written, *derived])


def test_several_sources_may_overlap(lake: Lake, target: Lake, tmp_path: Path) -> None:
    written = list(fill(lake, [5, 6, 7], seal_every=1))
    other = Lake.create(tmp_path / "other")
    copy(lake, other, where="length <> 5")
    own = list(fill(other, [9], seed=3))
    compact(other, grace_seconds=0)
    for source in (lake, other):
        copy(source, target)
    assert sorted(Reader(target).uids()) == sorted([*written, *own])
    assert query(target, "select count(*) from trajectories")[1] == [(4,)]


def test_lakes_of_other_spaces_may_be_brought_together(lake: Lake, target: Lake) -> None:
    told: list = []
    mine, theirs = fill(lake, [5]), fill(target, [6], schema=MIXED)
    copy(lake, target, listener=told.append)
    assert sorted(Reader(target).uids()) == sorted([*mine, *theirs])
    assert any(isinstance(event, Notice) and "2 different spaces" in event.text for event in told)


@pytest.mark.parametrize("schema", some([SCHEMA, IMAGES], 1), ids=["plain", "images"])
def test_of_a_damaged_segment_what_is_whole_is_copied(lake: Lake, target: Lake, schema: Schema) -> None:
    written = fill(lake, [5, 6, 7], schema=schema)
    path = segment_files(lake)[0]
    values = list(written.values())[1]["reward"][1:]
    data = bytearray(path.read_bytes())
    data[data.find(values.tobytes()) + 1] ^= 8
    path.write_bytes(data)
    done = copy(lake, target)
    assert done.damaged == ids(lake)
    first, _, third = written
    assert sorted(Reader(target).uids()) == sorted([first, third])
    assert not verify(target).corrupt


def test_damage_of_a_base_is_not_made_to_look_whole(lake: Lake, target: Lake) -> None:
    ((base, values),) = fill(lake, [6]).items()
    derived = derive(lake, base, 6)
    path = next(path for path in segment_files(lake) if ".ovl" not in path.name)
    data = bytearray(path.read_bytes())
    data[data.find(values["obs.state"].tobytes()) + 5] ^= 1
    path.write_bytes(data)
    assert copy(lake, target, where=f"uid = '{derived}'").damaged
    assert Reader(target).uids() == []


def test_an_interrupted_copy_goes_on(lake: Lake, target: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    written = fill(lake, [50, 60, 70], schema=IMAGES, seal_every=1)
    publish, count = atomic.publish, 0

    def die(staged: Path, path: Path) -> None:
        nonlocal count
        count += "segments" in path.parts
        if count == 4:  # between the two files of the second segment
            raise KeyboardInterrupt
        publish(staged, path)

    monkeypatch.setattr(atomic, "publish", die)
    with pytest.raises(KeyboardInterrupt):
        copy(lake, target)
    monkeypatch.undo()
    assert len(Reader(target).uids()) == 1
    (target.local / "tmp" / "copy.1.aa.bb.tmp").write_bytes(b"of one that was killed")
    assert copy(lake, target).segments == 2
    same_trajectories(lake, target, list(written))
    assert verify(target).foreign == ()


def test_files_that_vanish_on_the_way_are_found_where_they_went(
    lake: Lake, target: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = fill(lake, [5, 6, 7], seal_every=1)
    fetch = type(lake.storage).fetch

    def compacted_first(storage, key):  # type: ignore[no-untyped-def]
        monkeypatch.setattr(type(lake.storage), "fetch", fetch)
        compact(lake, grace_seconds=0)
        return fetch(storage, key)

    monkeypatch.setattr(type(lake.storage), "fetch", compacted_first)
    done = copy(lake, target)
    assert (done.trajectories, done.present) == (3, 0)
    same_trajectories(lake, target, list(written))


def test_who_collected_comes_along(lake: Lake, target: Lake) -> None:
    with lake.writer(SCHEMA) as writer:
        writer.append(columns(np.random.default_rng(0), 3), INFO)
    process = {"host": "h", "pid": 1, "started": 1.0}
    for name in ("another", INFO.collector):
        collectors.register(lake, name, run=None, env={"name": "maze"}, seed=0, process=process)
    copy(lake, target)
    assert set(collectors.read_all(target)) == {INFO.collector}
    assert collectors.read(target, INFO.collector) == collectors.read(lake, INFO.collector)


def test_one_copy_at_a_time_and_not_into_itself(lake: Lake, target: Lake, tmp_path: Path) -> None:
    fill(lake, [5])
    with target.storage.hold("copy", what="it is being copied into"), pytest.raises(Locked, match="copied into"):
        copy(lake, target)
    shutil.copytree(lake.path, tmp_path / "twin")
    with pytest.raises(UsageError, match="same lake"):
        copy(lake, Lake(tmp_path / "twin"))
    with pytest.raises(UsageError):
        copy(lake, target, where="drop table x")


@pytest.mark.parametrize("schema", [SCHEMA, IMAGES], ids=["plain", "images"])
def test_to_an_object_store_and_back(lake: Lake, bucket: str, tmp_path: Path, schema: Schema) -> None:
    written = fill(lake, [5, 40, 7], schema=schema, seal_every=2)
    derived = derive(lake, next(iter(written)), 5) if schema is SCHEMA else None
    every = [*written, *([derived] if derived else [])]
    remote = Lake.create(f"s3://{bucket}/copied")
    assert copy(lake, remote).segments == len(ids(lake))
    assert copy(lake, remote).trajectories == 0
    same_trajectories(lake, remote, every)
    back = Lake.create(tmp_path / "back")
    copy(Lake(f"s3://{bucket}/copied"), back, where="length <> 7")
    copy(Lake(f"s3://{bucket}/copied"), back)
    same_trajectories(lake, back, every)


@pytest.mark.parametrize("failing", ["fetch the blob", "publish the main file"])
def test_a_copy_that_fails_leaves_nothing_half_copied(
    lake: Lake, target: Lake, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    fill(lake, [40], schema=IMAGES)

    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    publish, fetch = target.storage.publish, lake.storage.fetch
    if failing == "fetch the blob":
        monkeypatch.setattr(lake.storage, "fetch", lambda key: refuse() if ".blob" in key else fetch(key))
    else:
        monkeypatch.setattr(
            target.storage, "publish", lambda staged, key: publish(staged, key) if ".blob" in key else refuse()
        )
    with pytest.raises((StageFailed, OSError)):
        copy(lake, target)
    assert not list((target.local / "tmp").iterdir())
    assert not segment_files(target)


def expire_all(lake: Lake, where: str) -> None:
    """Expire trajectories, and delete their files and what the log says of them."""
    for _ in range(2):
        expire(lake, RetentionLimits(where=where), grace_seconds=0)
    compact(lake, grace_seconds=0)


@pytest.mark.system
@pytest.mark.parametrize("where", ["", "length > 5"], ids=["all", "some"])
@pytest.mark.parametrize("gone", ["length = 7", "true"], ids=["one", "every"])
def test_what_expired_in_the_target_does_not_return(lake: Lake, target: Lake, where: str, gone: str) -> None:
    written = fill(lake, [5, 6, 7, 8], seal_every=2)
    copy(lake, target, where=where)
    expire_all(target, gone)
    left = Reader(target).uids()
    assert copy(lake, target, where=where).present == len(left)
    for again in (where, "", "length > 4"):
        copy(lake, target, where=again)
    never = {uid for uid, values in written.items() if where and len(values["reward"]) == 6}
    assert sorted(Reader(target).uids()) == sorted({*left, *never})
    more = fill(lake, [7], seed=1)
    assert copy(lake, target).trajectories == 1
    assert set(more) <= set(Reader(target).uids())


def test_what_was_derived_from_expired_ones_does_not_return(lake: Lake, target: Lake) -> None:
    (base, other) = fill(lake, [6, 7])
    derive(lake, base, 6)
    copy(lake, target)
    expire_all(target, "length = 6")
    copy(lake, target)
    assert Reader(target).uids() == [other]


def test_a_lake_that_nobody_copied_into_keeps_no_record_of_what_expired(lake: Lake) -> None:
    fill(lake, [5, 6])
    expire_all(lake, "length = 5")
    assert not lake.storage.names("expired")


def test_the_record_of_what_expired_stays_a_few_files(
    lake: Lake, target: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_MOST_FILES", 3)
    written = list(fill(lake, [3, 4, 5, 6, 7, 8, 9, 10]))
    copy(lake, target)
    for length in range(3, 10):
        expire(target, RetentionLimits(where=f"length = {length}"), grace_seconds=0)
        assert len(target.storage.names("expired")) <= 3
    assert hex_uids(retention.ExpiredUids(target.storage).read()) == sorted(written[:-1])
    copy(lake, target)
    assert Reader(target).uids() == written[-1:]


def test_a_damaged_record_of_what_expired_is_refused(lake: Lake, target: Lake) -> None:
    fill(lake, [3, 4])
    copy(lake, target)
    expire(target, RetentionLimits(where="length = 3"), grace_seconds=0)
    path = max((target.path / "expired").iterdir(), key=lambda each: each.stat().st_size)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match=f"{path.name}' is damaged"):
        copy(lake, target)
