"""Collectors and evaluators as actors of a Ray cluster: one cluster for the session, which is started once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stages import killing
from tests.stages.killing import EngineOfTests, await_end, await_play, ended, require_sound, salvaged, start

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1_800)]
_NAMES = ("/ray/core/src/ray/", "/ray/_private/", "/ray/dashboard/", "/ray/autoscaler/")


def of_ray() -> set[int]:
    """All processes of Ray on this host."""
    return {
        pid
        for pid, _, command in killing.processes()
        if command.startswith("ray::") or any(n in command for n in _NAMES)
    }


def hosts(parent: int) -> list[int]:
    """The processes of Ray's actors that perform tasks, or are about to."""
    return [pid for pid, _, command in killing.processes() if command.startswith("ray::TaskHost")]


def ray_command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
    }
    command = [str(Path(sys.executable).with_name("ray")), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a cluster of this host with two CPUs."""
    pytest.importorskip("ray")
    port = "6399"
    place = tempfile.mkdtemp(prefix="amago-ray-", dir="/tmp")  # short: it is part of the names of sockets
    os.environ["RAY_AUTH_MODE"] = "disabled"  # for the commands too
    started = ray_command(
        "start", "--head", "--port", port, "--num-cpus", "2", "--include-dashboard", "false",
        "--object-store-memory", str(80 << 20), "--node-ip-address", "127.0.0.1", "--temp-dir", place,
    )  # fmt: skip
    if started.returncode:
        pytest.skip(f"Ray did not start: {(started.stderr or started.stdout).strip().splitlines()[-1]}")
    yield f"127.0.0.1:{port}"
    for pid in [pid for pid, _, command in killing.processes() if f"{place}/" in command and pid != os.getpid()]:
        os.kill(pid, signal.SIGKILL)  # of this cluster: others may run on this host
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def engine(cluster: str) -> EngineOfTests:
    options = ("--engine", "ray", "--ray", cluster)
    return EngineOfTests(options=options, processes=hosts, death="has died; starting it again")


LOCAL = EngineOfTests(options=("--engine", "ray", "--ray", "local"), processes=hosts, death="")


def test_shares_are_exact_and_repeating_the_command_does_nothing(tmp_path: Path, engine: EngineOfTests) -> None:
    code, result, err = ended(start(tmp_path / "run", 4_000, engine))
    assert code == 0, err
    assert [each["steps"] for each in result["metrics"]["collectors"]] == [2_000, 2_000]
    require_sound(tmp_path / "run", 4_000)
    code, result, _ = ended(start(tmp_path / "run", 4_000, engine))
    assert (code, result["status"]) == (0, "skipped")


def test_killed_actors_lose_nothing_that_was_acknowledged(tmp_path: Path, engine: EngineOfTests) -> None:
    killing.survives_a_killed_collector(tmp_path / "run", kills=2, seed=0, engine=engine)


@pytest.mark.slow
def test_actors_killed_at_ten_moments_lose_nothing(tmp_path: Path, engine: EngineOfTests) -> None:
    killing.survives_a_killed_collector(tmp_path / "run", kills=10, seed=1, engine=engine)


def test_actors_end_with_a_driver_that_is_killed(tmp_path: Path, engine: EngineOfTests) -> None:
    killing.survives_a_killed_driver(tmp_path / "run", kills=2, seed=2, engine=engine)


def test_more_collectors_than_the_cluster_has_room_for_play_later(tmp_path: Path, engine: EngineOfTests) -> None:
    process = start(tmp_path / "run", 6_000, EngineOfTests(
        options=(*engine.options, "--collectors", "3", "--set", "collect.cpus=2"), processes=hosts, death="",
    ))  # fmt: skip
    code, result, err = ended(process)
    assert code == 0, err
    assert "of 3 collectors, waiting for CPUs" in err
    assert [each["steps"] for each in result["metrics"]["collectors"]] == [2_000] * 3


def test_evaluators_of_a_cluster_have_the_result_of_one_process(tmp_path: Path, cluster: str) -> None:
    amago, run = [sys.executable, "-m", "amago_cli"], str(tmp_path / "run")
    sizes = ["--size", "tiny", "--set", "train.steps=4", "--set", "train.checkpoint_every=4"]
    for words in (
        ["collect", "--env", "tmaze", "--run", run, "--steps", "1000"],
        ["train", "--from-lake", run, "--run", run, *sizes],
    ):
        subprocess.run([*amago, *words], check=True, capture_output=True)
    found = []
    for more in ([], ["--evaluators", "2", "--engine", "ray", "--ray", cluster]):
        words = ["evaluate", run, "--episodes", "30", "--sample", "--output", "json", *more]
        done = subprocess.run([*amago, *words], check=True, capture_output=True, text=True)
        found.append(json.loads(done.stdout))
        Path(found[-1]["outputs"][0]).unlink()
    assert [each["status"] for each in found] == ["done", "done"]
    assert found[0]["metrics"] == found[1]["metrics"]


def test_a_cluster_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    process = start(tmp_path / "run", 4_000, EngineOfTests(
        options=("--engine", "ray", "--ray", "127.0.0.1:1"), processes=hosts, death="",
    ))  # fmt: skip
    code, _, err = ended(process)
    assert code == 3
    assert "error: no Ray cluster at '127.0.0.1:1'" in err
    assert "Traceback" not in err
    assert not (tmp_path / "run" / "lake").exists()


def local(run: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A driver that has started a cluster of its own, in play, and the processes of that."""
    pytest.importorskip("ray")
    before = of_ray()
    process = start(run, 10**9, LOCAL)
    try:
        await_play(process, run)
    except AssertionError as error:
        if "Ray did not start" in str(error):
            pytest.skip("Ray did not start: this machine is busy")
        raise
    return process, sorted(of_ray() - before)


def test_nothing_of_a_local_cluster_outlives_a_driver_that_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process, left = local(run)
    process.kill()
    process.wait()
    await_end(left)
    process.communicate()
    steps = salvaged(run) + 4_000
    code, _, err = ended(start(run, steps, LOCAL))
    assert code == 0, err
    require_sound(run, steps)


def test_a_local_cluster_whose_raylet_is_killed_ends_the_command(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process, left = local(run)
    [raylet] = [pid for pid, _, command in killing.processes() if pid in left and "/raylet/raylet" in command]
    began = time.monotonic()
    os.kill(raylet, signal.SIGKILL)
    code, _, err = ended(process)
    print(f"the driver ended after {time.monotonic() - began:.1f} s with {code}: {err.splitlines()[-1]}")
    assert code == 1
    assert "no node of the Ray cluster is alive" in err
    await_end(left)
    steps = salvaged(run) + 4_000
    code, _, err = ended(start(run, steps, LOCAL))
    assert code == 0, err
    require_sound(run, steps)
