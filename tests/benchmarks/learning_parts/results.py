"""Results of runs: lines of JSON in a file that only grows, and SQL over them."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb

from pipelines.errors import InputMissing
from pipelines.files.json import read_objects
from tests.benchmarks.learning_parts.tasks import Task

_SCORES = {"return_mean": "DOUBLE", "return_std": "DOUBLE", "success_mean": "DOUBLE", "episodes": "INTEGER"}
_POINT = {"update": "INTEGER", "cpu_seconds": "DOUBLE", "env_steps": "BIGINT", **_SCORES, "per_attempt": "DOUBLE[]"}
COLUMNS = {
    "task": "VARCHAR",
    "variant": "VARCHAR",
    "settings": "JSON",
    "seed": "INTEGER",
    "cpu_limit": "DOUBLE",
    "status": "VARCHAR",
    "updates": "INTEGER",
    "env_steps": "BIGINT",
    "replay_ratio": "DOUBLE",
    "greedy": "BOOLEAN",  # how the policy acted; the results of before this was recorded are greedy
    **_SCORES,
    "per_attempt": "DOUBLE[]",
    **{f"other_{name}": kind for name, kind in _SCORES.items()},  # of the best checkpoint, acting the other way
    "other_per_attempt": "DOUBLE[]",
    "best_update": "INTEGER",
    **{f"last_{name}": kind for name, kind in _SCORES.items()},
    "last_per_attempt": "DOUBLE[]",
    "curve": f"STRUCT({', '.join(f'{name} {kind}' for name, kind in _POINT.items())})[]",
    "cpu_seconds": "DOUBLE",
    "curve_cpu_seconds": "DOUBLE",
    "wall_seconds": "DOUBLE",
    "gflops": "DOUBLE",
    "version": "VARCHAR",
    "commit": "VARCHAR",
    "command": "VARCHAR",
}


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Identify a run: the same task, variant, settings, seed and limit are the same run, whatever the commit."""
    return (
        *(row[name] for name in ("task", "variant", "seed", "cpu_limit")),
        json.dumps(row["settings"], sort_keys=True),
    )


def read(path: Path) -> list[dict[str, Any]]:
    """Read every whole line."""
    return [row for row in read_objects(path) if "task" in row]


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add a line, on the disk before this returns; what a kill left of another one is closed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            torn = file.read(1) != b"\n"
        else:
            torn = False
        file.write(b"\n" * torn + json.dumps(row, separators=(",", ":")).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def connect(path: Path, tasks: Mapping[str, Task], *, metric: str = "") -> duckdb.DuckDBPyConnection:
    """Open a database with a table `results`: the columns of the file, `score`, by task or by `metric`, and
    `other_score`, of the other way to act."""
    if not path.is_file():
        raise InputMissing(f"no results in '{path}'", hint="make some: python tests/benchmarks/learning.py run")
    con = duckdb.connect()
    listed = ", ".join(f"{name}: '{kind}'" for name, kind in COLUMNS.items())
    cases = " ".join(f"WHEN '{name}' THEN {task.score}" for name, task in tasks.items())
    score = metric or f"CASE task {cases} END"
    others = " ".join(f"WHEN '{name}' THEN other_{task.score}" for name, task in tasks.items())
    other = "NULL" if metric else f"CASE task {others} END"
    con.execute(
        f"CREATE TABLE results AS SELECT * REPLACE (coalesce(greedy, true) AS greedy), ({score})::DOUBLE AS score, "
        f"({other})::DOUBLE AS other_score FROM read_json(?, format = 'newline_delimited', "
        f"columns = {{{listed}}}, ignore_errors = true)",
        [str(path)],
    )
    return con
