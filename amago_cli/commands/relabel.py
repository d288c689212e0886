"""`amago relabel`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from amago_cli.options import Common, FromLake, Seed, stage


@stage
def relabel(
    common: Common,
    from_lake: FromLake = None,
    relabeler: Annotated[
        str | None, typer.Option("--with", metavar="NAME", help="Relabeler: hindsight, or module:attr.")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option("--strategy", metavar="NAME", help="How goals are chosen; hindsight: final, future, random."),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option("--where", metavar="SQL", help="Which trajectories: a predicate over the table."),
    ] = None,
    fraction: Annotated[
        float | None, typer.Option("--fraction", metavar="X", help="Share of those to relabel, in (0, 1].")
    ] = None,
    copies: Annotated[
        int | None, typer.Option("--copies", metavar="K", help="Relabelled versions of each trajectory.")
    ] = None,
    seed: Seed = None,
) -> Any:
    """Derive new goals and rewards in hindsight, as an overlay that copies no observation.

    Example: amago relabel --from-lake runs/reach --with hindsight --strategy future --copies 4
    """
    from amago_cli.configuration import Request, preview, stored
    from amago_cli.lakes import directory, locate, only

    named = {
        "relabel.relabeler": relabeler,
        "relabel.strategy": strategy,
        "relabel.where": where,
        "relabel.fraction": fraction,
        "relabel.copies": copies,
        "seed": seed,
    }
    source = only(from_lake)
    settings = Request(common, named).settings(stored(directory(source)))
    lake = locate(source)
    common.concerns(lake=lake)
    if common.dry_run:
        return preview(common, settings, writes={"overlay": lake})
    with common.listening() as listener:
        from pipelines.stages import relabel as engine

        return engine.run(settings, lake=lake, listener=listener)
