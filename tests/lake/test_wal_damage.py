"""Logs with bits flipped and ends torn off, anywhere: never an exception, never a wrong trajectory."""

from __future__ import annotations

import zlib
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.lake import reading
from pipelines.lake.maintenance.verify import verify
from pipelines.lake.store import Lake
from pipelines.lake.wal import MAGIC, Log, parse
from tests.lake.factories import INFO, SCHEMA, assert_same, columns
from tests.tiers import examples


def ends_of(data: bytes) -> list[int]:
    """Where the frames of an undamaged log end: the header's first."""
    ends, start = [], len(MAGIC)
    while start < len(data):
        start += 13 + int.from_bytes(data[start + 1 : start + 9], "little")
        ends.append(start)
    return ends


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[list[tuple[dict, bytes]]]]:
    """The bytes of a log, and the content of each of its frames: rows of trajectories, small and large ones, some full
    of zeros, and the bytes of their columns.
    """
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("log")
    records = []
    for i, size in enumerate((40, 3000, 0, 700, 600_000, 500_000, 1_100_000, 2500)):
        body = bytes(size) if i % 2 else rng.bytes(size)
        row = {"env": "e{M", "length": i, "task": "T" * i + "{S}", "return": i / 7, "crc": zlib.crc32(body)}
        records.append((row, body))
    made = Log.create(folder / "a.wal", {"format": 1, "columns": ["x"]}, tmp=folder)
    frames = [records[:1], records[1:7], records[7:]]
    for some in frames:
        each = {
            "length": np.array([row["length"] for row, _ in some]),
            "task": [row["task"] for row, _ in some],
            "return": np.array([row["return"] for row, _ in some]),
            "crc": np.array([row["crc"] for row, _ in some], dtype=np.uint32),
        }
        made.append({"env": "e{M"}, each, [body for _, body in some])
    made.close()
    return (folder / "a.wal").read_bytes(), frames


def test_each_append_is_a_frame(log) -> None:
    whole, frames = log
    assert len(ends_of(whole)) == 1 + len(frames)
    assert [(row, bytes(body)) for row, body in parse(whole).records] == list(chain(*frames))


def test_a_damaged_trajectory_leaves_the_others_of_its_frame(log) -> None:
    whole, frames = log
    for number, (_, body) in enumerate(frames[1]):
        if not body:
            continue
        bad = bytearray(whole)
        following = sum(len(data) for _, data in frames[1][number:])  # bodies end the frame, one after the other
        bad[ends_of(whole)[2] - following] ^= 1
        content = parse(bytes(bad))
        kept = [record for frame in frames for record in frame if record is not frames[1][number]]
        assert [(row, bytes(data)) for row, data in content.records] == kept
        assert content.damaged == 1


@pytest.mark.system
@examples(400)
@given(data=st.data())
def test_what_is_read_is_what_was_written_and_whole_frames_survive(log, data: st.DataObject) -> None:
    whole, frames = log
    cut = data.draw(st.integers(0, len(whole)) | st.just(len(whole)))
    flips = data.draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 7)), max_size=4))
    bad = bytearray(whole)
    for place, bit in flips:
        bad[place] ^= 1 << bit
    places = {i for i, (a, b) in enumerate(zip(whole, bad, strict=True)) if a != b}
    content = parse(bytes(bad[:cut]))
    found = [(row, bytes(body)) for row, body in content.records]
    assert all(record in list(chain(*frames)) for record in found)
    ends = ends_of(whole)
    spans = list(pairwise(ends))
    sound = [
        record
        for records, (start, end) in zip(frames, spans, strict=True)
        if end <= cut and not any(start <= place < end for place in places)
        for record in records
    ]
    if not any(place < len(MAGIC) for place in places):  # with these, it may be the log of another version
        assert [record for record in found if record in sound] == sound
    if not places:
        assert content.damaged == 0


@examples(60)
@given(data=st.data())
def test_salvage_of_a_damaged_log_gives_true_trajectories_or_none(tmp_path_factory, data: st.DataObject) -> None:
    lake = Lake.create(tmp_path_factory.mktemp("damage") / "lake")
    rng = np.random.default_rng(0)
    writer, written = lake.writer(SCHEMA, seal_seconds=1e9), {}
    for _ in range(4):
        values = columns(rng, int(rng.integers(1, 12)))
        written[writer.append(values, INFO)] = values
    writer._abandon()
    path: Path = next((lake.path / "wal").iterdir())
    bad = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 2))):
        bad[data.draw(st.integers(0, len(bad) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bad[: data.draw(st.integers(0, len(bad)) | st.just(len(bad)))])
    told: list = []
    saved = lake.salvage(listener=told.append)
    reader = reading.Reader(lake)
    uids = reader.uids()
    assert len(uids) == saved
    for uid in uids:
        found = reader.read(uid)
        assert_same(dict(found.columns), written[uid])
        assert found.info == INFO
    assert not verify(lake).corrupt
    assert lake.salvage() == 0
