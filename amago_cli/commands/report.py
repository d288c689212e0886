"""`amago report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from amago_cli.options import Common, SomeRuns, reader


@reader
def report(
    common: Common,
    runs: SomeRuns,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="The page to write. [default: report.html in the run's directory]"),
    ] = None,
    episodes: Annotated[
        int, typer.Option("--episodes", metavar="N", min=0, max=20, help="Number of sample episodes shown, of one run.")
    ] = 3,
) -> Any:
    """Write one self-contained HTML page about a run, or comparing several.

    Scores and learning curves, adaptation by attempt, metrics of training, sample episodes with the agent's values, the
    lake, settings, lineage, hardware, and the commands that repeat the run. The page needs no network and no server.

    Example: amago report runs/quickstart
    """
    from pipelines.stages import report as engine

    common.concerns(run=Path(runs[0]) if len(runs) == 1 else None)
    with common.listening() as listener:
        return engine.run(runs, to=to, episodes=episodes, listener=listener)
