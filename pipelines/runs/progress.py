"""progress.json of a run: how far it is and the time left, by its own estimate, for those who look from outside.

{"share": 0.4, "seconds_left": 71.0, "time": SECONDS, "stages": {"train": {"done": 20, "total": 40, "unit": ...}}}
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.errors import StageFailed
from pipelines.events import Event, Listener, Progress
from pipelines.files.atomic import write_atomically
from pipelines.files.json import read_object

NAME = "progress.json"
_EVERY_SECONDS = 2.0


@contextlib.contextmanager
def record_progress(run: Path, listener: Listener, *, every: float = _EVERY_SECONDS) -> Iterator[Listener]:
    """Yield a listener that also keeps progress.json of `run` up to date. A disk that refuses does not stop a run."""
    recorder = _Recorder(run / NAME, every)

    def forward(event: Event) -> None:
        if isinstance(event, Progress):
            recorder.take(event)
        listener(event)

    try:
        yield forward
    finally:
        recorder.write()


class _Recorder:
    """The newest progress of each stage."""

    def __init__(self, path: Path, every: float) -> None:
        self._path, self._every = path, every
        known = (read_object(path) or {}).get("stages")
        self._stages: dict[str, Any] = dict(known) if isinstance(known, dict) else {}
        self._event: Progress | None = None
        self._first: tuple[int, float] | None = None  # of a stage on its own: count and clock
        self._due = time.monotonic() + every / 4  # soon after the start

    def take(self, event: Progress) -> None:
        self._event = event
        # Of "epoch 1/5 train" only the last word names the stage.
        self._stages[event.stage.rpartition(" ")[2]] = {"done": event.done, "total": event.total, "unit": event.unit}
        if self._first is None:
            self._first = event.done, time.monotonic()
        if time.monotonic() >= self._due:
            self.write()

    def write(self) -> None:
        event, self._event = self._event, None
        if event is None:
            return
        share, left = event.run_share, event.run_seconds_left
        if share is None:
            share, left = self._estimate_alone(event)
        content = {"share": share, "seconds_left": left, "time": round(time.time(), 3), "stages": self._stages}
        with contextlib.suppress(StageFailed):
            write_atomically(self._path, json.dumps(content), durable=False)
        self._due = time.monotonic() + self._every

    def _estimate_alone(self, event: Progress) -> tuple[float | None, float | None]:
        """Estimate the share done and the seconds left of a stage that is not part of a chain."""
        if not event.total or self._first is None:
            return None, None
        done, began = self._first
        rate = (event.done - done) / max(time.monotonic() - began, 1e-9)
        left = max(event.total - event.done, 0)
        return min(event.done / event.total, 1.0), left / rate if rate > 0 else None
