"""`amago collect --collectors 2` in processes whose parts are killed, for local and other engines."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.lake import collectors as records
from pipelines.lake.folders import is_rewritten, parse_segment_name
from pipelines.lake.maintenance.verify import verify
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake


def uids(lake: Path | Lake) -> list[str]:
    opened = lake if isinstance(lake, Lake) else Lake(lake)
    return [uid for (uid,) in query(opened, "select uid from trajectories")[1]]


def total(lake: Path) -> int:
    return query(Lake(lake), "select sum(length) from trajectories")[1][0][0]


COMMAND = [sys.executable, "-m", "amago_cli", "collect", "--env", "tmaze", "--collectors", "2", "--output", "json"]
ACTORS = 4


@dataclass(frozen=True, kw_only=True)
class EngineOfTests:
    """How an engine is chosen, how the processes of a driver's collectors are found, and how a death is reported."""

    options: tuple[str, ...]
    processes: Callable[[int], list[int]]
    death: str


def children(parent: int) -> list[int]:
    """The processes of this host that perform tasks for a driver: they are forked from one that it has started."""
    servers = find_servers(parent)
    return [pid for pid, above, _ in processes() if above in servers]


def find_servers(driver: int) -> list[int]:
    """The processes that are forked for the tasks of a driver."""
    return [pid for pid, above, command in processes() if above == driver and "pipelines.stages.tasks" in command]


def processes() -> Iterator[tuple[int, int, str]]:
    """Number, parent and command line of every process."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            yield int(entry.name), parent, (entry / "cmdline").read_text()


LOCAL = EngineOfTests(options=(), processes=children, death="was killed by SIGKILL; starting it again")


def start(run: Path, steps: int, engine: EngineOfTests = LOCAL) -> subprocess.Popen[str]:
    command = [*COMMAND, *engine.options, "--run", str(run), "--steps", str(steps), "--set", "env.corridor=4"]
    command += ["--set", f"collect.actors={ACTORS}", "--workers", "0", "--set", "collect.seal_seconds=0.2"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@contextlib.contextmanager
def playing(run: Path, engine: EngineOfTests) -> Iterator[subprocess.Popen[str]]:
    """Start a driver that would play for ever; it is killed at the end, also if the test fails."""
    process = start(run, 10**9, engine)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def stored_by(run: Path) -> dict[str, int]:
    """Steps in sealed segments, by collector."""
    rows = query(Lake(run), "select collector, sum(length) from trajectories group by collector")[1]
    return {name: int(steps) for name, steps in rows}


def segments(run: Path) -> dict[str, str]:
    """Find the collectors of segments by the segments' names: without reading them, however much was played.

    Segments that were merged meanwhile are of neither collector.
    """
    names = [file.stem for file in run.glob("lake/segments/*/*.arrow")]
    return {name: parse_segment_name(name)[0].rsplit(".", 2)[0] for name in names if not is_rewritten(name)}


def await_play(process: subprocess.Popen[str], run: Path) -> None:
    """Wait until both collectors have stored something that is new; meanwhile small segments are merged."""
    before = segments(run)
    while process.poll() is None:
        if len({collector for name, collector in segments(run).items() if name not in before}) == 2:
            return
        time.sleep(0.1)
    raise AssertionError(process.communicate())


def ended(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any], str]:
    out, err = process.communicate(timeout=600)
    return process.returncode, json.loads(out or "{}"), err


def require_sound(run: Path, steps: int) -> None:
    lake = Lake(run)
    found = uids(lake)
    assert len(found) == len(set(found))
    assert not verify(lake).corrupt
    assert list((run / "lake" / "wal").iterdir()) == []
    assert steps <= total(run / "lake") < steps + 2 * ACTORS
    assert len(records.read_all(lake)) == 2


def salvaged(run: Path) -> int:
    """The steps that are stored once the logs of processes that were killed are sealed."""
    Lake(run).salvage()
    return total(run / "lake")


def survives_a_killed_collector(run: Path, *, kills: int, seed: int, engine: EngineOfTests = LOCAL) -> None:
    rng = random.Random(seed)
    with playing(run, engine) as process:
        for _ in range(kills):
            await_play(process, run)
            time.sleep(rng.random())
            os.kill(rng.choice(engine.processes(process.pid)), signal.SIGKILL)
        await_play(process, run)  # the driver has seen the last one die
        process.send_signal(signal.SIGTERM)
        code, _, err = ended(process)
    assert code == 143
    assert err.count(engine.death) == kills
    steps = salvaged(run) + 4_000
    code, result, _ = ended(start(run, steps, engine))
    assert (code, result["metrics"]["restarts"]) == (0, 0)
    require_sound(run, steps)


def survives_a_killed_fork_server(run: Path) -> None:
    """Kill the process that collectors are forked from, then a collector, whose end it can no longer report."""
    with playing(run, LOCAL) as process:
        await_play(process, run)
        (server,), played = find_servers(process.pid), children(process.pid)
        os.kill(server, signal.SIGKILL)
        await_play(process, run)
        os.kill(played[0], signal.SIGKILL)
        await_play(process, run)
        assert find_servers(process.pid) != [server]
        process.send_signal(signal.SIGTERM)
        code, _, err = ended(process)
    assert code == 143
    assert err.count("ended with exit code 255; starting it again") == 1
    steps = salvaged(run) + 400
    assert ended(start(run, steps))[0] == 0
    require_sound(run, steps)


def survives_a_killed_driver(run: Path, *, kills: int, seed: int, engine: EngineOfTests = LOCAL) -> None:
    rng = random.Random(seed)
    for _ in range(kills):
        with playing(run, engine) as process:
            await_play(process, run)
            time.sleep(rng.random())
            while len(left := engine.processes(process.pid)) < 2:  # Ray renames its processes call by call
                assert process.poll() is None, process.communicate()
                time.sleep(0.02)
        await_end(left)
        process.communicate()
        salvaged(run)  # else the next command seals logs, which looks like play
    steps = salvaged(run) + 4_000
    assert ended(start(run, steps, engine))[0] == 0
    require_sound(run, steps)


def await_end(pids: Sequence[int]) -> None:
    """Wait until these processes have ended; what took how long is printed."""
    began = time.monotonic()
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < began + 600, "processes outlived their driver"  # only a hang reaches it
        time.sleep(0.1)
    print(f"{len(pids)} processes ended after {time.monotonic() - began:.1f} s")
