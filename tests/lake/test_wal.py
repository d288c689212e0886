import fcntl
import json
import os
import subprocess
import sys
import textwrap
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from pipelines.events import Notice
from pipelines.lake import reading
from pipelines.lake import segment as segments
from pipelines.lake.live import LiveTable
from pipelines.lake.segment import StagedFiles
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from pipelines.lake.wal import MAGIC, Log, parse
from tests.lake.factories import IMAGES, INFO, SCHEMA, assert_same, columns, segment_files


def dead_writer(lake: Lake, count: int, *, schema=SCHEMA) -> tuple[dict[str, dict[str, np.ndarray]], Path]:
    """Trajectories that only a log without an owner holds."""
    rng = np.random.default_rng(0)
    writer = lake.writer(schema, seal_seconds=1e9)
    written = {}
    for _ in range(count):
        values = columns(rng, int(rng.integers(1, 30)), schema)
        written[writer.append(values, INFO)] = values
    writer._abandon()
    return written, next((lake.path / "wal").iterdir())


@pytest.mark.system
@pytest.mark.parametrize("schema", [SCHEMA, IMAGES], ids=["plain", "images"])
def test_salvage_seals_what_a_dead_writer_logged_once(lake: Lake, schema) -> None:
    written, log = dead_writer(lake, 7, schema=schema)
    assert lake.salvage() == 7
    assert lake.salvage() == 0
    assert not log.exists()
    for uid, values in written.items():
        found = reading.read(lake, uid)
        assert_same(dict(found.columns), values)
        assert found.info == INFO


def test_the_log_of_a_living_writer_is_left_alone(lake: Lake) -> None:
    rng = np.random.default_rng(0)
    with lake.writer(SCHEMA) as writer:
        writer.append(columns(rng, 4), TrajectoryInfo())
        assert lake.salvage() == 0
        with lake.writer(SCHEMA):
            pass
    assert LiveTable(lake).refresh().added == 1


def test_a_forked_child_does_not_keep_its_parents_log_alive(lake: Lake) -> None:
    writer = lake.writer(SCHEMA)
    writer.append(columns(np.random.default_rng(0), 4), TrajectoryInfo())
    child = os.fork()
    if child == 0:
        time.sleep(5)
        os._exit(0)
    try:
        time.sleep(0.05)
        writer._abandon()
        assert lake.salvage() == 1
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_log_torn_at_any_length_keeps_every_whole_record(lake: Lake) -> None:
    written, log = dead_writer(lake, 5)
    data = log.read_bytes()
    ends = frame_ends(data)
    assert ends[-1] == len(data)
    for length in sorted({*range(0, len(data), 37), *ends, *(e - 1 for e in ends)}):
        content = parse(data[:length])
        whole = sum(end <= length for end in ends)
        assert len(content.records) == max(0, whole - 1), length  # the first frame is the header
        assert content.damaged == 0
        assert content.valid == max([len(MAGIC) * (length >= len(MAGIC)), *(e for e in ends if e <= length)])
    log.write_bytes(data[: ends[3] + 11])
    assert lake.salvage() == 3
    assert set(reading.Reader(lake).uids()) == set(list(written)[:3])


def frame_ends(data: bytes) -> list[int]:
    ends, start = [], len(MAGIC)
    while start < len(data):
        start += 13 + int.from_bytes(data[start + 1 : start + 9], "little")
        ends.append(start)
    return ends


def test_a_damaged_record_is_set_aside_and_the_others_are_saved(lake: Lake) -> None:
    written, log = dead_writer(lake, 5)
    data = bytearray(log.read_bytes())
    data[frame_ends(data)[2] + 200] ^= 4
    log.write_bytes(data)
    told: list = []
    assert lake.salvage(listener=told.append) == 4
    assert set(reading.Reader(lake).uids()) == set(written) - {list(written)[2]}
    assert [type(event) for event in told] == [Notice]
    assert "1 of its records" in told[0].text
    assert (lake.path / "quarantine" / log.name).read_bytes() == data


