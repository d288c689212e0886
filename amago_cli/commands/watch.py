"""`amago watch`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from amago_cli.options import Common, Environment, EvaluatedCheckpoint, EvaluationSeed, Greedy, RunArgument, stage


@stage
def watch(
    common: Common,
    run: RunArgument,
    env: Environment = None,
    episode: Annotated[
        int,
        typer.Option("--episode", metavar="N", min=0, max=2**31 - 1, help="Number of the evaluation episode to play."),
    ] = 0,
    speed: Annotated[float, typer.Option("--speed", metavar="X", min=0.01, help="Steps per second.")] = 5.0,
    checkpoint: EvaluatedCheckpoint = None,
    greedy: Greedy = None,
    seed: EvaluationSeed = None,
) -> Any:
    """Play an episode of a run's policy in the terminal, step by step, with rewards and the agent's values.

    Environments without a drawing of their own in text are shown in coloured blocks. Where the output is not a
    terminal, the frames are printed one after another.

    Example: amago watch runs/quickstart --speed 10
    """
    from amago_cli.configuration import Request, preview
    from amago_cli.render.animation import animation
    from pipelines.config.changes import refuse_unused
    from pipelines.config.run_directory import RunDirectory

    common.concerns(run=run)
    request = Request(common, common.named)
    settings = request.settings(RunDirectory.open(run).load_document())
    refuse_unused("evaluate", request.keys)
    if common.dry_run:
        return preview(common, settings, writes={})
    colors = sys.__stdout__ is not None and sys.__stdout__.isatty()
    with common.listening() as listener:
        from pipelines.stages import filming

        watched = filming.watch(settings, run=run, episode=episode, colors=colors, listener=listener)
    return animation(watched, episode=episode, speed=speed)
