"""`amago train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from amago_cli.options import Common, Fresh, FromLake, RunOption, Seed, Sets, Size, stage
from amago_cli.quantities import count


@stage
def train(
    common: Common,
    from_lake: FromLake = None,
    run: RunOption = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", metavar="N", parser=count, help="Gradient updates in all, e.g. 20k."),
        Sets("train.steps"),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            "--agent", metavar="NAME", help="What is learned: actor-critic, multi-task, behaviour-cloning, module:attr."
        ),
        Sets("agent.kind"),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(
            "--encoder",
            metavar="NAME",
            help="Sequence encoder: transformer, gru, mingru, mamba, feedforward, identity, module:attr.",
        ),
        Sets("agent.sequence.kind"),
    ] = None,
    size: Size = None,
    where: Annotated[
        str | None,
        typer.Option("--where", metavar="SQL", help="Which trajectories: a predicate over the table."),
        Sets("train.where"),
    ] = None,
    weight: Annotated[
        str | None,
        typer.Option("--weight", metavar="SQL", help="How often a trajectory is drawn: an expression over the table."),
        Sets("train.weight"),
    ] = None,
    follow: Annotated[
        bool | None,
        typer.Option("--follow/--no-follow", help="Keep taking in what collectors add; wait for the first of it."),
        Sets("train.follow"),
    ] = None,
    seed: Seed = None,
    fresh: Fresh = False,
) -> Any:
    """Train an agent on windows drawn from a lake, or from several.

    The run is the one the lake belongs to, else runs/train, unless --run names another. Repeating the command
    resumes from the newest checkpoint; with a larger --steps it trains longer. --where and --weight are SQL over the
    lake's table of trajectories: see amago lake sql.

    Several lakes are mixed by weights, LAKE:WEIGHT, which may move over train.anneal_steps updates, LAKE:0.8..0.2.
    Without --from-lake they are those of train.lakes.

    Example: amago train --from-lake runs/gym-CartPole-v1 --steps 1000

    Example: amago train --from-lake runs/a:0.8 --from-lake runs/b:0.2 --run runs/c --where "success or length > 20"
    """
    from amago_cli.configuration import Request, preview, stored
    from amago_cli.lakes import directory, locate, shares
    from pipelines.config.lakes import parse_share
    from pipelines.config.places import is_run
    from pipelines.config.run_directory import RunDirectory

    source = directory(parse_share(from_lake[0])[0]) if from_lake else None
    if run is None:
        run = source if source is not None and len(from_lake or ()) == 1 and is_run(source) else Path("runs") / "train"
    request, base = Request(common, common.named), stored(run) or stored(source)
    settings = request.settings(base)
    lakes = shares(from_lake or settings.train.lakes, run)
    common.concerns(run=run, lake=", ".join(str(place) for place, _, _ in lakes))
    if common.dry_run:
        if not settings.train.follow:
            for place, _, _ in lakes:
                locate(place)
        settings = request.fitted(run, base)
        return preview(common, settings, writes={"run": run, "checkpoints": run / "checkpoints"})
    with common.listening() as listener:
        settings = request.fitted(run, base, listener=listener)
        RunDirectory(run).refuse_changes("train", settings, fresh=fresh, undecided=True)  # before torch is imported
        from pipelines.stages import train as engine

        return engine.run(settings, run=run, lakes=lakes, listener=listener, fresh=fresh)
