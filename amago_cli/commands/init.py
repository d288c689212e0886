"""`amago init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from amago_cli.options import Common, reader


@reader
def init(
    common: Common,
    name: Annotated[
        Path, typer.Argument(metavar="NAME", help="Directory to create; the environment is named after it.")
    ],
) -> Any:
    """Create a directory with an environment of your own, a recipe and a test, ready to run and edit.

    Example: amago init mymaze
    """
    from amago_cli.render.output import Document
    from amago_cli.template import write

    written = write(name)
    lines = [
        *(f"wrote {path}" for path in written),
        f"next: cd {name} && pytest && amago run recipe.toml --minutes 2",
    ]
    return Document(text="\n".join(lines), fields={"outputs": written})
