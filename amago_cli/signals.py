"""SIGINT, SIGTERM and SIGHUP: the first stops at the next safe point and saves the state, the second stops at once."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from amago_cli.render import escaping
from amago_cli.stopping import handled_signals
from pipelines.config.host import count_ranks, is_main
from pipelines.errors import Interrupted
from pipelines.events import Event, Listener, Notice, Progress, Waiting

_SAME_SECONDS = 1.0
# What a signal waits for where the last event was progress, by its unit.
_PLAYED = ("episodes", "games")
_IN_PROGRESS = {"updates": "the update in progress", **dict.fromkeys(("steps", *_PLAYED), "the step in progress")}
_NOTE = "\nstopping at the next safe point{after}; repeat to stop at once\n"


@contextmanager
def interruptible(listener: Listener) -> Iterator[Listener]:
    """Yield `listener`, which raises Interrupted at the first Progress or stoppable Waiting after a signal; restore the
    handlers at the end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield listener
        return
    received: list[int] = []
    awaited, began, stopped = "", 0.0, False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal began
        received.append(number)
        began = time.monotonic()
        for each in before:
            signal.signal(each, signal.SIG_DFL if count_ranks() == 1 else repeated)
        if is_main():
            _write(_NOTE.format(after=f", after {awaited}" if awaited else ""))

    def repeated(number: int, frame: FrameType | None) -> None:
        """Stop a rank at once, unless the signal is the first one again: the kernel sends it for each thread of a
        launcher that was killed."""
        if time.monotonic() - began > _SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def listen(event: Event) -> None:
        nonlocal awaited, stopped
        listener(event)
        if isinstance(event, Notice):
            return
        what = awaited
        awaited = escaping.line(event.what) if isinstance(event, Waiting) else _IN_PROGRESS.get(event.unit, "")
        if not received:
            return
        by = f"interrupted by {signal.Signals(received[0]).name}"
        hint = "repeat the command to resume"
        stopped = isinstance(event, Progress) or event.stoppable
        if isinstance(event, Progress):
            if event.unit in _PLAYED:
                hint = f"repeat the command: it plays the {event.unit} again"
            text = f"{event.stage} {by} at {event.done} {event.unit}"
            raise Interrupted(text, hint=hint, signal_number=received[0])
        if event.stoppable:
            text = f"{by} while waiting for {event.what}"
            raise Interrupted(text, hint=hint, signal_number=received[0])
        if awaited != what:
            _write(f"waiting for {awaited}\n")

    before = {number: signal.signal(number, remember) for number in handled_signals()}
    try:
        yield listen
        if received and not stopped and is_main():
            _write("done before it could stop\n")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write(text: str) -> None:
    try:
        os.write(2, text.encode())  # unbuffered: the interrupted code may be inside a write to sys.stderr
    except OSError:
        # The terminal is gone. Redirect its descriptors to /dev/null: saving must not fail because of a message.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)
        os.close(nowhere)
