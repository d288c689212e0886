"""`amago lake sql`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from amago_cli.options import Common, LakeArgument, reader


@reader
def sql(
    common: Common,
    lake: LakeArgument,
    query: Annotated[str, typer.Argument(metavar="SQL", help="A read-only query.")],
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit.")] = 60.0,
    memory: Annotated[int, typer.Option(metavar="MB", help="Memory limit.")] = 1024,
) -> Any:
    """Query a lake with SQL, read-only.

    Tables: trajectories, episodes, histories, segments, overlays, steps, lineage, collectors; for a run's lake also
    runs, checkpoints, metrics. Only the columns of `steps` that the query needs are read; wide ones (images) must be
    named explicitly.

    Example: amago lake sql runs/cartpole 'select policy_version, avg(return) from trajectories group by all'
    """
    from amago_cli.render.output import Rows
    from amago_cli.render.progress import reporter
    from pipelines.lake.sql import catalog
    from pipelines.lake.sql.sandbox import QueryLimits
    from pipelines.lake.store import Lake

    opened = Lake(lake)
    common.concerns(lake=opened.name)
    limits = QueryLimits(seconds=timeout, megabytes=memory, adjustable=True)
    with reporter(quiet=common.quiet, verbose=common.verbose) as show:  # Ctrl-C stops it at once
        columns, rows = catalog.query(opened, query, limits=limits, listener=show)
    return Rows(columns=columns, rows=rows)
