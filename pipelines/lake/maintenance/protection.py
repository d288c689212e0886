"""Protection from expiry, of a whole lake or of the segments of a snapshot. Rewriting is allowed: a snapshot finds its
trajectories in any file.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pipelines.errors import InputMissing, UsageError
from pipelines.lake.log import LogEntry, Protection, append, protections
from pipelines.lake.maintenance.lease import lease

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

WHOLE = "lake"


def protect(lake: Lake, segments: Iterable[str] = (), *, name: str = WHOLE) -> Protection:
    """Protect the lake, or the trajectories of `segments` under a name, from expiry. A name is replaced."""
    ids = tuple(segments)
    if (name == WHOLE) != (not ids):
        raise UsageError(f"a snapshot cannot be protected as '{name}'", hint="choose another name")
    protection = Protection(name=name, time=time.time(), segments=ids)
    with lease(lake):
        protections(lake.storage)  # refuses a damaged log
        said = {"time": protection.time, "segments": list(ids)}
        append(lake.storage, LogEntry(time=protection.time, reason="protected", protect={name: said}))
    return protection


def unprotect(lake: Lake, name: str = WHOLE) -> None:
    """Remove a protection. InputMissing if there is none of that name."""
    with lease(lake):
        known = [protection.name for protection in protections(lake.storage)]
        if name not in known:
            raise InputMissing(
                f"lake '{lake.name}' has no protection '{name}'",
                hint=f"there are: {', '.join(known)}" if known else "nothing in it is protected",
            )
        append(lake.storage, LogEntry(time=time.time(), reason="no longer protected", protect={name: None}))
