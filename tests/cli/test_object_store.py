"""The commands, on a lake in an object store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.lake.store import Lake
from tests.cli.conftest import Amago, tiny
from tests.conftest import start_server, use

COUNT = "select count(*) as n, sum(length)::bigint as steps from trajectories where base_uid is null"


@pytest.fixture
def place(bucket: str) -> str:
    return f"s3://{bucket}/lakes/one"


def collecting(place: str, *more: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "amago_cli", "collect", "--lake", place, "--actors", 4, *more]
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def stored(amago: Amago, place: str) -> dict[str, int]:
    asked = amago("lake", "sql", place, COUNT, "--output", "json")
    assert asked.code == 0, asked.err
    return asked.json[0]


def test_from_collecting_to_training_and_back(
    amago: Amago, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = (
        "collect",
        "--env",
        "goal-frozen-lake",
        "--lake",
        place,
        "--steps",
        200,
        "--actors",
        4,
        "--output",
        "json",
    )
    first = amago(*collect)
    assert first.code == 0, first.err
    assert first.json["lake"] == place
    assert amago(*collect).json["status"] == "skipped"
    assert stored(amago, place)["steps"] == first.json["metrics"]["steps_total"]

    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "another host"))
    done = amago("relabel", "--from-lake", place, "--with", "hindsight", "--output", "json")
    assert done.code == 0, done.err
    assert done.json["metrics"]["trajectories"] > 0
    trained = amago("train", "--from-lake", f"{place}:0.5", "--steps", 3, "--encoder", "feedforward", *tiny())
    assert trained.code == 0, trained.err
    asked = amago("lake", "sql", place, "select count(*) as n, max(t) as t from steps where reward >= 0", "-q")
    assert asked.code == 0, asked.err
    shown = amago("lake", "info", place, "--output", "json")
    assert shown.json["lake"] == place
    assert shown.json["metrics"]["overlays"] == done.json["metrics"]["trajectories"]
    (listed,) = amago("lake", "ls", place, "--output", "json").json["metrics"]["lakes"]
    assert (listed["lake"], listed["overlays"]) == (place, shown.json["metrics"]["overlays"])
    checked = amago("lake", "verify", place, "--output", "json")
    assert checked.code == 0, checked.err
    assert checked.json["metrics"]["corrupt"] == []
    told = amago("lake", "lineage", "runs/train")
    assert told.code == 0, told.err
    assert place in told.out


def test_maintenance(amago: Amago, place: str) -> None:
    for seed in range(3):
        assert amago("collect", "--env", "tmaze", "--lake", place, "--steps", 100, "--seed", seed).code == 0
    before = stored(amago, place)
    merged = amago("lake", "compact", place, "--output", "json")
    assert merged.code == 0, merged.err
    assert stored(amago, place) == before
    assert (merged.json["metrics"]["segments_before"], merged.json["metrics"]["segments_after"]) == (3, 1)
    gone = amago("lake", "expire", place, "--max-steps", 150, "--grace", "0s")
    assert gone.code == 0, gone.err
    assert 0 < stored(amago, place)["steps"] <= 150
    assert amago("lake", "verify", place).code == 0


def test_collectors_at_once(amago: Amago, place: str) -> None:
    processes = [collecting(place, "--env", "tmaze", "--steps", 400, "--seed", seed) for seed in range(2)]
    ends = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ends
    assert stored(amago, place)["steps"] >= 800


def test_a_killed_collector_goes_on_where_it_was(amago: Amago, place: str) -> None:
    process = collecting(place, "--env", "tmaze", "--steps", 10**7, "--set", "collect.seal_seconds=0.2")
    while (lake := Lake.find(place)) is None or not lake.storage.folders("segments"):
        assert process.poll() is None, process.communicate()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    lake.salvage()
    assert list((lake.local / "wal").iterdir()) == []
    before = stored(amago, place)["steps"]
    assert before > 0
    target = before + 100
    again = amago("collect", "--env", "tmaze", "--lake", place, "--actors", 4, "--steps", target, "--output", "json")
    assert again.code == 0, again.err
    assert again.json["metrics"]["steps_total"] - again.json["metrics"]["steps"] == before
    assert stored(amago, place)["steps"] == again.json["metrics"]["steps_total"]
    assert amago("lake", "verify", place).code == 0


def test_training_goes_on_with_a_cache_smaller_than_the_lake(
    amago: Amago, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(6):
        assert amago("collect", "--env", "tmaze", "--lake", place, "--steps", 600, "--seed", seed, "-q").code == 0
    lake = Lake(place)
    names = [
        f"segments/{hour}/{name}"
        for hour in lake.storage.folders("segments")
        for name in lake.storage.names(f"segments/{hour}")
    ]
    total = sum(map(lake.storage.size, names))
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "small"))
    monkeypatch.setenv("AMAGO_CACHE_BYTES", str(total // 3))
    trained = amago(
        "train", "--from-lake", place, "--steps", 5, "--encoder", "feedforward", *tiny(), "--output", "json"
    )
    assert trained.code == 0, trained.err
    assert trained.json["metrics"]["updates"] == 5
    kept = sum(p.stat().st_size for p in (tmp_path / "small").glob("*/cache/**/*") if p.is_file())
    assert 0 < kept <= total // 3


def test_what_cannot_be_reached_is_one_line(
    amago: Amago, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: str
) -> None:
    nowhere = "s3://no-such-bucket/lake"
    failures = [
        (amago("lake", "info", nowhere), 3, "no lake at"),
        (amago("collect", "--env", "tmaze", "--lake", nowhere, "--steps", 10), 1, "there is no bucket"),
        (amago("train", "--from-lake", f"s3://{bucket}/nothing"), 3, "no lake at"),
        (amago("lake", "info", f"s3://{bucket}/a?colour=red"), 2, "unknown option colour"),
        (amago("lake", "ls", f"s3://{bucket}"), 3, "no lake at"),
    ]
    server = start_server()
    use(server, tmp_path / "host", monkeypatch)
    server.stop()
    failures += [
        (amago(*command), 1, "no connection to http://127.0.0.1")
        for command in (
            ("lake", "info", f"s3://{bucket}/lake"),
            ("lake", "sql", f"s3://{bucket}/lake", "select 1"),
            ("lake", "verify", f"s3://{bucket}/lake"),
            ("collect", "--env", "tmaze", "--lake", f"s3://{bucket}/lake", "--steps", 10),
            ("train", "--from-lake", f"s3://{bucket}/lake"),
        )
    ]
    for failed, code, words in failures:
        assert failed.code == code, failed.err
        assert "Traceback" not in failed.err
        (message,) = [line for line in failed.err.splitlines() if line.startswith("error")]  # others say what started
        assert words in message, failed.err


def test_without_obstore_the_extra_is_named(place: str, tmp_path: Path) -> None:
    script = """
