"""SIGINT, SIGTERM and SIGHUP: the first stops at the next safe point with the state saved, the second at once."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from amago_cli.stopping import handled
from pipelines.errors import Interrupted
from pipelines.events import Event, Listener, Progress

_NOTE = b"\nstopping at the next safe point; once more stops at once\n"


@contextmanager
def interruptible(listener: Listener) -> Iterator[Listener]:
    """`listener`, raising Interrupted at the first Progress after a signal; ends with the old handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield listener
        return
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        try:
            os.write(2, _NOTE)  # unbuffered: the interrupted code may be inside a write to sys.stderr
        except OSError:
            _leave_terminal()

    def listen(event: Event) -> None:
        listener(event)
        if received and isinstance(event, Progress):
            name = signal.Signals(received[0]).name
            raise Interrupted(
                f"{event.stage} interrupted by {name} at {event.done} {event.unit}",
                hint="repeat the command to go on from what is saved",
                signal_number=received[0],
            )

    before = {number: signal.signal(number, remember) for number in handled()}
    try:
        yield listen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_terminal() -> None:
    """Write to nowhere in place of a terminal that is gone: saving must not fail over a message."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
