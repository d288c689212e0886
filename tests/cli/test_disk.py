"""A disk that is full or read-only, as a small file system of its own; needs the right to mount one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Amago, Call
from tests.tiers import some


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a file system: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Two mebibytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount("-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place))
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def failed_cleanly(call: Call, words: str) -> None:
    assert call.code == 1, call.err
    assert words in call.err.lower()
    assert "Traceback" not in call.err


@pytest.mark.system
def test_a_full_disk_stops_a_collection_and_keeps_what_was_acknowledged(amago: Amago, disk: Path) -> None:
    failed_cleanly(
        amago("collect", "--env", "gym:CartPole-v1", "--run", disk / "a", "--steps", 200_000, "--workers", 0),
        "no space left",
    )
    assert amago("lake", "verify", disk / "a").code == 0


def test_a_full_disk_stops_a_training(amago: Amago, disk: Path, small: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (disk / "ballast").write_bytes(bytes(4 << 20))
    failed_cleanly(amago("train", "--from-lake", small, "--run", disk / "a", "--steps", 2), "no space left")


def test_a_full_disk_refuses_an_evaluation_before_it_is_played(amago: Amago, disk: Path, small: Path) -> None:
    shutil.copytree(small, disk / "a", symlinks=True, ignore=shutil.ignore_patterns("index.duckdb"))
    with pytest.raises(OSError, match="No space left"):
        (disk / "ballast").write_bytes(bytes(4 << 20))
    failed_cleanly(amago("evaluate", disk / "a", "--episodes", 10**8), "no space left")


def test_a_read_only_disk_is_named_and_can_still_be_asked(amago: Amago, disk: Path) -> None:
    collect = ("collect", "--env", "tmaze", "--run", disk / "a", "--actors", 2)
    assert amago(*collect, "--steps", 40).code == 0
    mount("-o", "remount,ro", str(disk))
    failed_cleanly(amago(*collect, "--steps", 80), "read-only")
    failed_cleanly(amago("collect", "--env", "tmaze", "--run", disk / "b", "--steps", 40), "read-only")
    failed_cleanly(amago("train", "--from-lake", disk / "a", "--steps", 1), "read-only")
    count = "select sum(length)::int n from trajectories"
    assert amago("lake", "sql", disk / "a", count, "--output", "json").json == [{"n": 40}]


@pytest.mark.system
@pytest.mark.parametrize("left", some([8, 24, 40], 1))
def test_a_disk_that_fills_up_keeps_the_checkpoint_and_the_bundle_there_were(
    amago: Amago, disk: Path, small: Path, left: int
) -> None:
    shutil.copytree(small, disk / "a", symlinks=True, ignore=shutil.ignore_patterns("index.duckdb"))
    run = disk / "a"
    assert amago("export", run).code == 0
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize
    (disk / "ballast").write_bytes(bytes(free - left * 1024))
    before = {p.name: p.read_bytes() for p in (run / "export").iterdir()}
    failed_cleanly(amago("train", "--from-lake", run, "--steps", 4), "no space left")
    assert [p.name for p in (run / "checkpoints").iterdir() if not p.is_symlink()] == ["000003"]
    (disk / "more").write_bytes(bytes(max(left - 12, 0) * 1024))
    failed_cleanly(amago("export", run), "no space left")
    assert {p.name: p.read_bytes() for p in (run / "export").iterdir()} == before
    (disk / "ballast").unlink()
    assert amago("train", "--from-lake", run, "--steps", 4).code == 0
    assert amago("export", run, "--output", "json").json["metrics"]["update"] == 4


@pytest.mark.system
def test_a_full_disk_refuses_columns_and_keeps_the_earlier_file(amago: Amago, disk: Path, small: Path) -> None:
    file = disk / "rows.parquet"
    sql = ("lake", "sql", small, "--output", "parquet", "--to", file)
    assert amago(*sql, "from steps").code == 0
    before = file.read_bytes()
    failed_cleanly(amago(*sql, "select range, hash(range) from range(1000000)"), "no space left on the disk")
    assert file.read_bytes() == before
    assert os.listdir(disk) == [file.name]
