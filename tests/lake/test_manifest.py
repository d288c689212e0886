"""Manifests against footers: with whatever manifests, a reader finds what a reader of all footers finds."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.data.gather import SegmentLost
from pipelines.data.view import View
from pipelines.errors import IntegrityError
from pipelines.files.checksums import checksum
from pipelines.lake import live, manifest
from pipelines.lake.bucket import Bucket
from pipelines.lake.footer import Footer, hex_uids, read_footer
from pipelines.lake.live import LiveTable
from pipelines.lake.log import lease
from pipelines.lake.maintenance.compaction import compact, purge
from pipelines.lake.maintenance.files import FileTable
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.maintenance.retention_thread import RetentionThread
from pipelines.lake.maintenance.verify import verify
from pipelines.lake.reading import Reader
from pipelines.lake.storage import LocalStorage
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectories, TrajectoryInfo
from tests.lake.factories import SCHEMA, assert_same, columns, derive, fill, live_ids
from tests.lake.pieces import split
from tests.lake.windows import windows_of
from tests.tiers import some


@pytest.fixture(autouse=True)
def small_manifests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "LEAST", 1)
    monkeypatch.setattr(manifest, "_FULL", 4)


@pytest.fixture
def footers_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the segments whose footers a live table has read itself, but for thorough ones."""
    ids: list[str] = []
    find = LiveTable._footer

    def note(table: LiveTable, id: str) -> Footer | None:
        with monkeypatch.context() as patch:
            if not table.thorough:
                patch.setattr(live, "read_footer", lambda storage, id: (ids.append(id), read_footer(storage, id))[1])
            return find(table, id)

    monkeypatch.setattr(LiveTable, "_footer", note)
    return ids


def write_manifests(lake: Lake, **options: Any) -> None:
    with lease(lake) as held:
        inventory = FileTable(lake)
        inventory.refresh()
        inventory.write_manifests(held, **options)


def manifest_files(lake: Lake) -> list[Path]:
    return sorted((lake.path / "manifests").glob("*.manifest"))


