"""`amago runs ls`."""

from __future__ import annotations

import shutil
import sys
from typing import Annotated, Any

import typer

from amago_cli.options import Common, Metric, RunsArgument, lister
from amago_cli.runs import find_named, sort_rows


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
    from amago_cli.runs import table
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
