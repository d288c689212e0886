"""Runs named on the command line, and tables of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.runs.removal import RemovedRun
    from pipelines.stages.result import Result, Table

_LONGEST_REASON, _MOST_CHANGES = 60, 4
_LEFT_OUT = (
    "scored on",
    "env steps",
    "updates",
    "recipe",
    "best",
    "size",
    "progress",
    "seed",
)  # in a narrow terminal, in this order


def found(places: Sequence[str] | None) -> list[Path]:
    """Return the runs at or below the given places, or in runs/. InputMissing if a place does not exist."""
    from pipelines.runs.find import find_runs

    if not places and not Path("runs").exists():
        return []
    return find_runs(places or ["runs"])


def ordered(rows: Sequence[Mapping[str, Any]], column: str) -> list[Any]:
    """Sort rows by `column`, or in falling order by `-column`; rows without a value come last."""
    from pipelines.errors import UsageError
    from pipelines.nearest import did_you_mean
    from pipelines.runs.summary import COLUMNS

    if not column:
        return list(rows)
    name = column.removeprefix("-")
    if name not in COLUMNS:
        known = f"known: {', '.join(COLUMNS)}"
        raise UsageError(f"no column '{name}' to sort by", hint=did_you_mean(name, COLUMNS, otherwise=known))
    present = [row for row in rows if row.get(name) is not None]
    absent = [row for row in rows if row.get(name) is None]
    return sorted(present, key=lambda row: row[name], reverse=column.startswith("-")) + absent


def table(rows: Sequence[Mapping[str, Any]], width: int | None = None) -> Table:
    """Return the rows of runs as a table for people, with the columns that fit a terminal of `width`."""
    from pipelines.stages.result import Table

    columns: tuple[str, ...] = (
        *("run", "recipe", "state", "progress", "score", "scored on", "best"),
        *("env steps", "updates", "seed", "changed", "age"),
    )
    shown = [
        [
            row["run"],
            row["recipe"] or row["env"],
            _state(row),
            _progress(row),
            _at(interval(row["score"], row["score_low"], row["score_high"]), row["score_update"]),
            _scored_on(row),
            _best(row),
            row["env_steps"],
            row["updates"],
            row["seed"],
            _changed(row["changed"]),
            age(row["age"]),
            size(row["bytes"]),
        ]
        for row in rows
    ]
    columns = (*columns, "size")
    if any(row["random_return"] is not None for row in rows):
        place = columns.index("score") + 1
        columns = (*columns[:place], "random", *columns[place:])
        for line, row in zip(shown, rows, strict=True):
            line.insert(place, interval(row["random_return"], None, None))
    if any(row["parent"] for row in rows):
        place = columns.index("changed")
        columns = (*columns[:place], "parent", *columns[place:])
        for line, row in zip(shown, rows, strict=True):
            line.insert(place, row["parent"])
    return _fitting(Table(title="", columns=columns, rows=shown), width)


def _fitting(table: Table, width: int | None) -> Table:
    from dataclasses import replace

    left_out = list(_LEFT_OUT)
    while width is not None and left_out and _width(table) > width:
        place = list(table.columns).index(left_out.pop(0))
        columns = [name for number, name in enumerate(table.columns) if number != place]
        rows = [[value for number, value in enumerate(row) if number != place] for row in table.rows]
        table = replace(table, columns=columns, rows=rows)
    return table


def _width(table: Table) -> int:
    """Return the width of a table whose texts of more than 30 characters are folded."""
    lines = [table.columns, *table.rows]
    return sum(2 + max(min(len(str(line[place])), 30) for line in lines) for place in range(len(table.columns))) - 2


def interval(value: float | None, low: float | None, high: float | None) -> str:
    """Format a score and its interval: `0.912 [0.87, 0.95]`."""
    if value is None:
        return ""
    return f"{value:.4g}" if low is None or high is None else f"{value:.4g} [{low:.3g}, {high:.3g}]"


def size(count: float) -> str:
    """Format a number of bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def age(seconds: float) -> str:
    """Format an age in one unit."""
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)}{unit}"
    return f"{int(seconds)}s"


def removal(
    command: str, removed: Sequence[RemovedRun], *, dry_run: bool, kept: Mapping[Path, Sequence[str]] | None = None
) -> Result:
    """Return the result of removing runs: which, what this freed, and which had to stay."""
    from pipelines.stages.result import Result, Table

    freed = sum(run.bytes for run in removed)
    verb = "would free" if dry_run else "freed"
    tables = []
    if removed:
        title = f"{verb} {size(freed)} in {len(removed)} run{'s' if len(removed) > 1 else ''}"
        listed = [[run.path, size(run.bytes)] for run in removed]
        tables.append(Table(title=title, columns=("run", "size"), rows=listed))
    if kept:
        rows = [[path, "; ".join(reasons)] for path, reasons in kept.items()]
        tables.append(Table(title="kept, because other runs depend on them", columns=("run", "why"), rows=rows))
    metrics = {
        "removed": [{"run": str(run.path), "bytes": run.bytes} for run in removed],
        "bytes": freed,
        "kept": [str(path) for path in kept or ()],
    }
    status = "skipped" if dry_run or not removed else "done"
    return Result(command=command, status=status, metrics=metrics, tables=tables)


def _state(row: Mapping[str, Any]) -> str:
    if row["state"] == "running":
        return f"running ({row['stage']}, pid {row['pid']} on {row['host']})"
    from pipelines.errors import masked

    reason = masked(row["reason"])
    if len(reason) > _LONGEST_REASON:
        reason = f"{reason[:_LONGEST_REASON]}..."
    return f"{row['state']}: {reason}" if reason else row["state"]


def _progress(row: Mapping[str, Any]) -> str:
    from pipelines.events import duration

    if row["progress"] is None:
        return ""
    left = row["seconds_left"]
    return f"{row['progress']:.0%}" + (f", {duration(left)} left" if left is not None else "")


def _at(score: str, update: int | None) -> str:
    return f"{score} at {update:,}" if score and update is not None else score


def _scored_on(row: Mapping[str, Any]) -> str:
    """Say what the score belongs to, or that there are evaluations which do not count."""
    if row["scored_on"] or not row["evaluations"]:
        return str(row["scored_on"])
    return f"({row['evaluations']} on other tasks or in other environments)"


def _best(row: Mapping[str, Any]) -> str:
    """Show the best score if it is not the last one."""
    if row["best_update"] == row["score_update"]:
        return ""
    return _at(interval(row["best"], row["best_low"], row["best_high"]), row["best_update"])


def _changed(text: str) -> str:
    parts = text.split(", ")
    more = len(parts) - _MOST_CHANGES
    return ", ".join(parts[:_MOST_CHANGES]) + (f" and {more} more" if more > 0 else "")