def describe(table: LiveTable) -> list[Any]:
    """All that a live table knows of its segments."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(each) for each in value]
        return value.tolist() if isinstance(value, np.ndarray) else value

    return [plain(dataclasses.astuple(segment)) for segment in table.segments]


def look(lake: Lake, *, thorough: bool = False) -> list[Any]:
    table = LiveTable(lake, thorough=thorough)
    table.refresh()
    return describe(table)


def fill_with_pieces(lake: Lake, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with lake.writer(SCHEMA, seal_seconds=1e9) as writer:
        for own, info in split(columns(rng, 9), TrajectoryInfo(env="maze"), 4, episode=f"e{seed}"):
            writer.append(own, info)
            writer.seal()


def test_reader_takes_footers_from_manifests(lake: Lake, footers_read: list[str]) -> None:
    bases = list(fill(lake, [3, 4, 5, 6], seal_every=1))
    fill_with_pieces(lake, 1)
    derive(lake, {bases[1]: {"reward": np.ones(3, np.float32)}}, offset=2)
    expected = look(lake, thorough=True)
    footers_read.clear()
    assert look(lake) == expected
    assert sorted(footers_read) == live_ids(lake)
    footers_read.clear()
    write_manifests(lake)
    assert look(lake) == expected
    assert footers_read == []
    fill(lake, [7])
    assert look(lake)[: len(expected) - 1] == expected[:-1]  # overlays come last
    assert len(footers_read) == 1


def test_windows_are_those_that_were_written(lake: Lake, footers_read: list[str]) -> None:
    written = fill(lake, [3, 4, 5, 6], seal_every=2)
    write_manifests(lake)
    view = View(lake, SCHEMA.id)
    view.refresh()
    for uid, window in zip(hex_uids(view.uids()), windows_of(view), strict=True):
        assert_same(window, written[uid])
    again, ranks = View(lake, SCHEMA.id), View(lake, SCHEMA.id)
    again.restore(view.snapshot())
    assert again.uids().tolist() == view.uids().tolist()
    assert footers_read == []
    ranks.refresh(view.collect_findings())
    assert ranks.uids().tolist() == view.uids().tolist()


@pytest.mark.system
@pytest.mark.parametrize("seed", some(range(8), 0))
def test_reader_with_manifests_equals_one_of_all_footers(tmp_path: Path, seed: int) -> None:
    """After each of many changes, manifests of any age included; restored snapshots and other ranks too."""
    lake, rng = Lake.create(tmp_path / "lake"), np.random.default_rng(seed)
    changes = ["fill", "pieces", "derive", "compact", "expire", "purge", "lose", "thread"]
    for change in ["fill", *rng.permutation(changes * 3)]:
        grace = float(rng.choice([0, 1e9]))
        uids = Reader(lake).uids()
        if change == "fill":
            fill(lake, rng.integers(1, 9, 6).tolist(), seed=int(rng.integers(1 << 30)), seal_every=2)
        elif change == "pieces":
            fill_with_pieces(lake, int(rng.integers(1 << 30)))
        elif change == "derive":
            bases = [uid for uid in uids if Reader(lake).row(uid)["base_uid"] is None]
            derive(lake, {uid: {"reward": Reader(lake).read(uid).columns["reward"] + 1} for uid in bases[:2]})
        elif change == "compact":
            compact(lake, grace_seconds=grace)
        elif change == "expire":
            expire(lake, RetentionLimits(max_trajectories=max(1, len(uids) - 3)), grace_seconds=grace)
        elif change == "purge":
            purge(lake)
        elif change == "lose":
            for path in manifest_files(lake):
                if rng.random() < 0.5:
                    path.unlink()
        elif change == "thread":
            RetentionThread(lake, max_steps=1000, grace_seconds=grace).look()
        by_footers, by_manifests = LiveTable(lake, thorough=True), LiveTable(lake)
        by_footers.refresh(), by_manifests.refresh()
        assert describe(by_manifests) == describe(by_footers), change
        ids = [segment.id for segment in by_footers.segments]
        restored, ranks = LiveTable(lake), LiveTable(lake)
        restored.restore(ids), ranks.repeat(by_footers.collect_findings())
        assert describe(restored) == describe(ranks) == describe(by_footers), change


def change_header(content: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    line, _, rest = content.partition(b"\n")
    header = json.loads(line)
    change(header)
    return json.dumps(header).encode() + b"\n" + rest


def set_field(name: str, value: Any) -> Callable[[bytes], bytes]:
    return lambda content: change_header(content, lambda header: header.update({name: value}))


def set_in_segment(name: str, value: Any) -> Callable[[bytes], bytes]:
    return lambda content: change_header(content, lambda header: header["segments"][0].update({name: value}))


def set_in_footer(name: str, value: Any) -> Callable[[bytes], bytes]:
    return lambda content: change_header(content, lambda header: header["segments"][0]["header"].update({name: value}))


HARM: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[:-7],
    "longer": lambda content: content + bytes(16),
    "no line": lambda content: content.replace(b"\n", b" "),
    "no json": lambda content: b"{" + content,
    "nested": lambda content: b"[" * 100_000 + b"\n",
    "a list": lambda content: b"[1, 2]\n",
    "newer": set_field("format", 2),
    "another lake": set_field("lake", "f" * 32),
    "no columns": set_field("columns", []),
    "unknown columns": set_field("columns", ["uid", "length", "weight"]),
    "segments of another kind": set_field("segments", {"id": 1}),
    "no segments": set_field("segments", []),
    "more trajectories": set_in_segment("trajectories", 2**31),
    "fewer trajectories": set_in_segment("trajectories", 0),
    "endless": set_in_segment("trajectories", 2**63),
    "negative": set_in_segment("trajectories", -1),
    "a number that is none": set_in_segment("bytes", float("inf")),
    "another size": set_in_segment("bytes", 17),
    "a number as id": set_in_segment("id", 7),
    "another writer": set_in_footer("writer", "somebody"),
    "more rows": set_in_footer("rows", 2**40),
    "an overlay": set_in_footer("kind", "overlay"),
    "another kind": set_in_footer("kind", "else"),
    "no schema": set_in_footer("schema", "../../etc/passwd"),
    "long lengths": lambda content: content[:-16] + struct.pack("<4I", *[2**32 - 1] * 4),
}


@pytest.mark.parametrize("harm", HARM)
def test_harmful_manifest_is_ignored(lake: Lake, harm: str, footers_read: list[str]) -> None:
    """It has the name of its content, so that no checksum tells."""
    fill(lake, [3, 4, 5, 6], seal_every=1)
    expected = look(lake, thorough=True)
    write_manifests(lake)
    for path in manifest_files(lake):
        content = HARM[harm](path.read_bytes())
        path.unlink()
        (path.parent / f"{checksum(content)[:32]}.manifest").write_bytes(content)
    footers_read.clear()
    assert look(lake) == expected
    assert footers_read
    write_manifests(lake)  # replaces what cannot be used
    assert look(lake) == expected


@pytest.mark.parametrize("place", [0, 5, -1])
def test_altered_manifest_is_ignored(lake: Lake, place: int, footers_read: list[str]) -> None:
    fill(lake, [3, 4], seal_every=2)
    write_manifests(lake)
    (path,) = manifest_files(lake)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert look(lake) == look(lake, thorough=True)
    assert len(footers_read) == 1
    write_manifests(lake)
    footers_read.clear()
    assert look(lake)
    assert footers_read == []


def test_what_is_no_file_is_ignored(lake: Lake) -> None:
    fill(lake, [3, 4], seal_every=1)
    expected = look(lake)
    folder = lake.path / "manifests"
    (folder / f"{'a' * 32}.manifest").mkdir(parents=True)
    os.mkfifo(folder / f"{'b' * 32}.manifest")
    (folder / f"{'c' * 32}.manifest").symlink_to("nowhere")
    (folder / "notes.txt").write_text("hello")
    assert look(lake) == expected


def test_manifest_that_is_gone_before_it_is_read_is_ignored(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(lake, [3, 4], seal_every=1)
    monkeypatch.setattr(manifest, "list_manifests", lambda storage: [f"{'a' * 32}.manifest"])
    assert look(lake) == look(lake, thorough=True)


def test_manifest_makes_no_segment_live(lake: Lake) -> None:
    fill(lake, [3, 4, 5], seal_every=1)
    write_manifests(lake)
    gone = live_ids(lake)[1]
    (lake.path / "segments" / f"{gone}.arrow").unlink()
    assert [segment[1] for segment in look(lake)] == live_ids(lake)
    assert gone not in live_ids(lake)


def test_segment_of_another_size_is_read_itself(lake: Lake, footers_read: list[str]) -> None:
    fill(lake, [3, 4, 5], seal_every=1)
    write_manifests(lake)
    path = lake.path / "segments" / f"{live_ids(lake)[1]}.arrow"
    path.write_bytes(path.read_bytes()[:-50])
    table = LiveTable(lake)
    table.refresh()
    assert footers_read == [*table.unreadable] == [live_ids(lake)[1]]


def swap_rows(lake: Lake) -> None:
    """A manifest that gives the second segment the numbers of the first one, of another length."""
    (path,) = manifest_files(lake)
    content = path.read_bytes()
    line, _, _ = content.partition(b"\n")
    count = sum(each["trajectories"] for each in json.loads(line)["segments"])

    def swap(header: dict[str, Any]) -> None:
        one, other = header["segments"]
        one["header"]["rows"], other["header"]["rows"] = other["header"]["rows"], one["header"]["rows"]

    uids, lengths = content[len(line) + 1 : -4 * count], np.frombuffer(content[-4 * count :], "<u4")
    content = change_header(line + b"\n" + uids + lengths[::-1].tobytes(), swap)
    path.unlink()
    (path.parent / f"{checksum(content)[:32]}.manifest").write_bytes(content)


def test_lie_of_a_manifest_about_rows_is_an_error_of_the_segment(lake: Lake) -> None:
    fill(lake, [3, 50], seal_every=1)
    write_manifests(lake)
    swap_rows(lake)
    view = View(lake, SCHEMA.id)
    view.refresh()
    with pytest.raises(SegmentLost, match="not what a manifest says"):
        list(windows_of(view))
    with pytest.raises(IntegrityError, match="not what a manifest says"):
        Reader(lake).read(Reader(lake).uids()[0])
    assert not verify(lake).corrupt


def test_lie_of_a_manifest_about_uids_is_an_error_of_the_segment(lake: Lake) -> None:
    (uid,) = fill(lake, [3])
    write_manifests(lake)
    (path,) = manifest_files(lake)
    content = path.read_bytes().replace(bytes.fromhex(uid), bytes(range(16)))
    path.unlink()
    (path.parent / f"{checksum(content)[:32]}.manifest").write_bytes(content)
    reader = Reader(lake)
    (lie,) = reader.uids()
    assert lie != uid
    with pytest.raises(IntegrityError, match="lacks trajectories"):
        reader.read(lie)
    with pytest.raises(IntegrityError, match="lacks trajectories"):
        reader.read_portion(0, reader.live.segments[0].uids)
    expire(lake, RetentionLimits(where="length = 3"))  # maintenance reads footers
    assert not Reader(lake).uids()


def test_manifests_are_filled_up_and_do_not_name_what_is_gone(lake: Lake) -> None:
    for count in itertools.repeat(1, 9):
        fill(lake, [3] * count, seal_every=1)
        write_manifests(lake)
    assert len(manifest_files(lake)) <= 5  # of at least half of four segments
    named = [each.entry.id for path in manifest_files(lake) for each in manifest._decode(path.read_bytes(), lake.id)]
    assert sorted(named) == live_ids(lake)
    compact(lake, grace_seconds=0.0)
    named = [each.entry.id for path in manifest_files(lake) for each in manifest._decode(path.read_bytes(), lake.id)]
    assert named == live_ids(lake)


def test_few_segments_are_worth_no_manifest(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "LEAST", 4)
    fill(lake, [3, 4, 5], seal_every=1)
    write_manifests(lake)
    assert not manifest_files(lake)
    fill(lake, [3, 4, 5], seal_every=1)
    write_manifests(lake)
    assert manifest_files(lake)


def test_purge_removes_uids_from_manifests(lake: Lake) -> None:
    uids = list(fill(lake, [3] * 6, seal_every=2))
    write_manifests(lake)
    (path,) = manifest_files(lake)  # of three segments, two of which stay: without a purge it would stay, too
    expire(lake, RetentionLimits(where=f"uid = '{uids[0]}'"), grace_seconds=1e9)
    assert bytes.fromhex(uids[0]) in path.read_bytes()
    purge(lake)
    assert manifest_files(lake)
    assert not any(bytes.fromhex(uids[0]) in path.read_bytes() for path in manifest_files(lake))
    assert look(lake) == look(lake, thorough=True)


def test_full_disk_costs_a_manifest_only(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(lake, [3, 4], seal_every=1)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalStorage, "write", refuse)
    assert compact(lake).segments == (2, 1)
    assert not manifest_files(lake)


def test_trajectories_that_leave_gaps_are_in_no_manifest(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(lake, [3, 4], seal_every=1)
    gaps = live_ids(lake)[0]
    monkeypatch.setattr(
        manifest, "is_listable", lambda footer: footer.path != lake.storage.url(f"segments/{gaps}.arrow")
    )
    write_manifests(lake)
    named = [each.entry.id for path in manifest_files(lake) for each in manifest._decode(path.read_bytes(), lake.id)]
    assert named == live_ids(lake)[1:]


def test_footer_is_listable_where_rows_are_contiguous(lake: Lake) -> None:
    with lake.writer(SCHEMA, seal_seconds=1e9) as writer:
        parts = [columns(np.random.default_rng(0), 3) for _ in range(2)]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        writer.append_many(Trajectories(joined, [4, 4], [TrajectoryInfo()] * 2))
    footer = read_footer(lake.storage, live_ids(lake)[0])
    assert manifest.is_listable(footer)
    shorter = dataclasses.replace(footer, header={**footer.header, "rows": 9})
    assert not manifest.is_listable(shorter)


def test_object_store_is_asked_for_a_manifest_instead_of_its_segments(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake.create(f"s3://{bucket}/a/lake")
    fill(lake, [3] * 12, seal_every=1)
    monkeypatch.setattr(manifest, "_FULL", 512)
    write_manifests(lake)
    expected = look(lake, thorough=True)
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "there"))
    names: list[str] = []
    asking = Bucket._ask_store
    monkeypatch.setattr(
        Bucket, "_ask_store", lambda self, name, **options: (names.append(name), asking(self, name, **options))[1]
    )
    there = Lake(lake.name)
    table, other = LiveTable(there), LiveTable(there)
    table.refresh(), other.refresh()
    assert describe(table) == describe(other) == expected
    assert not [name for name in names if name.endswith(".arrow")]
    assert len([name for name in names if name.endswith(".manifest")]) == 1  # the second reads the host's copy
