"""When segments are written, by whom, and what happens when they cannot be."""

import errno
import os
import threading
import time

import numpy as np
import pytest

from pipelines.errors import StageFailed
from pipelines.files import atomic
from pipelines.lake import folders, reading
from pipelines.lake.footer import hex_uids
from pipelines.lake.live import LiveTable
from pipelines.lake.segment import StagedFiles
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from pipelines.lake.writer import WAITING, mark_followed
from tests.lake.factories import INFO, SCHEMA, columns, refuse, segment_files


def eventually(count: int, lake: Lake) -> None:
    """Wait until the lake has so many segment files."""
    deadline = time.monotonic() + 600
    while len(segment_files(lake)) != count:
        assert time.monotonic() < deadline, segment_files(lake)
        time.sleep(0.005)


def test_segments_are_sealed_by_size_age_and_close(lake: Lake) -> None:
    rng = np.random.default_rng(0)
    writer = lake.writer(SCHEMA, seal_bytes=1000, seal_seconds=1e9)
    writer.append(columns(rng, 10), TrajectoryInfo())
    assert segment_files(lake) == []
    writer.append(columns(rng, 100), TrajectoryInfo())
    eventually(1, lake)
    assert (writer.trajectories, writer.steps) == (2, 110)
    aged = lake.writer(SCHEMA, seal_seconds=600)
    aged.append(columns(rng, 1), TrajectoryInfo())
    aged.poll()
    assert len(segment_files(lake)) == 1
    aged._opened -= 601
    aged.poll()
    eventually(2, lake)
    writer.append(columns(rng, 1), TrajectoryInfo())
    writer.close()
    aged.close()
    assert len(segment_files(lake)) == 3
    assert list((lake.path / "wal").iterdir()) == list((lake.path / "tmp").iterdir()) == []


def test_a_followed_lake_is_sealed_once_a_second(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.lake.writer._FOLLOWED_SEAL_SECONDS", 600.0)  # the test moves the clock
    rng, second = np.random.default_rng(0), 601.0
    with lake.writer(SCHEMA, seal_seconds=1e9) as writer:

        def pass_time(*clocks: str) -> None:
            for clock in clocks:
                setattr(writer, clock, time.monotonic() - second)
            writer.poll()

        writer._sealed = writer._looked = time.monotonic()
        writer.append(columns(rng, 1), TrajectoryInfo())
        pass_time("_looked", "_sealed")
        assert segment_files(lake) == []  # nobody follows
        mark_followed(lake.storage)
        writer._sealed = time.monotonic()
        pass_time("_looked")
        assert segment_files(lake) == []  # the last segment is of this second
        pass_time("_sealed")
        eventually(1, lake)
        writer.append(columns(rng, 1), TrajectoryInfo())
        assert len(segment_files(lake)) == 1
        pass_time("_sealed")
        eventually(2, lake)
        long_ago = time.time() - 3600
        os.utime(lake.path / "locks" / "followed", (long_ago, long_ago))
        writer.append(columns(rng, 1), TrajectoryInfo())
        pass_time("_looked", "_sealed")
        assert len(segment_files(lake)) == 2


def test_acting_goes_on_while_a_segment_is_written_and_waits_when_the_disk_is_far_behind(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, going, real = columns(np.random.default_rng(0), 5), threading.Event(), StagedFiles.publish

    def slow(*arguments: object) -> None:
        assert going.wait(600)
        real(*arguments)

    monkeypatch.setattr(StagedFiles, "publish", slow)
    with lake.writer(SCHEMA, seal_bytes=1, seal_seconds=1e9) as writer:
        uids = [writer.append(values, INFO) for _ in range(1 + WAITING)]
        assert segment_files(lake) == []
        assert lake.salvage() == 0  # their logs are held
        blocked = threading.Thread(target=lambda: uids.append(writer.append(values, INFO)))
        blocked.start()
        blocked.join(0.2)
        assert blocked.is_alive()
        going.set()
        blocked.join(600)
        writer.seal()
        assert len(segment_files(lake)) == 2 + WAITING
    assert reading.Reader(lake).uids() == uids


def test_what_a_refusing_disk_said_in_the_background_is_heard_and_nothing_is_lost(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = columns(np.random.default_rng(0), 5)
    writer = lake.writer(SCHEMA, seal_bytes=1, seal_seconds=1e9)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse(errno.ENOSPC))
        uids = [writer.append(values, INFO)]
        writer._sealer._join()
        with pytest.raises(StageFailed, match="no space left"):
            writer.append(values, INFO)
    uids.append(writer.append(values, INFO))  # the one that was refused a voice was not stored
    writer.close()
    assert reading.Reader(lake).uids() == uids
    assert list((lake.path / "wal").iterdir()) == list((lake.path / "tmp").iterdir()) == []


def test_a_forked_child_has_no_part_in_its_parents_writing(lake: Lake) -> None:
    writer = lake.writer(SCHEMA)
    writer.append(columns(np.random.default_rng(0), 5), INFO)
    child = os.fork()
    if child == 0:
        try:
            writer.seal()
        except StageFailed:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert segment_files(lake) == []
    writer.close()
    assert len(reading.Reader(lake).uids()) == 1


def test_sealing_again_after_a_failure_past_the_rename_doubles_nothing(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = lake.writer(SCHEMA)
    writer.append(columns(np.random.default_rng(0), 5), INFO)
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "sync_directory", refuse(errno.EIO))
        (lake.path / "segments" / time.strftime("%Y%m%d%H", time.gmtime())).mkdir()
        with pytest.raises(StageFailed):
            writer.seal()
    assert len(segment_files(lake)) == 1
    writer.close()
    assert len(segment_files(lake)) == 1
    assert list((lake.path / "wal").iterdir()) == []


@pytest.mark.parametrize(
    "tick_us",
    [0, -1, -7, 3_600_000_000, -3_600_000_000],
    ids=["stopped", "backwards", "far backwards", "an hour a seal", "an hour back a seal"],
)
def test_segments_have_names_of_their_own_whatever_the_clock_says(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, tick_us: int
) -> None:
    now = [1_700_000_000_000_000]

    def clock() -> int:
        now[0] += tick_us
        return now[0] * 1000

    monkeypatch.setattr(folders.time, "time_ns", clock)
    follower, rng, uids = LiveTable(lake), np.random.default_rng(0), []
    writers = [lake.writer(SCHEMA, name="same", seal_seconds=1e9) for _ in range(3)]
    for _ in range(5):
        for writer in writers:
            uids.append(writer.append(columns(rng, 3), TrajectoryInfo()))
            writer.seal()
        follower.refresh()
    assert len(segment_files(lake)) == len(uids) == 15
    assert sorted(uid for segment in follower.segments for uid in hex_uids(segment.uids)) == sorted(uids)
    assert sorted(reading.Reader(lake).uids()) == sorted(uids)


def test_what_could_not_be_sealed_is_told_beside_the_error_that_ended_it(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StagedFiles, "publish", refuse(errno.ENOSPC))
    kept = []

    def fail() -> None:
        with lake.writer(SCHEMA, seal_seconds=1e9) as writer:
            kept.append(writer.append(columns(np.random.default_rng(0), 5), INFO))
            raise ValueError("the first one")

    with pytest.raises(ValueError, match="first") as raised:
        fail()
    (note,) = raised.value.__notes__
    assert "no space left" in note
    monkeypatch.undo()
    assert lake.salvage() == 1
    assert reading.Reader(lake).uids() == kept
