"""Processes that end with the process that started them."""

from __future__ import annotations

import os
import threading
import time

_SECONDS = 0.5


def end_with_parent() -> None:
    """From now on end this process, in the middle of its work too, soon after its parent has ended, however it did."""
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS)
    os._exit(0)
