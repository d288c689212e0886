"""Trackio: `trackio:PROJECT`, on this machine (TRACKIO_DIR), or as TRACKIO_SPACE_ID says."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path

import trackio

from pipelines.tracking.base import Ending, TrackedRun


class TrackioTracker:
    """One run of a project, resumed by its name."""

    def __init__(self, argument: str, run: TrackedRun) -> None:
        project = argument or "amago"
        self.id = run.id or run.identity
        with contextlib.redirect_stdout(io.StringIO()):  # instructions, which `place` gives
            self._run = trackio.init(
                project=project,
                name=self.id,
                resume="allow",
                config=dict(run.config),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self.place = f"trackio show --project {project}"

    def log(self, figures: Mapping[str, float], *, step: int, seconds: float) -> None:
        self._run.log(dict(figures), step=step)

    def picture(self, name: str, path: Path, *, step: int) -> None:
        self._run.log({name: trackio.Image(str(path))}, step=step)

    def video(self, name: str, path: Path, *, step: int) -> None:
        self._run.log({name: trackio.Video(str(path))}, step=step)

    def close(self, ending: Ending) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
