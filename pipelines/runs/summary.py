"""Runs as rows, one per run, for tables, SQL and scripts. A thousand runs take less than a second, by a cache."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelines.files.user_cache import cache_home
from pipelines.runs import progress
from pipelines.runs.evaluations import DEFAULT_METRIC, Evaluation, RunScores, find_last_and_best, read_evaluations
from pipelines.runs.stored import RunState, StoredRun, find_running, read_run

COLUMNS: Mapping[str, str] = {
    **dict.fromkeys(
        ("run", "name", "recipe", "env", "parent", "like", "state", "stage", "host", "reason", "changed"), "text"
    ),
    **dict.fromkeys(("pid", "updates", "env_steps", "seed", "evaluations", "other_evaluations"), "count"),
    **dict.fromkeys(("score_update", "best_update", "bytes"), "count"),
    **dict.fromkeys(("progress", "seconds_left", "age", "started"), "number"),
    **dict.fromkeys(("score", "score_low", "score_high", "best", "best_low", "best_high", "random_return"), "number"),
    **dict.fromkeys(("scored_on", "standard", "problems"), "text"),
}
"""Columns of a row and their types: "text", "count" or "number"."""

Row = dict[str, Any]
_WATCHED = (
    *("config.toml", "run.json", "metrics.jsonl", progress.NAME, "chain.json"),
    *("evaluations", "checkpoints", "export", "lake", "lake/segments", "lake/tmp", "lake/wal"),
)
_MOST_CACHED = 50_000


def summarize_runs(paths: Sequence[Path], *, metric: str = DEFAULT_METRIC) -> list[Row]:
    """Summarise each run in a row with the columns of `COLUMNS`.

    `score` is that of the latest update that was evaluated by the run's own settings, `best` the highest of such
    scores. `scored_on` says on which tasks and how the agent acted, `standard` also in which environment: runs of
    different standards cannot be ranked. `other_evaluations` is the number of evaluations by other standards. Rows of
    runs that have not changed come from a cache of this user.
    """
    with _Cache.open() as cache:
        return [cache.summarize(path, metric) for path in paths]


def summarize_run(run: StoredRun, *, metric: str = DEFAULT_METRIC) -> Row:
    """Summarise one run in a row, without its age."""

    def scores_of(name: str, evaluation: Evaluation | None) -> Row:
        score = evaluation.score(metric) if evaluation is not None else None
        low, high = (score.low, score.high) if score is not None else (None, None)
        return {name: score.value if score is not None else None, f"{name}_low": low, f"{name}_high": high}

    evaluations, damaged = read_evaluations(run.path / "evaluations")
    scores = RunScores.select(evaluations, run.document)
    found = find_last_and_best(scores.final, metric)
    standard = found[0].standard if found else None
    state = asdict(run.state)
    return {
        "run": str(run.path),
        "name": run.name,
        "recipe": run.recipe,
        "env": run.env,
        "parent": run.parent,
        "like": run.like,
        "state": state.pop("status"),
        **{key: state[key] for key in ("stage", "pid", "host", "reason", "started")},
        "progress": run.share,
        "seconds_left": run.seconds_left,
        **scores_of("score", found and found[0]),
        **scores_of("best", found and found[1]),
        "random_return": random.return_mean if (random := run.random_play) is not None else None,
        "score_update": found[0].update if found else None,
        "best_update": found[1].update if found else None,
        "scored_on": str(standard) if standard else "",
        "standard": f"{standard.env}, {standard}" if standard else "",
        "evaluations": len(evaluations),
        "other_evaluations": len(evaluations) - len(scores.curve),
        "env_steps": run.env_steps,
        "updates": run.updates,
        "seed": run.seed,
        "changed": ", ".join(f"{key}={format_setting(after)}" for key, (_, after) in run.changed.items()),
        "bytes": measure_disk(run.path),
        "problems": "; ".join((*run.problems, *damaged)),
    }


def format_setting(value: Any) -> str:
    """Write a setting's value briefly: numbers to six digits, plain words without quotes."""
    if value is None:
        return "(unset)"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return value if value and not set(value) & set(" ,='\"") else json.dumps(value)
    return json.dumps(value, default=str)


def measure_disk(path: Path) -> int:
    """Measure the space that a directory takes on the disk, without the targets of links."""
    total, waiting = 0, [str(path)]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


class _Cache:
    """Rows by key, each with a mark of the files that it was made from. Without a connection, nothing is stored."""

    def __init__(self, connection: sqlite3.Connection | None) -> None:
        self._connection = connection
        self._known: dict[str, tuple[str, str]] = {}
        self._new: list[tuple[str, str, str]] = []
        if connection is not None:
            connection.execute("create table if not exists rows (key text primary key, mark text, row text)")
            found = connection.execute("select key, mark, row from rows")
            self._known = {key: (mark, row) for key, mark, row in found}

    @classmethod
    @contextlib.contextmanager
    def open(cls) -> Iterator[_Cache]:
        """Open the cache. One that cannot be used is replaced by an empty one in memory, and a damaged one is
        removed."""
        path = cache_home() / "runs-3.sqlite"
        cache, connection = cls(None), None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(path, timeout=0.5)
            cache = cls(connection)
        except sqlite3.OperationalError:  # locked, or not writable
            pass
        except sqlite3.DatabaseError:
            with contextlib.suppress(OSError):
                path.unlink()
        except OSError:
            pass
        try:
            yield cache
            with contextlib.suppress(sqlite3.Error):
                cache.store()
        finally:
            if connection is not None:
                connection.close()

    def summarize(self, path: Path, metric: str) -> Row:
        """Summarise the run at `path` in a row, which comes from the cache if no file has changed."""
        marks, newest = [], 0.0
        for name in _WATCHED:
            try:
                status = os.stat(path / name)
            except OSError:
                marks.append("-")
                continue
            newest = max(newest, status.st_mtime)
            marks.append(f"{status.st_mtime_ns}.{status.st_size}.{status.st_ino}")
        now = find_running(path)
        key = json.dumps([str(path.absolute()), metric])  # text, whatever the locale made of the path
        row = self.get(key, " ".join(marks), lambda: summarize_run(read_run(path), metric=metric))
        row |= {"run": str(path), "age": max(time.time() - newest, 0.0)}
        if now is None:
            return row
        # A cached row says how the run ended before: a process has taken it up since, which changes no file at once.
        state = RunState.running(*now)
        live = read_run(path)
        row |= {"state": "running", "stage": state.stage, "pid": state.pid, "host": state.host, "reason": ""}
        return row | {"progress": live.share, "seconds_left": live.seconds_left}

    def get(self, key: str, mark: str, make: Callable[[], Row]) -> Row:
        known = self._known.get(key)
        if known is not None and known[0] == mark:
            with contextlib.suppress(ValueError):
                row = json.loads(known[1])
                if isinstance(row, dict) and row.keys() >= COLUMNS.keys() - {"age"}:
                    return row
        row = make()
        if row["state"] != "running":
            self._new.append((key, mark, json.dumps(row)))
        return row

    def store(self) -> None:
        if self._connection is None or not self._new:
            return
        with self._connection:
            if len(self._known) + len(self._new) > _MOST_CACHED:
                self._connection.execute("delete from rows")
            self._connection.executemany("insert or replace into rows values (?, ?, ?)", self._new)
