"""`amago run`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import Common, EnvTimeout, Fresh, Profile, RunOption, Seed, Size, Track, stage


@stage
def run(
    common: Common,
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="A name from `amago examples`, FILE.toml, or FILE.toml:NAME.",
            autocompletion=completion.recipes,
        ),
    ],
    run: RunOption = None,
    profile: Profile = None,
    size: Size = None,
    env_timeout: EnvTimeout = None,
    track: Track = None,
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
    from pipelines.config.recipes import find
    from pipelines.config.run_directory import RunDirectory
    from pipelines.stages.library import default_run

    name, document = find(recipe)
    request = Request(common, common.named, recipe=document, source=recipe)
    chosen = request.profile()
    run = run or default_run(f"{name}-{chosen}" if chosen else name)
    common.concerns(run=run, lake=run / "lake")
    request.settings()  # report configuration errors before anything is printed
    if common.dry_run:
        return preview(common, request.fitted(run), writes={"run": run})
    with common.listening() as listener:
        settings = request.fitted(run, listener=listener)
        RunDirectory(run).refuse_changes("run", settings, fresh=fresh, undecided=True)  # before torch is imported
        from pipelines.stages import run as engine

        return engine.run(settings, run=run, listener=listener, fresh=fresh, recipe=request.followed(name, settings))
