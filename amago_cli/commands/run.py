"""`amago run`."""

from __future__ import annotations

from typing import Any

from amago_cli.options import (
    Collectors,
    Common,
    EngineOption,
    EnvTimeout,
    Fresh,
    Profile,
    Ranks,
    RayOption,
    Recipe,
    RunOption,
    Seed,
    Size,
    Track,
    stage,
)


@stage
def run(
    common: Common,
    recipe: Recipe,
    run: RunOption = None,
    profile: Profile = None,
    size: Size = None,
    env_timeout: EnvTimeout = None,
    collectors: Collectors = None,
    engine: EngineOption = None,
    ray: RayOption = None,
    track: Track = None,
    ranks: Ranks = None,
    seed: Seed = None,
    fresh: Fresh = False,
) -> Any:
    """Run the stages of a recipe, epoch by epoch, skipping those that are done.

    The run's directory is runs/RECIPE, or runs/RECIPE-PROFILE, unless --run gives another.

    --profile overrides some of the recipe's settings. Every recipe that comes with amago has the profile `smoke`, which
    runs the whole chain in about a minute, without learning much.

    Example: amago run quickstart
    """
    from amago_cli.configuration import Request, preview
    from amago_cli.ranks import launched
    from pipelines.config.recipes import find
    from pipelines.config.run_directory import RunDirectory
    from pipelines.stages.library import default_run

    name, document = find(recipe)
    request = Request(common, common.named, recipe=document, source=recipe)
    chosen = request.profile()
    run = run or default_run(f"{name}-{chosen}" if chosen else name)
    common.concerns(run=run, lake=run / "lake")
    settings = request.settings()  # report configuration errors before anything is printed
    if common.dry_run:
        settings = request.fitted(run)
        RunDirectory(run).refuse_changes("run", settings, fresh=fresh, undecided=True)
        return preview(common, settings, writes={"run": run})
    if (launch := launched(common.invocation, settings.train)) is not None:
        return launch
    with common.listening() as listener:
        settings = request.fitted(run, listener=listener)
        RunDirectory(run).refuse_changes("run", settings, fresh=fresh, undecided=True)  # before torch is imported
        from pipelines.runs.recipe import followed
        from pipelines.stages import run as stages
        from pipelines.stages.environment import env_model

        described = followed(name, request.file, request.assignments, settings, env_model=env_model)
        return stages.run(settings, run=run, listener=listener, fresh=fresh, recipe=described)
