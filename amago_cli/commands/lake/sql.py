"""`amago lake sql`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from amago_cli.options import Common, LakeArgument, reader


@reader
def sql(
    common: Common,
    lake: LakeArgument,
    query: Annotated[str, typer.Argument(metavar="SQL", help="A query; nothing can be changed by it.")],
) -> Any:
    """Ask a lake in SQL, read-only.

    Tables: trajectories, segments, overlays, steps; in a run also runs, checkpoints, metrics.

    Example: amago lake sql runs/cartpole 'select policy_version, avg(return) from trajectories group by all'
    """
    from amago_cli.output import Rows
    from pipelines.lake import catalog
    from pipelines.lake.store import Lake

    opened = Lake.open(lake)
    common.concerns(lake=opened.name)
    columns, rows = catalog.query(opened, query)
    return Rows(columns=columns, rows=rows)
