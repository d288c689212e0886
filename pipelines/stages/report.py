"""report: one page about runs that anybody can open, without a server or a network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from pipelines.errors import UsageError
from pipelines.events import Listener, Notice, silent
from pipelines.report import run_report
from pipelines.report.run_report import make_page
from pipelines.runs.find import find_runs
from pipelines.runs.stored import read_run
from pipelines.stages.result import Result
from pipelines.view.replay import draw_trajectory


def run(
    places: Sequence[Path | str], *, to: Path | None = None, episodes: int = 3, listener: Listener = silent
) -> Result:
    """Write the page about the runs at or below `places` (directories or patterns).

    `to`: default report.html in the run's directory; for several runs it must be given. `episodes`: how many sample
    episodes the page of one run has. InputMissing if there is no such run.
    """
    started = time.monotonic()
    paths = find_runs(places)
    if not paths:
        raise UsageError(f"'{places[0]}' contains no run", hint="name a run, e.g. runs/quickstart")
    if to is None:
        if len(paths) > 1:
            raise UsageError(
                f"where to write the report of {len(paths)} runs?", hint="give --to, e.g. --to report.html"
            )
        to = paths[0] / run_report.NAME
    listener(Notice(stage="report", text=f"reading {len(paths)} run{'s' * (len(paths) != 1)}", level="debug"))
    runs = [read_run(path) for path in paths]
    for stored in runs:
        for problem in (*stored.problems, *stored.damaged_evaluations):
            listener(Notice(stage="report", text=f"{stored.path}: {problem}; left out", level="warning"))
    page = make_page(runs, sample=episodes, draw=draw_trajectory, listener=listener)
    written = page.write(to)
    return Result(
        command="report",
        run=paths[0] if len(paths) == 1 else None,
        metrics={"runs": len(paths), "bytes": written.stat().st_size},
        outputs=[written],
        seconds=time.monotonic() - started,
    )
