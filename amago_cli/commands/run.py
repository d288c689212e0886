"""`amago run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import Common, EnvTimeout, Fresh, Profile, RunOption, Seed, Size, stage


@stage
def run(
    common: Common,
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="A name `amago examples` lists, FILE.toml, or FILE.toml:NAME.",
            autocompletion=completion.recipes,
        ),
    ],
    run: RunOption = None,
    profile: Profile = None,
    size: Size = None,
    env_timeout: EnvTimeout = None,
    seed: Seed = None,
    fresh: Fresh = False,
) -> Any:
    """Chain the stages of a recipe, epoch by epoch; what is done is skipped.

    The run's directory is runs/RECIPE, with a profile runs/RECIPE-PROFILE, unless --run names another.

    --profile lays some of the recipe's settings over the others: every recipe that comes with amago has `smoke`, which
    runs the whole chain, in a minute or so and without learning much.

    Example: amago run quickstart
    """
    from amago_cli.configuration import Request, file_safe, preview
    from pipelines.config.recipes import find
    from pipelines.config.run_directory import RunDirectory

    name, document = find(recipe)
    request = Request(common, common.named, recipe=document, source=recipe)
    chosen = request.profile()
    run = run or Path("runs") / file_safe(f"{name}-{chosen}" if chosen else name)
    common.concerns(run=run, lake=run / "lake")
    request.settings()  # refuses faults before anything is said
    if common.dry_run:
        return preview(common, request.fitted(run), writes={"run": run})
    with common.listening() as listener:
        settings = request.fitted(run, listener=listener)
        RunDirectory(run).refuse_changes("run", settings, fresh=fresh, undecided=True)  # before torch is imported
        from pipelines.stages import run as engine

        return engine.run(settings, run=run, listener=listener, fresh=fresh)
