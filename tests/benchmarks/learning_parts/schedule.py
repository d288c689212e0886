"""Runs in processes of their own, a few at a time, each with one thread; results are appended as they come."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.benchmarks.learning_parts import results
from tests.benchmarks.learning_parts.machine import ROOT, code, gemm_gflops

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def missing(jobs: Sequence[Mapping[str, Any]], path: Path) -> list[Mapping[str, Any]]:
    """List the jobs whose result is not in the file yet."""
    known = {results.key(row) for row in results.read(path)}
    return [job for job in jobs if results.key(job) not in known]


def run_all(jobs: Sequence[Mapping[str, Any]], path: Path, *, at_once: int, root: Path = ROOT) -> int:
    """Run the jobs whose result is missing, with the code in `root`; returns how many failed."""
    todo = missing(jobs, path)
    print(f"{len(todo)} runs, {len(jobs) - len(todo)} of {len(jobs)} are in {path}", flush=True)
    if not todo:
        return 0
    gflops, failed = gemm_gflops(), 0
    with ThreadPoolExecutor(at_once) as pool:
        running = {pool.submit(run_one, job, root): job for job in todo}
        try:
            for number, future in enumerate(as_completed(running), 1):
                job, row = running[future], future.result()
                name = f"[{number}/{len(todo)}] {job['task']} | {job['variant']} | seed {job['seed']}"
                if "error" in row:
                    failed += 1
                    print(f"{name}: FAILED\n{row['error']}", flush=True)
                    continue
                public = {key: value for key, value in job.items() if not key.startswith("_")}
                results.append(path, {**public, **row, "gflops": gflops})
                print(f"{name}: {_shown(row)}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failed


def run_one(job: Mapping[str, Any], root: Path = ROOT) -> dict[str, Any]:
    """Run a job to its end; returns its figures, CPU seconds of its process and its children, and wall seconds.

    `_command` is the command line, `_input` its standard input. The code's version is read at the start of each run:
    a checkout may change while a benchmark goes on. Of a failed run only `error`, the end of its error output.
    """
    facts = code(root)
    environment = os.environ | ONE_THREAD | {"PYTHONPATH": str(ROOT)}
    began = time.monotonic()
    with subprocess.Popen(
        job["_command"],
        cwd=ROOT,
        env=environment | job.get("_environment", {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            child.stdin.write(json.dumps(job["_input"]))
            child.stdin.close()
            with ThreadPoolExecutor(1) as reader:
                said = reader.submit(child.stderr.read)
                output = child.stdout.read()
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
        finally:
            if child.returncode is None:
                child.kill()
    if child.returncode:
        return {"error": f"exit {child.returncode}: {said.result().strip()[-2000:]}"}
    return {
        **json.loads(output.splitlines()[-1]),
        **facts,
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "wall_seconds": round(time.monotonic() - began, 2),
    }


def own_job(task: Mapping[str, Any], job: Mapping[str, Any], *, points: int) -> dict[str, Any]:
    """Complete a job that is run with this checkout."""
    given = {name: job[name] for name in ("settings", "seed", "cpu_limit")}
    return {
        **job,
        "_command": [sys.executable, "-m", "tests.benchmarks.learning_parts.one"],
        "_input": {**given, "task": task, "points": points},
    }


def reference_job(job: Mapping[str, Any], *, root: Path, python: Path, points: int) -> dict[str, Any]:
    """Complete a job that is run with a checkout of the reference, by a Python that has what it needs."""
    given = {name: job[name] for name in ("task", "seed", "cpu_limit")}
    return {
        **job,
        "_command": [str(python), "-W", "ignore", str(ROOT / "tests/benchmarks/learning_reference.py")],
        "_input": {**given, "points": points},
        "_environment": {"PYTHONPATH": str(root.resolve())},
    }


def _shown(row: Mapping[str, Any]) -> str:
    attempts = "".join(f" {value:.2f}" for value in row["per_attempt"])
    score = f"return {row['return_mean']:.3g}" + (f", attempts{attempts}" if attempts else "")
    return f"{score}; {row['updates']} updates, {row['env_steps']} steps, {row['cpu_seconds']:.0f} CPU s"
