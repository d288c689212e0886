"""The page of a run in training: refreshed while the run makes progress, and written whole at the end.

During training a page has neither lakes nor episodes and costs about 0.2 s. The next refresh waits for a multiple of
what the last one took, so that pages take less than 2% of a run's time. An error in a page becomes a notice and never
stops the run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipelines.errors import is_stop
from pipelines.events import Event, Listener, Notice, Progress, Waiting
from pipelines.report.episodes import Draw
from pipelines.report.run_report import make_page
from pipelines.runs.stored import read_run

NAME = "report.html"
_FIRST_SECONDS = 20.0
_LEAST_SECONDS = 20.0
_PAUSE = 75  # times what the last page took
_EPISODES = 3


@contextlib.contextmanager
def keep_fresh(
    run: Path,
    listener: Listener,
    *,
    clock: Callable[[], float] = time.monotonic,
    write: Callable[[], Any] | None = None,
) -> Iterator[Listener]:
    """Yield a listener that also refreshes the page of `run` while there is progress."""
    due = clock() + _FIRST_SECONDS
    refresh = write or (lambda: _write(run, listener, sample=0, lakes=False))

    def forward(event: Event) -> None:
        nonlocal due
        listener(event)
        if isinstance(event, Progress) and (began := clock()) >= due:
            refresh()
            ended = clock()
            due = ended + max(_LEAST_SECONDS, _PAUSE * (ended - began))

    yield forward


def write_final(run: Path, listener: Listener, draw: Draw | None = None) -> list[Path]:
    """Write the whole page of a run that has ended. Return its path, or an empty list if it could not be written."""
    return [run / NAME] if _write(run, listener, sample=_EPISODES, lakes=True, draw=draw) else []


def write_stopped(run: Path, listener: Listener) -> None:
    """Refresh the page of a run that was stopped or failed, if it has one."""
    if (run / NAME).exists():
        listener(Waiting(what=f"'{run / NAME}' to be written", stoppable=False))
        _write(run, listener, sample=0, lakes=False)


def _write(run: Path, listener: Listener, *, sample: int, lakes: bool, draw: Draw | None = None) -> bool:
    try:
        make_page([read_run(run)], sample=sample, lakes=lakes, draw=draw).write(run / NAME)
    except Exception as error:  # a page is never worth a run, whatever goes wrong
        if is_stop(error):
            raise
        listener(Notice(stage="report", text=f"'{run / NAME}' cannot be written: {error}", level="warning"))
        return False
    return True
