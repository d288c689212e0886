"""Trackers that remember what they were sent, or fail; named as `tests.tracking.memory:Memory` and so on."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from pipelines.tracking.base import Ending, TrackedRun

MADE: list[Memory] = []
BLOCKED = threading.Event()


class Memory:
    """Remembers. Its id is new unless the run has one."""

    def __init__(self, argument: str, run: TrackedRun) -> None:
        MADE.append(self)
        self.argument, self.run = argument, run
        self.id, self.place = run.id or f"memory-{len(MADE)}", "in memory"
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.files: list[tuple[str, str, int]] = []
        self.ending: Ending | None = None

    def log(self, figures: Mapping[str, float], *, step: int, seconds: float) -> None:
        self.lines.append((step, dict(figures)))

    def picture(self, name: str, path: Path, *, step: int) -> None:
        self.files.append(("picture", name, step))

    def video(self, name: str, path: Path, *, step: int) -> None:
        self.files.append(("video", name, step))

    def close(self, ending: Ending) -> None:
        self.ending = ending


class Unmade(Memory):
    """Cannot be made."""

    def __init__(self, argument: str, run: TrackedRun) -> None:
        raise ConnectionError("nobody answers")


class Refusing(Memory):
    """Fails at the first figures."""

    def log(self, figures: Mapping[str, float], *, step: int, seconds: float) -> None:
        raise SystemExit(7)


class Unclosed(Memory):
    """Fails at the end."""

    def close(self, ending: Ending) -> None:
        raise ValueError("it is gone")


class Blocked(Memory):
    """Takes for ever, or until `BLOCKED` is set."""

    def close(self, ending: Ending) -> None:
        BLOCKED.wait(600)
