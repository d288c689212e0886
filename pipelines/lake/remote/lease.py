"""A lease in an object store, held by one process of any host at a time.

It is an object `locks/NAME.json` with its holder and duration; the holder renews it well before it expires, always on
condition that no other process has written it. An expired lease may be taken over. Its age is measured by the store's
clock only. A released lease has a duration of 0 seconds.

Conditional writes need boto3. Without it, a user declares one host to be the only one that maintains the lake, and its
processes exclude each other by a lock there.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pipelines.errors import InputMissing, Locked, StageFailed, StorageError
from pipelines.files.locks import exclusive
from pipelines.files.malformed import MALFORMED
from pipelines.lake.remote import s3
from pipelines.lake.remote.s3 import ConditionalWrites

SECONDS = 60.0
CLOCK_TICK = 1.0  # ages are in whole seconds
DECLARED = "AMAGO_MAINTAINER"


@contextlib.contextmanager
def hold(
    store: ConditionalWrites, name: str, *, local: Path, what: str, seconds: float = SECONDS
) -> Iterator[Callable[[], None]]:
    """Hold the lease `name`; yields a function that raises StageFailed once it is lost.

    Locked if another process has it. `local`: lock file of this host. InputMissing without boto3, unless the user
    declares this host the only maintainer.
    """
    with exclusive(local, what=what):
        if not s3.is_available():
            _require_declaration()
            yield lambda: None
            return
        lease = Lease(store, name, what=what, seconds=seconds)
        try:
            lease.acquire()
        except s3.ConditionalWritesUnsupported:
            _require_declaration("the object store does not support conditional writes, so")
            yield lambda: None
            return
        with lease.renewed():
            yield lease.require


def _require_declaration(why: str = f"without boto3 ({s3.INSTALL})") -> None:
    if os.environ.get(DECLARED, "") in ("", "0"):
        raise InputMissing(
            f"{why} a host cannot know whether another one maintains the lake",
            hint=f"{DECLARED}=1 declares this host the only one that does",
        )


class Lease:
    """One attempt to hold a lease for `seconds`."""

    def __init__(self, store: ConditionalWrites, name: str, *, what: str, seconds: float = SECONDS) -> None:
        self._store, self._name, self._what, self._seconds = store, name, what, seconds
        self._token, self._began = secrets.token_hex(8), time.strftime("%H:%M:%S")
        self._tag = ""
        self._until = 0.0
        self._taken = False
        self._done = threading.Event()

    def acquire(self) -> None:
        """Acquire the lease. Locked reports the holder."""
        began, found = time.monotonic(), self._store.get(self._name)
        try:
            if found is None:
                self._tag = self._store.put_new(self._name, self._text(self._seconds))
            else:
                holder, seconds = _parse(found.content)
                if seconds and found.age < seconds + CLOCK_TICK:
                    raise Locked(f"{self._what}, {holder}", hint="wait for it, then repeat the command")
                self._tag = self._store.put_over(self._name, self._text(self._seconds), found.tag)
        except s3.AlreadyWritten as error:
            raise Locked(f"{self._what} since this moment", hint="wait for it, then repeat the command") from error
        self._until = began + self._seconds

    def renew(self) -> None:
        """Renew the lease, unless it was taken over; then `require` raises."""
        began = time.monotonic()
        try:
            self._tag = self._store.put_over(self._name, self._text(self._seconds), self._tag)
            self._until = began + self._seconds
        except s3.AlreadyWritten:
            self._taken = not self._is_ours()

    def release(self) -> None:
        """Release the lease, if it is still ours. If the store is unavailable, the lease expires by itself."""
        with contextlib.suppress(s3.AlreadyWritten, StorageError):
            self._store.put_over(self._name, self._text(0.0), self._tag)

    def require(self) -> None:
        """Raise StageFailed unless the lease is held."""
        if self._taken or time.monotonic() >= self._until:
            raise StageFailed(f"{self._what}: the lease of this process has run out", hint="repeat the command")

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the lease in the background, and release it at the end."""
        thread = threading.Thread(target=self._keep, name="amago-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()
            self.release()

    def _keep(self) -> None:
        while not self._taken and not self._done.wait(self._seconds / 4):
            with contextlib.suppress(StorageError):  # retried until the lease expires
                self.renew()

    def _is_ours(self) -> bool:
        """Return whether the object is what we wrote: the response to an attempt may have been lost."""
        found = self._store.get(self._name)
        if found is None or self._token.encode() not in found.content:
            return False
        self._tag, self._until = found.tag, time.monotonic() + self._seconds - found.age
        return True

    def _text(self, seconds: float) -> bytes:
        holder = f"pid {os.getpid()} on {socket.gethostname()} since {self._began}"
        return json.dumps(
            {"holder": holder, "token": self._token, "seconds": seconds, "renewal": secrets.token_hex(4)}
        ).encode()


def _parse(content: bytes) -> tuple[str, float]:
    """Return the holder and duration of a lease; an unreadable one has expired."""
    try:
        data = json.loads(content)
        return str(data["holder"]), float(data["seconds"])
    except MALFORMED:
        return "an unknown process", 0.0
