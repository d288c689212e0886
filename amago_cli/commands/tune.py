"""`amago tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from amago_cli.options import Common, Jobs, Metric, Profile, Recipe, Size, stage
from amago_cli.quantities import parse_count, parse_positive


@stage
def tune(
    common: Common,
    recipe: Recipe,
    space: Annotated[
        Path,
        typer.Option(
            "--space",
            metavar="FILE",
            help="TOML file, a table for each setting: low and high (log, step), or choices.",
        ),
    ] = ...,  # type: ignore[assignment]
    trials: Annotated[
        int, typer.Option("--trials", metavar="N", parser=parse_positive, help="Number of trials in all.")
    ] = "20",  # type: ignore[assignment]
    jobs: Jobs = "1",  # type: ignore[assignment]
    confirm: Annotated[
        int,
        typer.Option("--confirm", metavar="N", parser=parse_count, help="Fresh seeds for the best settings; 0: none."),
    ] = "3",  # type: ignore[assignment]
    prune: Annotated[
        bool, typer.Option("--prune/--no-prune", help="Stop trials whose evaluations are below the median.")
    ] = True,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="Directory of the search. Default: runs/RECIPE-tune.")
    ] = None,
    profile: Profile = None,
    size: Size = None,
    metric: Metric = "return_mean",
) -> Any:
    """Search for the settings with the highest score, with Optuna; then confirm them on fresh seeds.

    Each trial is an ordinary run in DIR/trial-NNNN, compared by its last evaluation (as `amago compare` does), and
    stopped early if its evaluations are below the median of the others at the same update. Repeating the command
    resumes; a larger --trials adds trials. The best settings are written as a recipe, DIR/best.toml. A search picks
    lucky seeds too, so report the confirmed score. Needs: pip install "amago[tune]".

    Example: amago tune quickstart --space space.toml --trials 50 --jobs 2
    """
    from amago_cli.cells import Cells, command
    from amago_cli.render.output import Document
    from pipelines.config.recipes import find
    from pipelines.files.atomic import write_atomically
    from pipelines.stages.library import name_default_run
    from pipelines.stages.search_space import read_space

    cells = Cells(common, recipe, profile=profile, size=size)
    dimensions = read_space(space)
    directory = run or name_default_run(f"{find(recipe)[0]}-tune")
    common.concerns(run=directory)
    for dimension in dimensions:
        for value in dimension.examples():
            cells.settings({dimension.key: value})  # report configuration errors before anything runs
    if common.dry_run:
        lines = [f"{each.key}: {each.choices or (each.low, each.high)}" for each in dimensions]
        text = "\n".join([f"{trials} trials in {directory}, choosing", *lines])
        fields = {"outputs": [directory], "space": [each.key for each in dimensions]}
        return Document(text=text, status="skipped", fields=fields)
    with common.listening() as listener:
        from dataclasses import replace

        from pipelines.stages import tune as engine

        search = engine.Search(
            directory=directory,
            space=dimensions,
            settings=cells.settings({}).document(),
            plan=cells.plan,
            command=command(),
            seed=cells.base_seed(),
            metric=metric,
            trials=trials,
            jobs=jobs,
            prune=prune,
            confirm=max(confirm, 0),
        )
        result = engine.run(search, listener=listener)
        import tomli_w

        best = directory / "best.toml"
        write_atomically(best, tomli_w.dumps(cells.document(result.metrics["best"]["settings"])))
        return replace(result, outputs=[best])
