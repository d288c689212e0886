"""`amago runs sql`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from amago_cli.options import Common, Metric, RunsArgument, lister
from amago_cli.runs import find_named


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
