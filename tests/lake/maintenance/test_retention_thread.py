"""A lake kept within bounds: look by look, by a thread beside a writer, and under a reader."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pipelines.data.view import View
from pipelines.events import Notice
from pipelines.lake.folders import list_all
from pipelines.lake.log import lease, protect, read_log
from pipelines.lake.maintenance import retention_thread as caps
from pipelines.lake.maintenance.files import FileTable
from pipelines.lake.maintenance.retention_thread import MANY, RetentionThread, choose_ripe
from pipelines.lake.reading import Reader
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from tests.lake.factories import SCHEMA, assert_same, columns, fill, segment_files
from tests.lake.maintenance.test_compaction import a_file
from tests.lake.windows import windows_of


def steps(lake: Lake) -> int:
    inventory = FileTable(lake)
    inventory.refresh()
    return sum(file.live_steps for file in inventory.files.values())


def test_the_oldest_segments_go_as_new_ones_come(lake: Lake) -> None:
    cap = RetentionThread(lake, max_steps=50, grace_seconds=0.0, merge=False)
    written: list[str] = []
    for seed in range(10):
        written += fill(lake, [5, 5], seed=seed)
        cap.look()
        assert steps(lake) == min(10 * (seed + 1), 50)
    assert Reader(lake).uids() == written[-10:]
    assert len(segment_files(lake)) == 5
    assert read_log(lake.storage).steps == {"": 50}
    assert len(lake.storage.names("log")) <= 2


def test_bytes_are_bounded_too(lake: Lake) -> None:
    fill(lake, [5] * 10, seal_every=1)
    size = segment_files(lake)[0].stat().st_size
    RetentionThread(lake, max_bytes=4 * size, grace_seconds=0.0, merge=False).look()
    assert len(segment_files(lake)) in (4, 5)


def test_one_large_segment_does_not_defeat_the_bound(lake: Lake) -> None:
    written = list(fill(lake, [5] * 40))
    RetentionThread(lake, max_steps=50, merge=False).look()
    assert Reader(lake).uids() == written[-10:]


def test_small_segments_are_merged_when_there_are_many(lake: Lake) -> None:
    cap = RetentionThread(lake, grace_seconds=0.0)
    written = {}
    for seed in range(MANY):
        assert len(segment_files(lake)) == seed
        written |= fill(lake, [5], seed=seed)
        cap.look()
    assert len(segment_files(lake)) == 1
    reader = Reader(lake)
    for uid, values in written.items():
        assert_same(dict(reader.read(uid).columns), values)


@pytest.mark.parametrize("sizes", [(1000,), (1000, 60_000), (100_000,), (180_000, 90_000, 20)])
def test_merging_writes_every_byte_a_few_times_and_leaves_few_files(sizes: tuple[int, ...]) -> None:
    files, target, written, arrived = [], 1_000_000, 0, 0
    for number in range(800):
        files.append(a_file(f"{number:06d}", size := sizes[number % len(sizes)], 1, 0, time=number))
        arrived += size
        while run := choose_ripe(files, target_bytes=target):
            total = sum(file.bytes for file in run)
            assert total <= target
            written += total
            files = [file for file in files if file not in run] + [a_file(f"{number:06d}m", total, 1, 0, time=number)]
    assert written <= 4 * arrived
    assert len(files) <= 2 * arrived / target + 60


def test_protected_trajectories_stay_and_a_protected_lake_is_told_of_once(lake: Lake) -> None:
    written = list(fill(lake, [5] * 6, seal_every=1))
    protect(lake, list_all(lake.storage)[:1], name="run@1")
    told: list = []
    cap = RetentionThread(lake, max_steps=11, merge=False, listener=told.append)
    cap.look()
    assert Reader(lake).uids() == [written[0], written[-1]]
    assert not told
    protect(lake)
    fill(lake, [5] * 6, seal_every=1, seed=1)
    cap.look()
    cap.look()
    assert [type(event) for event in told] == [Notice]
    assert steps(lake) == 40


def test_a_look_is_skipped_while_somebody_else_maintains_the_lake(lake: Lake) -> None:
    fill(lake, [5] * 6, seal_every=1)
    cap = RetentionThread(lake, max_steps=10)
    with lease(lake):
        cap.look()
        assert steps(lake) == 30
    cap.look()
    assert steps(lake) == 10


def test_a_damaged_segment_is_told_of_once_and_left_out(lake: Lake) -> None:
    written = fill(lake, [5] * (MANY + 1), seal_every=1)
    first = next(iter(written.values()))
    path = segment_files(lake)[0]
    data = bytearray(path.read_bytes())
    data[data.index(first["obs.state"].tobytes())] ^= 1
    path.write_bytes(data)
    told: list = []
    cap = RetentionThread(lake, grace_seconds=0.0, listener=told.append)
    for _ in range(3):
        cap.look()
    assert len(told) == 1
    assert len(segment_files(lake)) == 2


@pytest.mark.system
def test_a_thread_bounds_a_lake_that_is_written_and_drawn_from(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the newest is left, nobody is disturbed, and what is drawn is what was written."""
    monkeypatch.setattr(caps, "LOOK_SECONDS", 0.02)
    lake.register(SCHEMA)
    written: dict[str, dict[str, np.ndarray]] = {}
    done, wrong = threading.Event(), []

    def read() -> None:
        view = View(lake, SCHEMA.id)
        while not done.is_set():
            view.refresh()
            for place in range(view.num_trajectories):
                uid = view.uids()[place].ljust(16, b"\0").hex()
                try:
                    values = dict(Reader(lake).read(uid).columns)
                except Exception as error:
                    if "has no trajectory" not in str(error):  # expired between the two
                        wrong.append(error)
                    continue
                if any(not np.array_equal(values[name], written[uid][name]) for name in values):
                    wrong.append(uid)
                break

    reader, rng = threading.Thread(target=read), np.random.default_rng(0)
    with RetentionThread(lake, max_steps=300, grace_seconds=1.0, listener=wrong.append), lake.writer(SCHEMA) as writer:
        reader.start()
        for number in range(120):
            values = columns(rng, 20)
            uid = writer.append(values, TrajectoryInfo(seed=number))
            written[uid] = values
            writer.seal()
        done.set()
        reader.join()
    assert not wrong
    assert 300 <= steps(lake) <= 700
    left = Reader(lake).uids()
    assert set(left) == set(list(written)[-len(left) :])
    view = View(lake, SCHEMA.id)
    view.refresh()
    for uid, values in zip(view.uids().tolist(), windows_of(view), strict=True):
        assert_same(values, written[uid.ljust(16, b"\0").hex()])


def test_a_process_that_is_interrupted_leaves_the_rest_to_others(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was doing stops where it may, and the lake is whole."""
    written = list(fill(lake, [5] * 40, seal_every=1))
    monkeypatch.setattr(caps, "LOOK_SECONDS", 0.0)
    reached, go_on, rewrite = threading.Event(), threading.Event(), caps.rewrite

    def slow(*arguments: object, **options: object) -> object:
        reached.set()
        go_on.wait()
        return rewrite(*arguments, **options)

    monkeypatch.setattr(caps, "rewrite", slow)
    cap = RetentionThread(lake, grace_seconds=0.0)
    cap.__enter__()
    reached.wait()
    threading.Timer(0.2, go_on.set).start()  # while the end waits for the thread
    cap.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert len(segment_files(lake)) >= 40  # nothing was swept
    monkeypatch.setattr(caps, "rewrite", rewrite)
    assert Reader(lake).uids() == written
    RetentionThread(lake, grace_seconds=0.0).look()
    assert len(segment_files(lake)) < 40
    assert Reader(lake).uids() == written
