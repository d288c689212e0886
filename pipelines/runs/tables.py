"""Many runs as SQL tables: `runs`, `settings`, `evaluations` and `metrics`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelines.events import Listener, silent
from pipelines.lake.sql import tables as engine
from pipelines.lake.sql.sandbox import QueryLimits
from pipelines.lake.sql.tables import LogTable, RowTable, Tables
from pipelines.runs.evaluations import DEFAULT_METRIC, to_number
from pipelines.runs.metrics import read_metrics
from pipelines.runs.stored import StoredRun, read_run
from pipelines.runs.summary import COLUMNS, Row, summarize_runs

_NAMES_FROM = 20  # lines of each log
_EVALUATIONS = {
    **dict.fromkeys(("run", "series", "env", "split", "tasks", "memory", "label"), "text"),
    **dict.fromkeys(("update", "greedy", "attempts", "counts"), "count"),
    **dict.fromkeys(
        ("temperature", "env_steps", "seconds", "time", "return_mean", "return_low", "return_high"), "number"
    ),
}


def query(
    paths: Sequence[Path],
    text: str,
    *,
    metric: str = DEFAULT_METRIC,
    limits: QueryLimits | None = None,
    listener: Listener = silent,
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Run one SELECT over the tables of `make_tables`; return column names and rows. UsageError for anything else."""
    return engine.query(make_tables(paths, metric=metric), text, limits=limits, listener=listener)


def select_rows(rows: Sequence[Row], where: str, *, listener: Listener = silent) -> list[Row]:
    """Select the rows of runs for which a user's SQL expression holds. UsageError for anything but one expression."""
    table = RowTable(columns=COLUMNS, rows=rows)
    return [rows[place] for place in engine.select_rows("runs", table, where, listener=listener)]


def make_tables(paths: Sequence[Path], *, metric: str = DEFAULT_METRIC) -> Tables:
    """Build the tables.

    runs: the columns of `summary.COLUMNS`. settings: `run`, `key`, `value` (as text). evaluations: a row for each, with
    `greedy` (1: the most likely actions), `counts` (1: the run is scored by such) and every score with its interval
    (`return_mean`, `return_low`, `return_high`). metrics: every line of the logs.
    """
    runs = [read_run(path) for path in paths]
    # A log's columns are known from a few of its lines, so that only the query reads all of them.
    logs = [
        read_metrics(path / "metrics.jsonl", stage=stage, points=_NAMES_FROM)
        for path in paths
        for stage in ("train", "evaluate")
    ]
    settings = [
        {"run": str(run.path), "key": key, "value": value if isinstance(value, str) else json.dumps(value, default=str)}
        for run in runs
        for key, value in run.settings.items()
    ]
    return {
        "runs": RowTable(columns=COLUMNS, rows=summarize_runs(paths, metric=metric)),
        "settings": RowTable(columns=dict.fromkeys(("run", "key", "value"), "text"), rows=settings),
        "evaluations": RowTable(columns=_EVALUATIONS, rows=[row for run in runs for row in _evaluations(run)]),
        "metrics": LogTable(
            files=[(str(path), str((path / "metrics.jsonl").absolute())) for path in paths],
            columns=tuple(dict.fromkeys(name for log in logs for name in log.columns)),
        ),
    }


def _evaluations(run: StoredRun) -> Iterator[Row]:
    counting = run.scores.final
    for each in run.evaluations:
        row: Row = {"run": str(run.path), "series": each.series, "env": each.env, "split": each.split}
        greedy = each.standard.greedy
        row |= {"tasks": each.standard.tasks, "greedy": None if greedy is None else int(greedy)}
        row |= {"attempts": each.standard.attempts, "memory": each.standard.memory}
        row |= {"temperature": each.standard.temperature}
        row |= {"counts": int(each in counting), "label": each.label, "update": each.update, "time": each.time}
        row |= {"env_steps": each.env_steps, "seconds": each.seconds}
        for name, value in each.metrics.items():
            if to_number(value) is not None and name not in row:
                row[name] = to_number(value)
            elif name.endswith("_ci95") and isinstance(value, list) and len(value) == 2:
                stem = name.removesuffix("_ci95")
                row |= {f"{stem}_low": to_number(value[0]), f"{stem}_high": to_number(value[1])}
        yield row
