"""Runs that several processes train together, as tests see them from outside."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.stages.library import collect
from tests.cli.conftest import TINY

COMMAND = [sys.executable, "-m", "amago_cli", "train"]
ALONE = ("train.grad_accumulation=4", "train.log_every=1", "train.checkpoint_every=1000")


def find_free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def lines(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl about training."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["stage"] == "train"]


def assert_alike(one: Path, other: Path) -> None:
    """The same windows, and the same losses and gradients up to the order of sums."""
    assert len(lines(one)) == len(lines(other)) > 0
    for a, b in zip(lines(one), lines(other), strict=True):
        assert (a["update"], a["steps_seen"]) == (b["update"], b["steps_seen"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6, abs=1e-7), a["update"]
        for name in ("grad_norm", "entropy", "log_prob"):
            if name in a:
                assert a[name] == pytest.approx(b[name], rel=2e-5, abs=1e-7), (name, a["update"])


def processes(run: Path) -> list[int]:
    """Return the ranks of the run, rank 0 first, by their command lines and environments."""
    found = {}
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                command = (place / "cmdline").read_bytes().split(b"\0")
                settings = dict(each.partition(b"=")[::2] for each in (place / "environ").read_bytes().split(b"\0"))
            except OSError:
                continue
            if str(run).encode() in command and b"RANK" in settings:
                found[int(settings[b"RANK"])] = int(place.name)
    return [found[number] for number in sorted(found)]


def wait_for_updates(process: subprocess.Popen[str], run: Path, number: int) -> None:
    while not (run / "metrics.jsonl").exists() or len(lines(run)) < number:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def gone(run: Path, seconds: float = 600) -> bool:
    deadline = time.monotonic() + seconds
    while processes(run):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def small_lake(place: Path) -> Path:
    """Fill a lake with episodes of T-Maze, played at random."""
    collect("tmaze", lake=place, steps=1_500, settings={"collect.workers": 0, "collect.actors": 8})
    return place


def words(lake: Path, run: Path, *options: str, **settings: object) -> list[str]:
    named = {name.replace("__", "."): value for name, value in settings.items()}
    fixed = [each for each in (*TINY, *ALONE) if not any(f"{each}.".startswith((f"{n}=", f"{n}.")) for n in named)]
    more = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in named.items()]
    chosen = [word for assignment in (*fixed, *more) for word in ("--set", assignment)]
    return ["--from-lake", str(lake), "--run", str(run), *chosen, *options]


def train(lake: Path, run: Path, *options: str, **settings: object) -> subprocess.CompletedProcess[str]:
    """Call `amago train`; more of its options, then its settings."""
    command = [*COMMAND, *words(lake, run, *options, **settings), "--output", "json"]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600, cwd=lake.parent)


@contextlib.contextmanager
def start(lake: Path, run: Path, *options: str, **settings: object) -> Iterator[subprocess.Popen[str]]:
    """Start `amago train`; it is killed where the block is left before it has ended, which Popen would wait for."""
    command = [*COMMAND, *words(lake, run, *options, **settings), "--output", "json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=lake.parent
    ) as process:
        try:
            yield process
        finally:
            process.kill()
