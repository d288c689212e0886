"""Signals before a stage has begun and after it ended, when there is no safe point to wait for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last one: the terminal was closed, or ssh was lost


class Stopped(BaseException):
    """The process was asked to stop by signal `number`. Nothing catches it but whoever reports it."""

    stops = True  # see `pipelines.errors.is_stop`

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


def handled() -> list[signal.Signals]:
    """The signals to react to: all but those that this process was started to ignore, as `nohup` has it of SIGHUP."""
    return [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def stoppable() -> Iterator[None]:
    """Signals raise Stopped: a call that is stopped while it loads what it needs reports it in its form."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in handled()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
