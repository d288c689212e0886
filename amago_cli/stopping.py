"""Signals before a stage starts and after it ends, when there is no safe point to wait for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed or ssh disconnected


class Stopped(BaseException):
    """Stop of the process by signal `number`; only the error report catches it."""

    stops = True  # see `pipelines.errors.is_stop`

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


def handled_signals() -> list[signal.Signals]:
    """List the signals to handle: all that the process was not started to ignore, as `nohup` ignores SIGHUP."""
    return [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise Stopped at a signal, so that a call that is stopped while it imports reports it in its format."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in handled_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