import sys
sys.modules["obstore"] = None
from amago_cli.app import main
sys.exit(main(["lake", "info", sys.argv[1]]))
"""
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, place], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 3
    assert 'pip install "amago[stores]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_a_collector_follows_the_policy_that_a_training_publishes(
    amago: Amago, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert amago("collect", "--env", "tmaze", "--lake", place, "--steps", 200, "--actors", 4).code == 0
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "trainer"))
    for steps in (3, 6):
        trained = amago("train", "--from-lake", place, "--steps", steps, "--encoder", "feedforward", *tiny())
        assert trained.code == 0, trained.err
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "collector"))
    for follow in (place, f"{place}/{Lake(place).storage.folders('policies')[0]}"):
        done = amago("collect", "--env", "tmaze", "--lake", place, "--add", 100, "--actors", 4, "--follow", follow)
        assert done.code == 0, done.err
    asked = amago(
        "lake",
        "sql",
        place,
        "select policy_version as v, count(*) as n from trajectories group by v order by v",
        "--output",
        "json",
    )
    assert [row["v"] for row in asked.json] == [-1, 6], asked.out
    several = f"{place}/nobody"
    assert (
        amago("collect", "--env", "tmaze", "--lake", place, "--add", 20, "--actors", 4, "--follow", several).code == 0
    )
