"""`amago lake sql`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from amago_cli.options import Common, LakeArgument, querier


@querier
def sql(
    common: Common,
    lake: LakeArgument,
    query: Annotated[str, typer.Argument(metavar="SQL", help="A read-only query.")],
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="Write the rows there, with --output arrow, parquet or csv."),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit.")] = 60.0,
    memory: Annotated[int, typer.Option(metavar="MB", help="Memory limit.")] = 1024,
) -> Any:
    """Query a lake with SQL, read-only.

    Tables: trajectories, episodes, histories, segments, overlays, steps, lineage, collectors; for a run's lake also
    runs, checkpoints, metrics. Only the columns of `steps` that the query needs are read; wide ones (images) must be
    named explicitly.

    With --output arrow, parquet or csv, the rows are a file, for --to or a pipe. They are written while the query runs,
    and may be more than the memory holds. In CSV, lists, maps and structures are JSON.

    Example: amago lake sql runs/cartpole 'select policy_version, avg(return) from trajectories group by all'
    """
    from amago_cli.render.output import FileContent, Rows
    from amago_cli.render.progress import reporter
    from pipelines.errors import UsageError
    from pipelines.files.atomic import explain_errors, write_atomically
    from pipelines.lake.sql import catalog
    from pipelines.lake.sql.sandbox import QueryLimits
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result

    form = common.output.value
    if to is not None and form in ("text", "json"):
        raise UsageError(f"--to writes columns, not --output {form}", hint="add --output parquet, arrow or csv")
    if to is None and form in ("arrow", "parquet") and common.has_terminal:
        raise UsageError(f"--output {form} is not for a terminal", hint="name a file with --to, or a pipe")
    opened = Lake(lake)
    common.concerns(lake=opened.name)
    limits = QueryLimits(seconds=timeout, megabytes=memory, adjustable=True)
    with reporter(quiet=common.quiet, verbose=common.verbose) as show:  # Ctrl-C stops it at once
        if form in ("text", "json"):
            columns, rows = catalog.query(opened, query, limits=limits, listener=show)
            return Rows(columns=columns, rows=rows)
        from pipelines.lake.sql.columnar import write_file

        count = 0

        def write(file: BinaryIO) -> None:
            nonlocal count
            count = write_file(opened, query, file, form, limits=limits, listener=show)

        if to is not None:
            write_atomically(to, write)
        else:
            # The reader of a pipe gets the whole answer or, after an error, nothing, and a slow one does not use up the
            # time limit. This costs as many bytes on the disk.
            with explain_errors(f"write a temporary file in '{tempfile.gettempdir()}'"):
                file = tempfile.TemporaryFile()  # noqa: SIM115
                write(file)
            return FileContent(file=file)
    metrics = {"rows": count, "bytes": to.stat().st_size}
    seconds = common.invocation.seconds
    return Result(command="lake sql", lake=opened.name, metrics=metrics, outputs=[to], seconds=seconds)
