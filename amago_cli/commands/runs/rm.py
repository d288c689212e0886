"""`amago runs rm`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import Common, DryRun, reader

_Force = Annotated[bool, typer.Option("--force", help="Also remove runs that other runs depend on.")]


@reader
def rm(
    common: Common,
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="Runs, or patterns such as 'runs/maze-*'.", autocompletion=completion.runs
        ),
    ],
    force: _Force = False,
    dry_run: DryRun = False,
) -> Any:
    """Remove runs: their directories with checkpoints, evaluations and lakes.

    All of them, or none: it refuses a run that a process works on (exit 75), one whose lake or policy another run
    uses, and a directory that is not a run. Lakes elsewhere stay as they are.

    Example: amago runs rm runs/cartpole --dry-run
    """
    from pathlib import Path

    from amago_cli.runs import report_removal
    from pipelines.errors import UsageError
    from pipelines.runs.find import find_runs, is_pattern
    from pipelines.runs.removal import remove

    paths = []
    for place in runs:
        matches = find_runs([place])
        if not is_pattern(place) and matches != [Path(place)]:
            raise UsageError(f"'{place}' is not a run", hint=f"to remove all runs in it: amago runs rm '{place}/*'")
        paths += [path for path in matches if path not in paths]
    return report_removal("runs rm", remove(paths, force=force, dry_run=dry_run), dry_run=dry_run)
