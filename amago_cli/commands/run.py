"""`amago run`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amago_cli.options import (
    Collectors,
    Common,
    Dataset,
    EngineOption,
    Environment,
    EnvTimeout,
    Fresh,
    Init,
    OptionalRecipe,
    Profile,
    Ranks,
    RayOption,
    RunOption,
    Seed,
    Sets,
    Size,
    Track,
    stage,
)
from amago_cli.quantities import parse_count

if TYPE_CHECKING:
    from amago_cli.configuration import Request
    from amago_cli.render.output import Document
    from pipelines.stages.make_recipe import Begun

_BUDGET = ("minutes", "steps")


@stage
def run(
    common: Common,
    recipe: OptionalRecipe = None,
    env: Environment = None,
    source: Dataset = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            metavar="M",
            help="Where settings are chosen: minutes of this machine to use [default: those of the recipe, or 5].",
        ),
        Sets("minutes"),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            parser=parse_count,
            help="Where settings are chosen: environment steps to use, instead of minutes; with --from, beside them.",
        ),
        Sets("steps"),
    ] = None,
    run: RunOption = None,
    profile: Profile = None,
    size: Size = None,
    env_timeout: EnvTimeout = None,
    collectors: Collectors = None,
    engine: EngineOption = None,
    ray: RayOption = None,
    init: Init = None,
    track: Track = None,
    ranks: Ranks = None,
    seed: Seed = None,
    fresh: Fresh = False,
) -> Any:
    """Run the stages of a recipe, epoch by epoch, skipping those that are done; or train an agent without a recipe.

    `amago run RECIPE`: the run's directory is runs/RECIPE, or runs/RECIPE-PROFILE, unless --run gives another.

    --profile overrides some of the recipe's settings. Every recipe that comes with amago has the profile `smoke`, which
    runs the whole chain in about a minute, without learning much.

    `amago run --env ENV`: measures the environment first, then chooses stages, network, context, exploration and all
    that a recipe would say, so that the run takes --minutes M of this machine, or --steps N of the environment.
    --dry-run shows each choice and its reason; --set and --size override any. The choices are written into the run,
    runs/ENV, which resumes and repeats as any other. A recipe without stages is completed in the same way, for the
    minutes that it names.

    `amago run --from SOURCE`: measures a dataset instead, and learns from it alone. With --env ENV the policy is
    evaluated there, and the best checkpoint chosen.

    Example: amago run quickstart

    Example: amago run --env gym:CartPole-v1 --minutes 2

    Example: amago run --from hopper.hdf5 --env gym:Hopper-v5 --minutes 10
    """
    from amago_cli.configuration import Request, describe_device, preview, read_plan
    from amago_cli.ranks import plan_launch
    from pipelines.config.recipes import find
    from pipelines.config.run_directory import RunDirectory
    from pipelines.errors import UsageError
    from pipelines.stages.library import name_default_run

    if recipe is None:
        return _plan(common, Request(common, common.named), run, minutes, steps, fresh=fresh)
    name, document = find(recipe)
    request = Request(common, common.named, recipe=document, source=recipe)
    chosen = request.profile()
    run = run or name_default_run(f"{name}-{chosen}" if chosen else name)
    if "stages" not in request.document():
        return _plan(common, request, run, minutes, steps, name=name, fresh=fresh)
    if option := next((f"--{key}" for key in _BUDGET if key in request.keys), ""):
        hint = f"leave {option} out, or give --env ENV instead of the recipe"
        raise UsageError(f"{option}: recipe '{recipe}' has its own length", hint=hint)
    common.concerns(run=run, lake=run / "lake")
    settings = request.settings()  # report configuration errors before anything is printed
    if source and not any(stage.stage == "ingest" for stage in settings.stages):
        hint = "leave --from out, or give --env ENV instead of the recipe"
        raise UsageError(f"--from: recipe '{recipe}' imports no dataset", hint=hint)
    if common.dry_run:
        settings = request.fit(run)
        RunDirectory(run).refuse_changes("run", settings, fresh=fresh, undecided=True)
        trains = any(stage.stage == "train" for stage in settings.stages)
        does = f"train {describe_device(settings.train)}" if trains else ""
        return preview(common, settings, writes={"run": run}, does=does)
    if (launch := plan_launch(common.invocation, settings.train)) is not None:
        return launch
    with common.listening() as listener:
        settings = request.fit(run, listener=listener)
        RunDirectory(run).refuse_changes("run", settings, fresh=fresh, undecided=True)  # before torch is imported
        from pipelines.config.recipes import describe_recipe
        from pipelines.rollout.environment import find_env_model
        from pipelines.stages import run as stages

        described: dict[str, Any] | None = None
        own = RunDirectory(run).config_path
        is_planned = read_plan(run) is not None and Path(recipe).resolve() == own.resolve()
        if not is_planned:  # a run that is repeated by its own configuration keeps its plan
            described = describe_recipe(name, request.file, request.assignments, settings, env_model=find_env_model)
        return stages.run(settings, run=run, listener=listener, fresh=fresh, recipe=described)


def _plan(
    common: Common,
    request: Request,
    run: Path | None,
    minutes: float | None,
    steps: int | None,
    *,
    name: str = "",
    fresh: bool,
) -> Any:
    """Run by the plan that the run has stored, or else by a plan that is made now."""
    from amago_cli.configuration import tabulate_choices
    from amago_cli.ranks import plan_launch
    from amago_cli.render.output import Document
    from pipelines.config.host import is_main
    from pipelines.config.load import merge
    from pipelines.config.run_directory import RunDirectory
    from pipelines.errors import UsageError
    from pipelines.events import Notice
    from pipelines.stages.library import label_source, name_default_run
    from pipelines.stages.make_recipe import begin, find_budget, make_budget

    env, source = request.environment(), request.source_name({})
    make_budget(minutes, steps, has_data=bool(source))  # refuses both at once, and numbers that are not positive
    settings = request.settings()  # report configuration errors before anything is printed
    if not (env or source):
        hint = "give RECIPE (`amago examples` lists them), --env ENV (`amago envs` lists them), or --from DATASET"
        what = f"recipe '{name}' names no environment" if name else "neither a recipe nor an environment is named"
        raise UsageError(what, hint=hint)
    run = run or name_default_run(label_source(source) if source else env)
    common.concerns(run=run, lake=run / "lake")
    typed = {key: getattr(settings, key) if key in request.keys else None for key in _BUDGET}
    budget = find_budget(settings, **typed)
    if not common.dry_run and (launch := plan_launch(common.invocation, settings.train)) is not None:
        return launch
    with common.listening() as listener:
        directory, given, recipe = RunDirectory(run), request.document(), (name, request.file)
        begun = begin(directory, budget, given, request.settings, recipe=recipe, fresh=fresh, listener=listener)
        if common.dry_run and not is_main():
            return Document(text="", status="skipped")
        if common.dry_run:
            return _preview(begun, merge(begun.document, request.document()), writes=run)
        for line in tabulate_choices(begun.recipe["plan"]) if begun.is_new else ():
            listener(Notice(text=line))
        from pipelines.stages import run as stages

        return stages.run(begun.settings, run=run, listener=listener, fresh=fresh, recipe=begun.recipe)


def _preview(begun: Begun, document: Mapping[str, Any], *, writes: Path) -> Document:
    """Write the output of `--dry-run`: the choices as comments, and the settings as a recipe that runs."""
    import tomli_w

    from amago_cli.configuration import tabulate_choices
    from amago_cli.render.output import Document

    plan = begun.recipe["plan"]
    lines = [
        f"# run would write run: {writes}",
        "#",
        *(f"# {line}" for line in tabulate_choices(plan)),
        "",
        tomli_w.dumps(document),
    ]
    fields = {"outputs": [writes], "settings": begun.settings.document(), **plan}
    return Document(text="\n".join(lines), status="skipped", fields=fields)
