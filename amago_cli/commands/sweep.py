"""`amago sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import Common, Jobs, Metric, Profile, Recipe, Size, stage
from amago_cli.quantities import parse_positive


@stage
def sweep(
    common: Common,
    recipe: Recipe,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="KEY=A,B,C",
            help="Setting to vary and its values; repeatable: every combination is run.",
            autocompletion=completion.assignments,
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="N", parser=parse_positive, help="Number of seeds of each combination.")
    ] = "1",  # type: ignore[assignment]
    jobs: Jobs = "1",  # type: ignore[assignment]
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="Directory of the runs. Default: runs/RECIPE-sweep.")
    ] = None,
    profile: Profile = None,
    size: Size = None,
    metric: Metric = "return_mean",
) -> Any:
    """Run a recipe with every combination of some settings, and compare the results.

    Each combination and seed is an ordinary run in a directory of its own, as `amago run` makes it. Repeating the
    command skips the runs that are done and resumes the others; more values and seeds can be added. A run that fails
    does not stop the others: all failures are listed at the end (exit 1).

    Example: amago sweep quickstart --vary train.learning_rate=3e-4,1e-3 --seeds 3 --jobs 2
    """
    from amago_cli.cells import Cells, command, parse_varied
    from amago_cli.render.output import Document
    from pipelines.config.recipes import find
    from pipelines.stages import sweep as engine
    from pipelines.stages.library import name_default_run

    cells = Cells(common, recipe, profile=profile, size=size)
    first = cells.base_seed()
    grid = engine.make_cells(parse_varied(vary or ()), range(first, first + seeds))
    directory = run or name_default_run(f"{find(recipe)[0]}-sweep")
    common.concerns(run=directory)
    for values in {repr({**values, "seed": 0}): values for values in grid}.values():
        cells.settings(values)  # report configuration errors before anything runs
    names = engine.name_cells(grid)
    planned = [cells.plan(values, directory / name) for values, name in zip(grid, names, strict=True)]
    if common.dry_run:
        import shlex

        lines = [f"{'done    ' if each.is_done else 'to run  '}amago {shlex.join(each.arguments)}" for each in planned]
        fields = {"outputs": [each.path for each in planned], "runs": grid}
        return Document(text="\n".join(lines), status="skipped", fields=fields)
    with common.listening() as listener:
        return engine.run(
            planned,
            directory=directory,
            settings=cells.settings({}).document(),
            varied=list(grid[0]),
            command=command(),
            jobs=jobs,
            metric=metric,
            listener=listener,
        )
