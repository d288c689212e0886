"""`amago evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import (
    OPPONENTS,
    Common,
    EngineOption,
    Environment,
    EnvTimeout,
    EvaluatedCheckpoint,
    EvaluationSeed,
    Greedy,
    RayOption,
    Sets,
    Track,
    stage,
)
from amago_cli.quantities import parse_count

if TYPE_CHECKING:
    from pipelines.config.settings import Settings


@stage
def evaluate(
    common: Common,
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|BUNDLE",
            help="A run, e.g. runs/quickstart; an exported policy, zoo:NAME, hf://ORG/NAME or amago:PATH.",
            autocompletion=completion.runs_and_bundles,
        ),
    ],
    env: Environment = None,
    episodes: Annotated[
        int | None,
        typer.Option("--episodes", metavar="N", parser=parse_count, help="Number of complete episodes to play."),
        Sets("evaluate.episodes"),
    ] = None,
    attempts: Annotated[
        int | None,
        typer.Option("--attempts", metavar="N", help="Play each episode N times, without clearing the agent's memory."),
        Sets("evaluate.attempts"),
    ] = None,
    checkpoint: EvaluatedCheckpoint = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Evaluate each new checkpoint of a run, until its training has ended."),
    ] = False,
    greedy: Greedy = None,
    opponents: Annotated[list[str] | None, OPPONENTS, Sets("evaluate.opponents")] = None,
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", metavar="SQL", help="Play the tasks of the run's trajectories that match."),
        Sets("evaluate.tasks"),
    ] = None,
    tournament: Annotated[
        bool,
        typer.Option(
            "--tournament", help="Play a game's policy and --opponents against each other, and rate them by Elo."
        ),
    ] = False,
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
        Path | None,
        typer.Option(
            "--to",
            metavar="DIR",
            help="Directory for videos instead of RUN/videos; of a bundle, also for the result.",
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option("--form", metavar="FORM", help="Form of a bundle that acts: weights, onnx, torch, aoti."),
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
    """Evaluate a policy on held-out tasks, with confidence intervals and an adaptation curve.

    A bundle plays in the environment that it was trained in, unless --env names another of the same spaces. Its result
    is printed; --to DIR writes it, too. Nothing in a bundle is executed.

    --tasks plays tasks from the run's lakes in turn instead and reports each one, e.g. --tasks "not success"; this
    works for environments whose tasks have names.

    --evaluators N shares the episodes among N processes: each plays the same episodes as it would alone.

    --follow evaluates the newest checkpoint of a run that another process trains, whenever there is another, and ends
    with the training; --require and --video apply to the last one.

    --tournament plays RUN and all --opponents against each other, --episodes games in each pairing, in all seats. It
    rates them by Elo with 95% intervals: maximum likelihood, a draw is half a win.

    --video N plays the first N episodes once more and writes them as MP4, or as GIF without the extra `video`.

    Example: amago evaluate runs/quickstart --episodes 500 --require 'success_mean >= 0.5'
    """
    from amago_cli.configuration import Request, preview, refuse_idle_engine
    from pipelines.config.changes import refuse_unused
    from pipelines.config.places import AMAGO, find_bundle, is_run
    from pipelines.config.policy_files import locate_checkpoint
    from pipelines.config.run_directory import RunDirectory
    from pipelines.errors import UsageError
    from pipelines.evaluation import gate

    def resolve_checked(document: dict[str, Any]) -> Settings:
        settings = request.settings(document)
        refuse_idle_engine(settings, request.keys, processes=settings.evaluate.evaluators, option="--evaluators")
        gate.parse(settings.evaluate.require)
        return settings

    request, run = Request(common, common.named), Path(source)
    refuse_unused("evaluate", request.keys)
    is_file = source.startswith(AMAGO)
    packed = None if is_run(run) or is_file else find_bundle(source)
    if tournament and (follow or form is not None):
        raise UsageError("--tournament does not go with --follow or --form", hint="leave out one of them")
    if tournament and (track or env_timeout is not None):
        raise UsageError(
            "a tournament is not tracked and has no time limit", hint="leave out --track and --env-timeout"
        )
    if is_file and (follow or checkpoint is not None or form is not None or tournament):
        raise UsageError(f"'{source}' is one policy", hint="leave out --follow, --checkpoint, --form and --tournament")
    if is_file:
        common.concerns()
        settings = resolve_checked({})
        if common.dry_run:
            return preview(common, settings, writes={"evaluation": to} if to else {})
        with common.listening() as listener:
            from pipelines.stages.evaluate import run_amago

            return run_amago(settings, name=source, to=to, listener=listener)
    if follow and packed is not None:
        raise UsageError(f"--follow evaluates a run as it is trained, and '{source}' is a bundle", hint="leave it out")
    if follow and checkpoint is not None:
        raise UsageError("--follow evaluates new checkpoints, --checkpoint a given one", hint="leave out one of them")
    if packed is not None:
        from pipelines.stages import early_checks

        common.concerns()
        settings, form = resolve_checked(early_checks.read_bundle_document(packed)), form or early_checks.WEIGHTS
        if not tournament:
            early_checks.refuse_run_settings(settings, packed, form=form, to=to)
        if common.dry_run:
            return preview(common, settings, writes={"evaluation": to} if to else {})
        with common.listening() as listener:
            if tournament:
                from pipelines.stages import tournament as tournaments

                return tournaments.run(settings, source=source, directory=None, to=to, listener=listener)
            from pipelines.stages.evaluate import run_bundle

            return run_bundle(
                settings,
                directory=packed,
                form=form,
                to=to,
                trusted=common.trust,
                listener=listener,
            )
    common.concerns(run=run)
    directory = RunDirectory.open(run)
    if form is not None:
        raise UsageError(f"--form chooses a form of a bundle, and '{run}' is a run", hint="see amago export --format")
    settings = resolve_checked(directory.load_document())
    if tournament and to is not None:
        raise UsageError("--to is for a bundle; a run keeps its tournaments itself", hint="leave it out")
    if to is not None and not settings.evaluate.video:
        raise UsageError("--to is the directory for videos, and none are to be made", hint="add --video N")
    if common.dry_run:
        return preview(
            common, settings, writes={"evaluation": directory.tournaments if tournament else directory.evaluations}
        )
    if not follow:
        locate_checkpoint(directory.checkpoints, settings.evaluate.checkpoint)  # before torch is imported
    with common.listening() as listener:
        if tournament:
            from pipelines.stages import tournament as tournaments

            name = f"{source}@{settings.evaluate.checkpoint}"
            return tournaments.run(settings, source=name, directory=directory, listener=listener)
        from pipelines.stages import evaluate as stages

        if follow:
            return stages.follow(settings, path=run, videos=to, listener=listener)
        return stages.run(settings, run=run, videos=to, listener=listener)
