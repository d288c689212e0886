"""`amago relabel`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from amago_cli.options import Common, FromLake, Seed, Sets, stage


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
            "scale:X, clip:LOW..HIGH, return:GAMMA, task:NAME, label:POLICY, column:NAME:TYPE=SQL, or module:attr; "
            "repeatable, applied in order.",
        ),
        Sets("relabel.relabeler"),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option("--strategy", metavar="ARG", help="ARG of hindsight, if --with does not give it."),
        Sets("relabel.strategy"),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option("--where", metavar="SQL", help="Relabel only trajectories that match this predicate."),
        Sets("relabel.where"),
    ] = None,
    fraction: Annotated[
        float | None,
        typer.Option("--fraction", metavar="X", help="Fraction of them to relabel, in (0, 1]."),
        Sets("relabel.fraction"),
    ] = None,
    copies: Annotated[
        int | None,
        typer.Option("--copies", metavar="K", help="Relabelled versions per trajectory."),
        Sets("relabel.copies"),
    ] = None,
    seed: Seed = None,
) -> Any:
    """Derive new goals, rewards or labels, as an overlay that does not copy observations.

    column:NAME:TYPE=SQL adds an observation column to trajectories of an environment that did not show it yet, so that
    they can be trained on together with those of one that does. TYPE is float32, float32[3], uint8[8,8,3], discrete[5],
    discrete[3,4] or binary[4].

    Example: amago relabel --from-lake runs/maze --with instruction:some --with clip:0..1 --copies 4

    Example: amago relabel --from-lake runs/maze --with 'column:obs.wind:float32[2]=0'
    """
    from amago_cli.configuration import Request, load_stored, preview
    from pipelines.config.changes import refuse_unused
    from pipelines.errors import UsageError
    from pipelines.lake.storage import is_remote
    from pipelines.lake.store import Lake

    if not from_lake:
        raise UsageError("no lake given", hint="give --from-lake LAKE, e.g. --from-lake runs/cartpole")
    if len(from_lake) > 1:
        raise UsageError(f"--from-lake was given {len(from_lake)} times", hint="give one lake")
    [source], request = from_lake, Request(common, common.named)
    refuse_unused("relabel", request.keys)
    settings = request.settings({} if is_remote(source) else load_stored(Path(source)))
    lake = Lake(source).name
    common.concerns(lake=lake)
    if common.dry_run:
        return preview(common, settings, writes={"overlay": lake})
    with common.listening() as listener:
        from pipelines.stages import relabel as engine

        return engine.run(settings, lake=lake, listener=listener)
