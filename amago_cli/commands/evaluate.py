"""`amago evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from amago_cli.options import (
    Common,
    EngineOption,
    Environment,
    EnvTimeout,
    EvaluatedCheckpoint,
    EvaluationSeed,
    Greedy,
    RayOption,
    RunArgument,
    Sets,
    Track,
    stage,
)
from amago_cli.quantities import count


@stage
def evaluate(
    common: Common,
    run: RunArgument,
    env: Environment = None,
    episodes: Annotated[
        int | None,
        typer.Option("--episodes", metavar="N", parser=count, help="Number of complete episodes to play."),
        Sets("evaluate.episodes"),
    ] = None,
    checkpoint: EvaluatedCheckpoint = None,
    greedy: Greedy = None,
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", metavar="SQL", help="Play the tasks of the run's trajectories that match."),
        Sets("evaluate.tasks"),
    ] = None,
    require: Annotated[
        str | None,
        typer.Option("--require", metavar="GATE", help="Exit 5 unless this holds, e.g. 'return_mean >= 0.9'."),
        Sets("evaluate.require"),
    ] = None,
    video: Annotated[
        int | None,
        typer.Option("--video", metavar="N", help="Write videos of the first N episodes."),
        Sets("evaluate.video"),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Directory for videos instead of RUN/videos.")
    ] = None,
    evaluators: Annotated[
        int | None,
        typer.Option("--evaluators", metavar="N", help="Processes that share the episodes; the result is the same."),
        Sets("evaluate.evaluators"),
    ] = None,
    engine: EngineOption = None,
    ray: RayOption = None,
    track: Track = None,
    env_timeout: EnvTimeout = None,
    seed: EvaluationSeed = None,
) -> Any:
    """Evaluate a run's policy on held-out tasks, with confidence intervals and an adaptation curve.

    --tasks plays tasks from the run's lakes in turn instead and reports each one, e.g. --tasks "not success"; this
    works for environments whose tasks have names.

    --evaluators N shares the episodes among N processes: each plays the same episodes as it would alone.

    --video N plays the first N episodes once more and writes them as MP4, or as GIF without the extra `video`.

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
        from pipelines.stages import evaluate as stages

        return stages.run(settings, run=run, videos=to, listener=listener)
