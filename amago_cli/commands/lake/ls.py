"""`amago lake ls`."""

from __future__ import annotations

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
    from amago_cli.lakes import below
    from pipelines.errors import InputMissing
    from pipelines.stages.result import Result, Table

    if not path.is_dir():
        raise InputMissing(f"no directory '{path}'", hint="`amago collect` creates runs, each with a lake, in runs/")
    lakes = [_look(lake) for lake in below(path)]
    columns = ("lake", "trajectories", "episodes", "steps", "overlays", "segments", "bytes", "environments")
    rows = [(*(lake.get(name) for name in columns[:-1]), _last(lake)) for lake in lakes]
    return Result(
        command="lake ls",
        metrics={"lakes": lakes},
        tables=(Table(title=str(path), columns=columns, rows=rows),),
    )


def _look(path: Path) -> dict[str, Any]:
    from amago_cli.lakes import overview
    from pipelines.errors import AmagoError

    try:
        return overview(path)
    except AmagoError as error:  # a damaged lake must not hide the others
        return {"lake": path, "environments": [], "error": str(error)}


def _last(lake: dict[str, Any]) -> str:
    return f"error: {lake['error']}" if "error" in lake else ", ".join(lake["environments"])
