"""Processes that end with their parent process."""

from __future__ import annotations

import os
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
