"""Deletion of files that are no longer needed: of segments that the log hides, and of maintainers that died.

A reader may still be about to open a file that it knows: files stay for a grace period after they were removed from the
live set. A file whose log still exists stays too, or salvage would not see that it was published.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.events import Listener, Progress, silent
from pipelines.files.atomic import explained
from pipelines.lake.folders import (
    LOG,
    REWRITTEN,
    ROOT,
    WATCHED_HOURS,
    blob_key,
    by_hour,
    folders,
    list_names,
    segment_ids,
    segment_key,
)
from pipelines.lake.log import Held, LogEntry, append
from pipelines.lake.maintenance.files import FileTable
from pipelines.lake.segment import stored_bytes
from pipelines.lake.storage import LocalStorage

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

GRACE_SECONDS = 600.0
_TOGETHER = 100  # segments deleted between two looks at the lease: in an object store, by two requests
_ELSEWHERE_SECONDS = (
    86_400.0  # logs of other hosts are not visible: what they may still publish is left alone this long
)
_QUIET_SECONDS = 3600.0  # of a folder in which a long suspended writer may publish
_BLOB = ".blob.arrow"


@dataclass(frozen=True)
class SweepResult:
    """What was deleted; `waiting` segments are removed, but within their grace period."""

    segments: int
    bytes: int
    waiting: int


def sweep(
    inventory: FileTable, held: Held, *, grace_seconds: float = GRACE_SECONDS, listener: Listener = silent
) -> SweepResult:
    """Delete what was removed longer than the grace period ago, under the lease `held` and by a refreshed table.
    StageFailed if the storage fails.
    """
    lake, storage, log, now = inventory.lake, inventory.lake.storage, inventory.log, time.time()
    log.require_whole()
    with explained(f"remove files of '{lake.name}'"):
        names = {f"{hour}/{name}" for hour, found in list_names(storage).items() for name in found}
        listed = set(segment_ids("", names))
        unfinished = sorted(id for id in listed if not log.is_finished(id) and id not in log.whole)
        if unfinished:  # also keeps a maintainer whose lease ran out from finishing it
            append(storage, LogEntry(time=now, reason="left unfinished", segments=unfinished), after=log.last)
            inventory.refresh()

        @functools.cache
        def age(key: str) -> float:
            try:
                return max(0.0, storage.age(key, now))
            except FileNotFoundError:
                return 0.0

        due = {
            id: age(f"{LOG}/{log.removals[id].file}") + log.removals[id].seconds >= grace_seconds
            for id in listed
            if id in log.whole or log.is_superseded(id)
        }
        going = sorted(id for id, over in due.items() if over and not _has_log(lake, id))
        size = 0
        for start in range(0, len(going), _TOGETHER):
            some = going[start : start + _TOGETHER]
            size += sum(stored_bytes(storage, id) for id in some)
            held()
            storage.remove(*map(segment_key, some))  # blobs last: a reader that finds a segment finds it complete
            storage.remove(*map(blob_key, some))
            listener(Progress(stage="sweep", done=start + len(some), total=len(going), unit="segments"))
        held()
        _remove_wide_orphans(lake, names, listed, grace_seconds, age)
        log.shorten(listed - set(going))
        _remove_leftovers(lake)
    return SweepResult(segments=len(going), bytes=size, waiting=len(due) - len(going))


def _has_log(lake: Lake, id: str) -> bool:
    name = id.rpartition("/")[2].removesuffix(".ovl").partition("-")[2]
    return (lake.local / "wal" / f"{name}.wal").exists()


def _remove_wide_orphans(
    lake: Lake, names: Iterable[str], known: Container[str], grace_seconds: float, age: Callable[[str], float]
) -> None:
    """Delete the blobs among the files `names` whose segment was never published, or was deleted."""
    storage = lake.storage
    old = grace_seconds if isinstance(storage, LocalStorage) else max(grace_seconds, _ELSEWHERE_SECONDS)
    for name in names:
        id = name.removesuffix(_BLOB)
        if not name.endswith(_BLOB) or id in known or age(blob_key(id)) < old or _has_log(lake, id):
            continue
        if not storage.exists(segment_key(id)):  # checked last: its log is dropped once it is published
            storage.remove(blob_key(id))


def _remove_leftovers(lake: Lake) -> None:
    """Delete files of dead rewriters (the holder of the lease is the only living one) and empty folders."""
    for path in (lake.local / "tmp").glob(f"{REWRITTEN}.*.tmp"):
        path.unlink(missing_ok=True)
    storage, now = lake.storage, time.time()
    if isinstance(storage, LocalStorage):
        hours = list(by_hour(folders(storage, ROOT)).values())
        # No writer publishes in these: of hours long past, and filled before the last of an hour.
        quiet = [name for opened in hours[:-WATCHED_HOURS] for name in opened]
        filled = [name for opened in hours[-WATCHED_HOURS:] for name in opened[:-1]]
        quiet += [name for name in filled if storage.age(f"{ROOT}/{name}", now) > _QUIET_SECONDS]
        for folder in quiet:
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(storage.root / ROOT / folder)
