"""`amago lake ls`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from amago_cli.options import Common, reader


@reader
def ls(
    common: Common,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A directory that contains lakes.")] = Path("runs"),
) -> Any:
    """List the lakes in and below a directory.

    Example: amago lake ls runs
    """
    from pipelines.errors import AmagoError, InputMissing
    from pipelines.lake.sql.catalog import summary
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result, Table

    if not path.is_dir():
        raise InputMissing(f"no directory '{path}'", hint="`amago collect` creates runs, each with a lake, in runs/")
    columns = ("lake", "trajectories", "episodes", "steps", "overlays", "segments", "bytes", "environments")
    lakes: list[dict[str, Any]] = []
    rows = []
    for place in find_lakes(path):
        try:
            lake = Lake(place)
            lakes.append({"lake": lake.name, **summary(lake)})
            last = ", ".join(lakes[-1]["environments"])
        except AmagoError as error:  # a damaged lake must not hide the others
            lakes.append({"lake": place, "environments": [], "error": str(error)})
            last = f"error: {error}"
        rows.append((*(lakes[-1].get(name) for name in columns[:-1]), last))
    return Result(
        command="lake ls",
        metrics={"lakes": lakes},
        tables=(Table(title=str(path), columns=columns, rows=rows),),
    )


def find_lakes(root: Path) -> Iterator[Path]:
    """Yield every lake in `root` or below it, in order. A lake is not searched for others."""
    if (root / "lake.json").is_file():
        yield root
        return
    for child in sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.is_symlink()):
        if not child.name.startswith("."):
            yield from find_lakes(child)
