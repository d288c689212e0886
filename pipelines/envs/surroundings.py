"""The working directory belongs to the process: an environment that changes it keeps its own while it runs."""

from __future__ import annotations

import contextlib
import os


class WorkingDirectory:
    """A context in which an environment's code runs, in the directory in which it last was; the process's own comes
    back at the end.
    """

    def __init__(self) -> None:
        self._process = self._own = ""
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._process = _current()
        if self._own:
            with contextlib.suppress(OSError):
                os.chdir(self._own)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        now = _current()
        if now != self._process and self._process:
            self._own = now
            os.chdir(self._process)


def _current() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return ""
