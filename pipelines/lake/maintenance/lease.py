"""The maintenance lease: one process at a time rewrites, expires or deletes. Writers and readers need no lease."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipelines.errors import Locked
from pipelines.lake.storage import LocalStorage

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

_LOOK_SECONDS, _LOOK_FAR_SECONDS = 0.05, 1.0  # far: each costs requests to an object store
_WAIT_SECONDS = 10.0  # longer than a collector's maintenance takes

Held = Callable[[], None]
"""Raises StageFailed once the lease is lost; call it before each step that requires the lease."""


@contextmanager
def lease(lake: Lake, *, wait_seconds: float = _WAIT_SECONDS) -> Iterator[Held]:
    """Hold the lake's maintenance lease. Locked, with the holder, if it is not free within `wait_seconds`."""
    deadline = time.monotonic() + wait_seconds
    while True:
        holding = lake.storage.hold("maintenance", what=f"lake '{lake.name}' is being maintained")
        try:
            held = holding.__enter__()
            break
        except Locked as error:
            if time.monotonic() >= deadline:
                raise Locked(error.message, hint="wait for it, then repeat the command") from error
            time.sleep(_LOOK_SECONDS if isinstance(lake.storage, LocalStorage) else _LOOK_FAR_SECONDS)
    try:
        yield held
    finally:
        holding.__exit__(None, None, None)
