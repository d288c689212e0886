"""Advisory locks between the processes of a host.

`hold_lock` waits its turn; `hold_exclusively` refuses, says who holds it, and leaves nothing where nothing was made;
`find_holder` says who holds one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipelines.errors import Locked
from pipelines.files.atomic import explain_errors
from pipelines.files.malformed import open_regular

_HOLDER = re.compile(r"pid (\d{1,10}) on (\S{1,255}) since (\S{1,32})")


@dataclass(frozen=True)
class LockHolder:
    """The process that holds a lock: `since` as it wrote it, a time of day."""

    pid: int
    host: str
    since: str


def find_holder(file: Path) -> LockHolder | None:
    """Find who holds the lock on `file`; None if nobody does, as far as this host knows.

    A process of this host that is gone holds nothing: then the lock is not tried, so that a process that takes it at
    this moment is not refused.
    """
    try:
        with open_regular(file) as handle:
            found = _HOLDER.match(handle.read(400).decode(errors="replace"))
            if found is None:
                return None
            named = LockHolder(int(found[1]), found[2], found[3])
            if named.host == socket.gethostname():
                with contextlib.suppress(PermissionError):  # it exists, and is another user's
                    os.kill(named.pid, 0)
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return named
    except (OSError, OverflowError):  # ProcessLookupError is an OSError
        return None
    return None


@contextmanager
def hold_exclusively(file: Path, *, what: str) -> Iterator[None]:
    """Hold a lock on `file`, made with its directories if missing; Locked (exit 75) says who holds `what`.

    Where nothing else was made beside it, it goes again, with the directories made for it.
    """
    with explain_errors(f"write '{file.parent}'"):
        made = [path for path in (file.parent, *file.parent.parents) if not path.exists()]
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = _claim(file, what)
    try:
        who = f"pid {os.getpid()} on {socket.gethostname()} since {time.strftime('%H:%M:%S')}\n"
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(handle, 0)
            os.pwrite(handle, who.encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            if all(entry.name.startswith(".") and entry.name.endswith(".lock") for entry in os.scandir(file.parent)):
                file.unlink()
                for directory in made:
                    directory.rmdir()
        os.close(handle)


def _claim(file: Path, what: str) -> int:
    """Lock the file and return its descriptor. One that its last holder removed meanwhile is opened again."""
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_nlink:
                return handle
            os.close(handle)
        except BlockingIOError as error:
            who = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise Locked(f"{what}, {who}", hint="wait for it, or choose another directory") from error


@contextmanager
def hold_lock(path: Path, *, shared: bool = False, wait: bool = True) -> Iterator[None]:
    """Hold a flock on `path` (made if missing, as its folder: a copied lake has lost that), waiting for it, or raising
    BlockingIOError without `wait`. Threads of one process exclude each other too.
    """
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
