"""`amago evaluate`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from amago_cli.options import CHECKPOINT, Common, Environment, EnvTimeout, RunArgument, Sets, stage
from amago_cli.quantities import count


@stage
def evaluate(
    common: Common,
    run: RunArgument,
    env: Environment = None,
    episodes: Annotated[
        int | None,
        typer.Option("--episodes", metavar="N", parser=count, help="Whole episodes, every one counted."),
        Sets("evaluate.episodes"),
    ] = None,
    checkpoint: Annotated[str | None, CHECKPOINT, Sets("evaluate.checkpoint")] = None,
    greedy: Annotated[
        bool | None,
        typer.Option("--greedy/--sample", help="The policy's likeliest action, or a sampled one."),
        Sets("evaluate.greedy"),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", metavar="SQL", help="Only tasks of the run's trajectories for which this holds."),
        Sets("evaluate.tasks"),
    ] = None,
    require: Annotated[
        str | None,
        typer.Option("--require", metavar="GATE", help="Exit 5 unless it holds, e.g. 'return_mean >= 0.9'."),
        Sets("evaluate.require"),
    ] = None,
    env_timeout: EnvTimeout = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Seed of the evaluation's tasks."), Sets("evaluate.seed")
    ] = None,
) -> Any:
    """Judge a run's policy on held-out tasks, with confidence intervals and an adaptation curve.

    With --tasks, tasks that are in the run's lakes are played instead, in turn, and each is told apart, e.g.
    --tasks "not success"; this is for environments whose tasks have names.

    Example: amago evaluate runs/quickstart --episodes 500 --require 'success_mean >= 0.5'
    """
    from amago_cli.configuration import Request, preview
    from pipelines.config.run_directory import RunDirectory

    common.concerns(run=run)
    directory = RunDirectory.open(run)
    settings = Request(common, common.named).settings(directory.load_document())
    if common.dry_run:
        return preview(common, settings, writes={"evaluation": directory.evaluations})
    with common.listening() as listener:
        from pipelines.stages import evaluate as engine

        return engine.run(settings, run=run, listener=listener)
