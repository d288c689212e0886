"""Runs of the benchmark, one at a time, each in a process of its own with one thread; results are appended."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.general_parts import own
from benchmarks.general_parts.tasks import ROOT
from tests.benchmarks.learning_parts.machine import code

_KEY = ("task", "agent", "seed", "seconds")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1") | {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
}


class RunFailed(Exception):
    """A run ended with an error, whose text is the message."""


def read(path: Path) -> list[dict[str, Any]]:
    """Read results; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Append a result, on a line of its own even if the line before it was cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size:
        kept = path.read_text(encoding="utf-8").rpartition("\n")
        path.write_text(kept[0] + kept[1], encoding="utf-8")
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Name a run: the same task, agent, seed and CPU seconds are not run twice."""
    return tuple(row[name] for name in _KEY)


def run_all(jobs: Sequence[Mapping[str, Any]], path: Path) -> int:
    """Run the jobs whose result is missing; return how many failed."""
    known, failed = {key(row) for row in read(path)}, 0
    todo = [job for job in jobs if key(job) not in known]
    print(f"{len(todo)} runs, {len(jobs) - len(todo)} of {len(jobs)} are in {path}", flush=True)
    for number, job in enumerate(todo, 1):
        name = f"[{number}/{len(todo)}] {job['task']} | {job['agent']} | seed {job['seed']}"
        try:
            row = run_one(job)
        except RunFailed as error:
            failed += 1
            print(f"{name}: FAILED\n{error}", flush=True)
            continue
        append(path, row)
        shown = f"sampled {row['sampled']:.4g}, greedy {row['greedy']:.4g}"
        print(f"{name}: {shown}, {row['env_steps']:,} steps, {row['train_cpu_seconds']:.0f} CPU s", flush=True)
    return failed


def run_one(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run a job to its end and return its row. RunFailed with the end of its error output."""
    began, facts = time.monotonic(), code(ROOT)
    environment = os.environ | ONE_THREAD
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = own.play(job, Path(folder), environment) if job["agent"] == "amago" else _play(job, environment)
        except subprocess.CalledProcessError as error:
            raise RunFailed(f"exit {error.returncode}: {(error.stderr or '').strip()[-2000:]}") from error
    settings = json.dumps(found.pop("settings"), sort_keys=True)
    digest = hashlib.sha256(settings.encode()).hexdigest()[:12]
    more = {"settings": json.loads(settings), "settings_digest": digest}
    return {**job, **found, **facts, **more, "wall_seconds": round(time.monotonic() - began, 1)}


def _play(job: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Run an agent of Stable-Baselines3 in its own process."""
    command = [sys.executable, "-m", "benchmarks.general_parts.peer"]
    found = subprocess.run(
        command, input=json.dumps(job), cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(found.stdout.splitlines()[-1])
