"""Files of segments that are closed and mapped again while windows are read from them."""

from __future__ import annotations

import dataclasses
import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.data import gather
from pipelines.data.gather import Gatherer, SegmentLost
from pipelines.data.view import View
from pipelines.errors import IntegrityError
from pipelines.lake.folders import segment_key
from pipelines.lake.segment import OpenSegments, SegmentFile
from pipelines.lake.store import Lake
from tests.lake.factories import MIXED, SCHEMA, fill, live_ids

LENGTHS = [3, 9, 16, 40, 8, 25, 1, 12]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def view_of(lake: Lake, schema=SCHEMA) -> View:
    view = View(lake, schema.id)
    view.refresh()
    return view


def draw(view: View, size: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows of up to 6 steps anywhere."""
    rng = np.random.default_rng(seed)
    chosen = rng.integers(view.num_trajectories, size=size)
    lengths = view.table["length"][chosen].astype(np.int64)
    start = (rng.random(size) * lengths).astype(np.int64)
    return chosen, start, np.minimum(start + 6, lengths)


@pytest.mark.parametrize("schema", [SCHEMA, MIXED], ids=["plain", "wide columns"])
@pytest.mark.parametrize("size", [5, 60], ids=["few windows a file", "many windows a file"])
def test_windows_of_files_that_were_closed_are_the_same(lake: Lake, schema, size: int, monkeypatch) -> None:
    fill(lake, LENGTHS, schema=schema, seal_every=1)
    view = view_of(lake, schema)
    keeping = Gatherer(view, 7)
    monkeypatch.setattr(gather, "OPEN_FILES", 2)
    closing = Gatherer(view, 7)
    for seed in range(6):
        windows = draw(view, size, seed)
        expected, found = keeping.gather(*windows), closing.gather(*windows)
        np.testing.assert_array_equal(found.lengths, expected.lengths)
        for name, values in expected.columns.items():
            np.testing.assert_array_equal(found.columns[name], values, err_msg=name)
    assert len(closing._files) <= 2
    assert len(keeping._files) == len(LENGTHS)


def shared(view: View, monkeypatch: pytest.MonkeyPatch) -> Gatherer:
    """A reader whose second thread decodes half of everything."""
    monkeypatch.setattr(gather, "SHARED_BYTES", 0)
    monkeypatch.setattr(gather, "count_cores", lambda: 2)
    return Gatherer(view, 7)


@pytest.mark.parametrize("kept", [2, 100])
def test_two_threads_decode_what_one_does(lake: Lake, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(lake, LENGTHS, schema=MIXED, seal_every=1)
    view = view_of(lake, MIXED)
    monkeypatch.setattr(gather, "count_cores", lambda: 1)
    alone = Gatherer(view, 7)
    monkeypatch.setattr(gather, "OPEN_FILES", kept)
    helped = shared(view, monkeypatch)
    for seed in range(20):
        windows = draw(view, 60, seed)
        expected, found = alone.gather(*windows), helped.gather(*windows)
        for name, values in expected.columns.items():
            np.testing.assert_array_equal(found.columns[name], values, err_msg=name)


@pytest.mark.parametrize("number", [0, len(LENGTHS) - 1], ids=["the second thread's half", "the other half"])
def test_either_thread_names_a_file_that_it_cannot_decode(
    lake: Lake, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(lake, LENGTHS, schema=MIXED, seal_every=1)
    view = view_of(lake, MIXED)
    windows = np.arange(len(LENGTHS)), np.zeros(len(LENGTHS), np.int64), np.ones(len(LENGTHS), np.int64)
    copy_rows, id = SegmentFile.copy_rows, view.segments[number].file

    def refuse(file: SegmentFile, *rows: Any) -> None:
        if file.path.name == segment_key(id).rpartition("/")[2]:
            raise IntegrityError("its images are damaged")
        copy_rows(file, *rows)

    monkeypatch.setattr(SegmentFile, "copy_rows", refuse)
    for reader in (Gatherer(view, 7), shared(view, monkeypatch)):
        with pytest.raises(SegmentLost, match="images are damaged") as lost:
            reader.gather(*windows)
        assert lost.value.number == number


def test_a_file_is_mapped_again_as_it_was_opened(lake: Lake) -> None:
    fill(lake, LENGTHS, seal_every=1)
    ids = live_ids(lake)
    files = OpenSegments(lake, limit=1)
    opened = {id: files.open(id, SCHEMA.id) for id in ids}
    for id in ids:
        again = files.open(id, SCHEMA.id)
        assert again is not opened[id]
        assert again.rows == opened[id].rows
        assert again.columns.keys() == opened[id].columns.keys()
        for name, values in again.columns.items():
            np.testing.assert_array_equal(values, opened[id].columns[name])
            assert values.dtype == opened[id].columns[name].dtype
            assert not values.flags.writeable
        assert again.footer.header == opened[id].footer.header
        assert again.footer.trajectories.equals(opened[id].footer.trajectories)
        again.require_sound()


@pytest.mark.parametrize("size", [0, 100])
def test_a_file_that_was_cut_after_it_was_closed_is_lost(lake: Lake, size: int, monkeypatch) -> None:
    fill(lake, LENGTHS, seal_every=1)
    view = view_of(lake)
    monkeypatch.setattr(gather, "OPEN_FILES", 1)
    reader = Gatherer(view, 7)
    windows = np.arange(len(LENGTHS)), np.zeros(len(LENGTHS), np.int64), np.ones(len(LENGTHS), np.int64)
    reader.gather(*windows)
    path = lake.path / segment_key(view.segments[0].file)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(SegmentLost, match="is damaged"):
        reader.gather(*windows)


FEW = """
import json, resource, sys
import numpy as np
from pipelines.data.gather import Gatherer
from pipelines.data.view import View
from pipelines.errors import IntegrityError
from pipelines.lake.store import Lake
from tests.data.test_open_files import draw

lake, schema = Lake(sys.argv[1]), sys.argv[2]
view = View(lake, schema)
view.refresh()
open_now = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
reader = Gatherer(view, 7)
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]), open_now))
sums = []
for seed in range(4):
    batch = reader.gather(*draw(view, 60, seed))
    sums.append(float(np.float64(batch.columns["reward"]).sum()))
