"""`amago runs`: list, query and remove runs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import Common, DryRun, Metric, RunsArgument, lister, reader
from amago_cli.quantities import parse_positive

if TYPE_CHECKING:
    from pipelines.runs.removal import RemovedRun
    from pipelines.stages.result import Result, Table


@lister
def ls(
    common: Common,
    runs: RunsArgument = None,
    where: Annotated[
        str,
        typer.Option("--where", metavar="SQL", help="Only runs for which this holds, e.g. \"state = 'failed'\"."),
    ] = "",
    sort: Annotated[
        str, typer.Option("--sort", metavar="COLUMN", help="Column to sort by; -COLUMN: the largest first.")
    ] = "",
    metric: Metric = "return_mean",
) -> Any:
    """List runs: state, progress, scores, and what differs from the recipe.

    `score` is that of the latest update that was evaluated as the run's own settings say, `best` the highest of such
    scores, both with their 95% intervals. Evaluations in other environments, on other tasks or of another way to act
    do not count; `amago report RUN` lists them. A narrow terminal shows fewer columns. JSON and CSV have all, which
    --where and --sort can use: run, name, recipe, env, state, stage, pid, host, reason, progress, seconds_left, score,
    score_low, score_high, score_update, scored_on, standard, best, best_low, best_high, best_update, evaluations,
    other_evaluations, updates, env_steps, seed, changed, started, age (seconds), bytes, problems.

    Example: amago runs ls --where "score >= 0.5" --sort -score
    """
    from amago_cli.render.output import Rows
    from amago_cli.render.progress import reporter
    from pipelines.runs.summary import COLUMNS, summarize_runs
    from pipelines.runs.tables import select_rows
    from pipelines.stages.result import Result

    rows = summarize_runs(find_named(runs), metric=metric)
    if where:
        with reporter(quiet=common.quiet, verbose=common.verbose) as show:  # Ctrl-C stops it at once
            rows = select_rows(rows, where, listener=show)
    rows = sort_rows(rows, sort)
    if common.invocation.csv:
        return Rows(columns=tuple(COLUMNS), rows=[[row.get(name) for name in COLUMNS] for row in rows])
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return Result(command="runs", metrics={"runs": rows}, tables=(table(rows, width),) if rows else ())


@lister
def sql(
    common: Common,
    query: Annotated[str, typer.Argument(metavar="SQL", help="A read-only query.")],
    runs: RunsArgument = None,
    metric: Metric = "return_mean",
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit.")] = 60.0,
    memory: Annotated[int, typer.Option(metavar="MB", help="Memory limit.")] = 2048,
) -> Any:
    """Query many runs with SQL, read-only.

    Tables: runs (as `amago runs --output csv` shows them); settings (run, key, value); evaluations (run, update,
    env_steps, seconds, every score with its interval: return_mean, return_low, return_high); metrics (run, stage, and
    the numbers of every line of metrics.jsonl; only the columns that the query names are read).

    Example: amago runs sql 'select run, max(return_mean) from evaluations group by run'
    """
    from amago_cli.render.output import Rows
    from amago_cli.render.progress import reporter
    from pipelines.lake.sql.sandbox import QueryLimits
    from pipelines.runs.tables import query as ask

    limits = QueryLimits(seconds=timeout, megabytes=memory, adjustable=True)
    with reporter(quiet=common.quiet, verbose=common.verbose) as show:
        columns, rows = ask(find_named(runs), query, metric=metric, limits=limits, listener=show)
    return Rows(columns=columns, rows=rows)


_Force = Annotated[bool, typer.Option("--force", help="Also remove runs that other runs depend on.")]


@reader
def rm(
    common: Common,
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="Runs, or patterns such as 'runs/maze-*'.", autocompletion=completion.runs
        ),
    ],
    force: _Force = False,
    dry_run: DryRun = False,
) -> Any:
    """Remove runs: their directories with checkpoints, evaluations and lakes.

    All of them, or none: it refuses a run that a process works on (exit 75), one whose lake or policy another run
    uses, and a directory that is not a run. Lakes elsewhere stay as they are.

    Example: amago runs rm runs/cartpole --dry-run
    """
    from pathlib import Path

    from pipelines.errors import UsageError
    from pipelines.runs.find import find_runs, is_pattern
    from pipelines.runs.removal import remove

    paths = []
    for place in runs:
        matches = find_runs([place])
        if not is_pattern(place) and matches != [Path(place)]:
            raise UsageError(f"'{place}' is not a run", hint=f"to remove all runs in it: amago runs rm '{place}/*'")
        paths += [path for path in matches if path not in paths]
    return report_removal("runs rm", remove(paths, force=force, dry_run=dry_run), dry_run=dry_run)


@reader
def prune(
    common: Common,
    runs: RunsArgument = None,
    keep_best: Annotated[
        int,
        typer.Option(
            "--keep-best", metavar="N", parser=parse_positive, help="Runs to keep of each environment, by their score."
        ),
    ] = ...,  # type: ignore[assignment]
    failed: Annotated[bool, typer.Option("--failed", help="Also remove runs that failed without a score.")] = False,
    metric: Metric = "return_mean",
    dry_run: DryRun = False,
) -> Any:
    """Remove all runs but the best of each environment, by their scores as `amago runs` shows them.

    Runs in environments of other parameters, on other tasks or of another way to act are not compared: each such group
    keeps its best.

    Runs that a process works on stay, as do those without a score (except --failed) and those whose lake or policy a
    remaining run uses.

    Example: amago runs prune runs --keep-best 3 --dry-run
    """
    from pipelines.runs.removal import find_contents, find_dependents, find_prunable, remove
    from pipelines.runs.summary import summarize_runs

    chosen = find_prunable(summarize_runs(find_named(runs), metric=metric), keep_best=keep_best, failed=failed)
    kept: dict[Any, list[str]] = {path: [text] for path in chosen if (text := find_contents(path)) is not None}
    chosen = [path for path in chosen if path not in kept]
    while more := {path: reasons for path, reasons in find_dependents(chosen).items() if path not in kept}:
        kept |= more
        chosen = [path for path in chosen if path not in kept]
    return report_removal("runs prune", remove(chosen, dry_run=dry_run), dry_run=dry_run, kept=kept)


_LONGEST_REASON, _MOST_CHANGES = 60, 4
# Columns that a narrow terminal lacks, in the order in which they are left out.
_LEFT_OUT = (
    "scored on",
    "env steps",
    "updates",
    "recipe",
    "best",
    "size",
    "progress",
    "seed",
)


def find_named(places: Sequence[str] | None) -> list[Path]:
    """Find the runs at or below the given places, or in runs/. InputMissing if a place does not exist."""
    from pipelines.runs.find import find_runs

    if not places and not Path("runs").exists():
        return []
    return find_runs(places or ["runs"])


def sort_rows(rows: Sequence[Mapping[str, Any]], column: str) -> list[Any]:
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
    """Build the table of runs to read, with the columns that fit a terminal of `width` (None: all of them)."""
    from pipelines.stages.result import Table

    lines = [_row(row) for row in rows]
    columns = [
        *("run", "recipe", "state", "progress", "score", "random", "scored on", "best"),
        *("env steps", "updates", "seed", "parent", "changed", "age", "size"),
    ]
    if all(row["random_return"] is None for row in rows):
        columns.remove("random")
    if not any(row["parent"] for row in rows):
        columns.remove("parent")

    def is_too_wide() -> bool:
        # Texts of more than 30 characters are folded.
        sizes = [max(min(len(str(text)), 30) for text in (name, *(line[name] for line in lines))) for name in columns]
        return width is not None and sum(sizes) + 2 * (len(sizes) - 1) > width

    left_out = list(_LEFT_OUT)
    while left_out and is_too_wide():
        columns.remove(left_out.pop(0))
    return Table(title="", columns=tuple(columns), rows=[[line[name] for name in columns] for line in lines])


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Format the row of one run, by column."""
    from pipelines.errors import masked
    from pipelines.events import duration

    def format_at(name: str) -> str:
        score, update = _format_score(row[name], row[f"{name}_low"], row[f"{name}_high"]), row[f"{name}_update"]
        return f"{score} at {update:,}" if score and update is not None else score

    if row["state"] == "running":
        state = f"running ({row['stage']}, pid {row['pid']} on {row['host']})"
    else:
        reason = masked(row["reason"])
        reason = f"{reason[:_LONGEST_REASON]}..." if len(reason) > _LONGEST_REASON else reason
        state = f"{row['state']}: {reason}" if reason else row["state"]
    progress = ""
    if row["progress"] is not None:
        left = row["seconds_left"]
        progress = f"{row['progress']:.0%}" + (f", {duration(left)} left" if left is not None else "")
    scored_on = str(row["scored_on"])
    if not scored_on and row["evaluations"]:
        scored_on = f"({row['evaluations']} on other tasks or in other environments)"
    changes = row["changed"].split(", ")
    more = len(changes) - _MOST_CHANGES
    units = (("d", 86_400), ("h", 3600), ("m", 60))
    unit, length = next(((unit, length) for unit, length in units if row["age"] >= 2 * length), ("s", 1))
    return {
        "run": row["run"],
        "recipe": row["recipe"] or row["env"],
        "state": state,
        "progress": progress,
        "score": format_at("score"),
        "random": _format_score(row["random_return"], None, None),
        "scored on": scored_on,
        "best": "" if row["best_update"] == row["score_update"] else format_at("best"),
        "env steps": row["env_steps"],
        "updates": row["updates"],
        "seed": row["seed"],
        "parent": row["parent"],
        "changed": ", ".join(changes[:_MOST_CHANGES]) + (f" and {more} more" if more > 0 else ""),
        "age": f"{int(row['age'] // length)}{unit}",
        "size": _format_bytes(row["bytes"]),
    }


def _format_score(value: float | None, low: float | None, high: float | None) -> str:
    """Format a score and its interval: `0.912 [0.87, 0.95]`."""
    if value is None:
        return ""
    return f"{value:.4g}" if low is None or high is None else f"{value:.4g} [{low:.3g}, {high:.3g}]"


def _format_bytes(count: float) -> str:
    """Format a number of bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def report_removal(
    command: str, removed: Sequence[RemovedRun], *, dry_run: bool, kept: Mapping[Path, Sequence[str]] | None = None
) -> Result:
    """Report which runs were removed, how much space this freed, and which had to stay."""
    from pipelines.stages.result import Result, Table

    freed = sum(run.bytes for run in removed)
    verb = "would free" if dry_run else "freed"
    tables = []
    if removed:
        title = f"{verb} {_format_bytes(freed)} in {len(removed)} run{'s' if len(removed) > 1 else ''}"
        listed = [[run.path, _format_bytes(run.bytes)] for run in removed]
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
