"""`amago examples`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from amago_cli.options import Common, reader


@reader
def examples(
    common: Common,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A recipe to print as TOML.")] = None,
) -> Any:
    """List the recipes that come with amago, or print one.

    Example: amago examples quickstart > mine.toml
    """
    import tomli_w

    from amago_cli.output import Document
    from pipelines.config.recipes import find, shipped_path, shipped_recipes
    from pipelines.stages.result import Result, Table

    if name is not None:
        document = find(name)[1]
        return Document(text=tomli_w.dumps(document), fields={"recipe": document})
    recipes = shipped_recipes()
    rows = [(key, recipe.get("about", "")) for key, recipe in recipes.items()]
    return Result(
        command="examples",
        metrics={"recipes": {key: recipe.get("about", "") for key, recipe in recipes.items()}},
        tables=(Table(title=f"recipes of {shipped_path()}", columns=("recipe", "about"), rows=rows),),
    )