print(json.dumps([sums, len(reader._files)]))
"""


@pytest.mark.system
def test_too_few_descriptors_close_files_instead_of_ending_the_training(lake: Lake) -> None:
    fill(lake, [4] * 60, seal_every=1)

    def read(descriptors: int) -> tuple[list[float], int]:
        command = [sys.executable, "-c", FEW, str(lake.path), SCHEMA.id, str(descriptors)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert not done.returncode, done.stderr
        return tuple(json.loads(done.stdout))

    expected, many = read(4096)
    for descriptors in (24, 30, 40, 50):
        found, few = read(descriptors)
        assert found == expected
        assert few < descriptors < many


def test_addresses_are_those_of_columns_in_the_map(lake: Lake) -> None:
    fill(lake, LENGTHS)
    opened = OpenSegments(lake)
    (id,) = {segment.file for segment in view_of(lake).segments}
    file = opened.open(id, SCHEMA.id)
    assert file.addresses == {name: values.ctypes.data for name, values in file.columns.items()}
    del file.addresses
    file.columns["reward"] = np.zeros(file.rows, dtype=np.float32)  # as a damaged footer might have it
    with pytest.raises(IntegrityError, match="column 'reward' is not in the file"):
        file.addresses  # noqa: B018


def test_segments_that_moved_to_files_in_use_are_read_there(lake: Lake) -> None:
    fill(lake, [5, 5, 5], seal_every=1)
    view = view_of(lake)
    reader = Gatherer(view, 6)
    windows = np.arange(3), np.zeros(3, np.int64), np.full(3, 5)
    first, second, third = reader.gather(*windows).columns["reward"].copy()
    reader.gather(*windows)  # by known addresses
    files = [segment.file for segment in view.segments]
    for number, file in enumerate(files[1:] + files[:1]):  # no file is closed
        view._taken[number] = dataclasses.replace(view._taken[number], file=file)
    view.moves += 1
    np.testing.assert_array_equal(reader.gather(*windows).columns["reward"], [second, third, first])
    assert not np.array_equal(first, second)


def test_a_file_without_a_column_is_damaged(lake: Lake) -> None:
    fill(lake, LENGTHS)
    view = view_of(lake)
    reader = Gatherer(view, 5)
    (id,) = {segment.file for segment in view.segments}
    del reader._files.open(id, SCHEMA.id).columns["reward"]
    with pytest.raises(SegmentLost, match="it lacks the column 'reward'"):
        reader.gather(np.arange(4), np.zeros(4, np.int64), np.ones(4, np.int64))


def test_files_that_others_refer_to_do_not_keep_opening_from_ending(lake: Lake, monkeypatch) -> None:
    fill(lake, LENGTHS, seal_every=1)
    files, ids = OpenSegments(lake, limit=3), live_ids(lake)
    held = [files.open(id, SCHEMA.id) for id in ids[:3]]

    def fail(*arguments: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(files, "_map", fail)
    with pytest.raises(OSError, match="too many open files"):
        files.open(ids[3], SCHEMA.id)
    assert (len(files), files.limit, len(held)) == (0, 1, 3)


@pytest.mark.parametrize("row0", [1000, 2**31, 2**32 - 1])
def test_rows_outside_a_file_are_damage(lake: Lake, row0: int) -> None:
    fill(lake, LENGTHS)
    view = view_of(lake)
    view.table["row0"] = row0
    with pytest.raises(SegmentLost, match="rows lie outside it"):
        Gatherer(view, 5).gather(np.arange(4), np.zeros(4, np.int64), np.ones(4, np.int64))
