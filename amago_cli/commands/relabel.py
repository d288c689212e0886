"""`amago relabel`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from amago_cli.options import Common, FromLake, Seed, stage


@stage
def relabel(
    common: Common,
    from_lake: FromLake = None,
    relabelers: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="NAME[:ARG]",
            help="hindsight:future|final|random, instruction:some|all, reward:SQL, reward:module:attr, success:SQL, "
            "scale:X, clip:LOW..HIGH, return:GAMMA, task:NAME, or module:attr; repeat it: one after the other.",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option("--strategy", metavar="ARG", help="The ARG of hindsight, where --with does not give it."),
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

    Example: amago relabel --from-lake runs/maze --with instruction:some --with clip:0..1 --copies 4
    """
    from amago_cli.configuration import Request, preview, stored
    from amago_cli.lakes import directory, locate, only

    named = {
        "relabel.relabeler": relabelers or None,
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
