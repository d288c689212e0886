"""`amago lake copy` and `amago lake merge`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import Common, reader

if TYPE_CHECKING:
    from pipelines.stages.result import Result

Where = Annotated[str, typer.Option("--where", metavar="SQL", help="Copy only trajectories that match this predicate.")]


@reader
def copy(
    common: Common,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="A lake, a run, or s3://bucket/prefix (gs://, az://).", autocompletion=completion.lakes
        ),
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help="Lake to add to; created if missing.")],
    where: Where = "",
) -> Any:
    """Copy the trajectories of a lake into another one, without duplicates.

    Segments are copied unchanged, under the same names, and verified before they count; if only some of their
    trajectories are selected or missing in DST, these are written to new segments. A relabelled trajectory whose base
    is not in DST is written out in full. Trajectories that expired in DST are not copied again. Repeating the command
    copies what is missing. Exit 4 if SRC is damaged: the intact rest is copied.

    Example: amago lake copy runs/a s3://bucket/lake --where success
    """
    return _copy(common, [source], target, where, "lake copy")


@reader
def merge(
    common: Common,
    sources: Annotated[
        list[str], typer.Argument(metavar="SRC", help="Lakes or runs.", autocompletion=completion.lakes)
    ],
    into: Annotated[str, typer.Option("--into", metavar="DST", help="Lake to add to; created if missing.")],
    where: Where = "",
) -> Any:
    """Copy the trajectories of several lakes into one, as `amago lake copy` does; the sources are not changed.

    Example: amago lake merge runs/a runs/b --into lakes/all
    """
    return _copy(common, sources, into, where, "lake merge")


def _copy(common: Common, sources: Sequence[str], target: str, where: str, command: str) -> Result:
    from pipelines.errors import IntegrityError
    from pipelines.lake.maintenance import copying
    from pipelines.lake.sql.describing import find_duplicates
    from pipelines.lake.sql.selection import select
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result, Table

    opened = [Lake(source) for source in sources]
    for lake in opened:
        copying.refuse_nested(lake, target)
    if where.strip() and Lake.find(target) is None:
        for lake in opened:
            select(lake, where)  # a mistake in it must not leave an empty lake behind
    into = Lake.open_or_create(target)
    common.concerns(lake=into.name)
    with common.listening() as listener:
        done = [asdict(copying.copy(lake, into, where=where, listener=listener)) for lake in opened]
        if any(each["trajectories"] for each in done):
            for each in find_duplicates([into]):
                listener(each.as_notice())
    damaged = [id for each in done for id in each.pop("damaged")]
    total = {name: sum(each[name] for each in done) for name in done[0]}
    columns = ("trajectories", "steps", "segments", "rewritten", "present", "bytes")
    result = Result(
        command=command,
        status="done" if total["trajectories"] else "skipped",
        lake=into.name,
        metrics={**{name: total[name] for name in columns}, "damaged": damaged},
        tables=[
            Table(
                title="copied",
                columns=("from", *columns),
                rows=[(lake.name, *(each[name] for name in columns)) for lake, each in zip(opened, done, strict=True)],
            )
        ]
        if len(done) > 1
        else [],
        seconds=common.invocation.seconds,
    )
    if damaged:
        error = IntegrityError(
            f"damaged segments: {', '.join(damaged)}; their intact trajectories are in '{into.name}'",
            hint="see amago lake verify on the source",
        )
        error.result = result
        raise error
    return result
