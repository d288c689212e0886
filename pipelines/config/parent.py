"""Processes that end with their parent process."""

from __future__ import annotations

import os
import signal
import threading
import time

_SECONDS = 0.5


def end_with_parent() -> None:
    """End this process, even in the middle of its work, soon after its parent has ended for whatever reason."""
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS)
    os._exit(0)


def stop_with_parent() -> None:
    """Send SIGTERM to this process soon after its parent has ended, so that it stops at its next safe point."""
    threading.Thread(target=_watch_to_stop, args=(os.getppid(),), daemon=True).start()


def _watch_to_stop(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
