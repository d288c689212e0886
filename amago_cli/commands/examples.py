"""`amago examples`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import Common, Profile, reader


@reader
def examples(
    common: Common,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A recipe to print as TOML.", autocompletion=completion.shipped)
    ] = None,
    profile: Profile = None,
) -> Any:
    """List the recipes that come with amago, or print one as TOML: with all its profiles, or with one applied.

    Example: amago examples quickstart > mine.toml
    """
    import tomli_w

    from amago_cli.render.output import Document
    from pipelines.config.load import fold
    from pipelines.config.recipes import find, find_shipped_recipes, read_shipped_recipes
    from pipelines.errors import UsageError
    from pipelines.stages.recipe import requirement
    from pipelines.stages.result import Result, Table

    if name is not None:
        document = find(name)[1]
        if profile is not None:
            document = fold(document, [(["profile"], profile)], source=name)
        return Document(text=tomli_w.dumps(document), fields={"recipe": document})
    if profile is not None:
        raise UsageError("--profile needs the name of a recipe", hint=f"amago examples NAME --profile {profile}")
    recipes, rows = {}, []
    for key, recipe in read_shipped_recipes().items():
        extra, installed = requirement(recipe)
        recipes[key] = one = {
            "about": recipe["about"],
            "expected": recipe.get("expected", "not yet run at length"),
            "env": recipe["env"]["name"],
            "extra": extra,
            "installed": installed,
            "profiles": list(recipe.get("profiles", {})),
        }
        needs = "" if extra is None else f"[{extra}]" if installed else f"[{extra}], not installed"
        rows.append((key, one["about"], one["expected"], needs))
    return Result(
        command="examples",
        metrics={"recipes": recipes},
        tables=(
            Table(
                title=f"recipes of {find_shipped_recipes()}",
                columns=("recipe", "about", "expected", "needs"),
                rows=rows,
            ),
        ),
    )