@pytest.mark.parametrize("step", ["stage", "mark", "publish", "drop"])
def test_a_crash_at_any_step_of_sealing_neither_loses_nor_doubles(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    written, _ = dead_writer(lake, 6)

    class Killed(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(
            *{
                "stage": (segments, "stage", die),
                "mark": (Log, "mark", die),
                "publish": (StagedFiles, "publish", die),
                "drop": (Log, "drop", die),
            }[step]
        )
        with pytest.raises(Killed):
            lake.salvage()
    lake.salvage()
    assert LiveTable(lake).refresh().added == 6
    assert sorted(reading.Reader(lake).uids()) == sorted(written)
    assert list((lake.path / "wal").iterdir()) == []


def test_a_log_of_a_newer_version_is_left_with_a_notice(lake: Lake) -> None:
    _, log = dead_writer(lake, 2)
    data = log.read_bytes()
    header = json.loads(data[len(MAGIC) + 13 : frame_ends(data)[0]])
    log.unlink()
    newer = Log.create(log, {**header, "format": 9}, tmp=lake.path / "tmp")
    newer.append({"length": 1}, {"uid": ["a"], "crc": [zlib.crc32(bytes(4))]}, [bytes(4)])
    newer.close()
    told: list = []
    assert lake.salvage(listener=told.append) == 0
    assert "newer version" in told[0].text
    assert log.exists()


WRITER = textwrap.dedent(
    """
    import sys
    import numpy as np
    from pipelines.lake.store import Lake
    from tests.lake.factories import INFO, SCHEMA, columns
    lake, rng = Lake(sys.argv[1]), np.random.default_rng(int(sys.argv[2]))
    writer = lake.writer(SCHEMA, seal_bytes=20_000, seal_seconds=0.05)
    while True:
        uid = writer.append(columns(rng, int(rng.integers(1, 60))), INFO)
        sys.stdout.write(uid + "\\n")
        sys.stdout.flush()
    """
)


def kill_writers(lake: Lake, seed: int, *, writers: int = 2) -> list[str]:
    """Run writers, kill -9 each at a random moment, return what they had acknowledged."""
    rng = np.random.default_rng(seed)
    command = [sys.executable, "-c", WRITER, str(lake.path)]
    running = [
        subprocess.Popen([*command, str(seed * 10 + i)], stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
        for i in range(writers)
    ]
    acknowledged = []
    for process in running:
        assert process.stdout is not None
        acknowledged.append(process.stdout.readline().strip())
    for process in running:
        time.sleep(float(rng.uniform(0.02, 0.4)))
        process.kill()
        assert process.stdout is not None
        acknowledged += [line.strip() for line in process.stdout if line.endswith("\n")]
        process.wait()
    return acknowledged


def test_a_log_that_never_got_its_name_is_removed_and_a_living_one_is_not(lake: Lake) -> None:
    dead, living = lake.path / "tmp" / "w.1.aa-00000000.wal", lake.path / "tmp" / "w.2.bb-00000000.wal"
    dead.write_bytes(b"AMAGO")
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lake.salvage()
        assert not dead.exists()
        assert living.exists()


def check_nothing_lost(lake: Lake, acknowledged: list[str]) -> None:
    lake.salvage()
    reader = reading.Reader(lake)
    uids = reader.uids()
    assert len(uids) == len(set(uids))
    assert set(acknowledged) <= set(uids)
    assert len(uids) <= len(acknowledged) + 100  # logged, but killed before it could say so
    counted = sum(len(s.uids) for s in reader.live.segments)
    assert counted == len(uids)
    for uid in acknowledged[:: max(1, len(acknowledged) // 50)]:
        assert reader.read(uid).info == INFO
    assert list((lake.path / "tmp").iterdir()) == []


@pytest.mark.system
def test_kill_9_loses_nothing_acknowledged(lake: Lake) -> None:
    check_nothing_lost(lake, kill_writers(lake, 0))
    assert segment_files(lake)


@pytest.mark.slow
def test_kill_9_at_ten_random_moments_loses_nothing_acknowledged(lake: Lake) -> None:
    acknowledged: list[str] = []
    for seed in range(1, 11):
        acknowledged += kill_writers(lake, seed)
        check_nothing_lost(lake, acknowledged)
