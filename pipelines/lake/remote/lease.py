"""A lease in an object store, held by one process of any host at a time.

It is an object `locks/NAME.json` with its holder and duration; the holder renews it well before it expires, always on
condition that no other process has written it. An expired lease may be taken over. Its age is measured by the store's
clock only. A released lease has a duration of 0 seconds.

Without conditional writes a user declares one host to be the only one that maintains the lake, and its processes
exclude each other by a lock there.
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
from pipelines.lake.remote.bucket import AlreadyWritten, Bucket, Version

SECONDS = 60.0
_CLOCK_TICK = 1.0  # ages are in whole seconds
DECLARED = "AMAGO_MAINTAINER"
_NO_VERSION: Version = {"e_tag": f'"{"0" * 32}"', "version": "1"}


class _ConditionalWritesUnsupported(Exception):
    """The store does not support conditional writes."""


@contextlib.contextmanager
def hold(
    bucket: Bucket, name: str, *, local: Path, what: str, seconds: float = SECONDS
) -> Iterator[Callable[[], None]]:
    """Hold the lease `name`; yields a function that raises StageFailed once it is lost.

    Locked if another process has it. `local`: lock file of this host. InputMissing if the store has no conditional
    writes, unless the user declares this host the only maintainer.
    """
    with exclusive(local, what=what):
        lease = Lease(bucket, name, what=what, seconds=seconds)
        try:
            lease.acquire()
        except _ConditionalWritesUnsupported:
            if os.environ.get(DECLARED, "") in ("", "0"):
                raise InputMissing(
                    "the object store has no conditional writes, so a host cannot know whether another one maintains "
                    "the lake",
                    hint=f"{DECLARED}=1 declares this host the only one that does",
                ) from None
            yield lambda: None
            return
        with lease.renewed():
            yield lease.require


class Lease:
    """One attempt to hold a lease for `seconds`."""

    def __init__(self, bucket: Bucket, name: str, *, what: str, seconds: float = SECONDS) -> None:
        self._bucket, self._name, self._what, self._seconds = bucket, name, what, seconds
        self._token, self._began = secrets.token_hex(8), time.strftime("%H:%M:%S")
        self._version: Version = {}
        self._until = 0.0
        self._taken = False
        self._done = threading.Event()

    def acquire(self) -> None:
        """Acquire the lease. Locked reports the holder; ConditionalWritesUnsupported: the store ignores conditions."""
        if self._bucket.is_conditional is False:
            raise _ConditionalWritesUnsupported
        began, found = time.monotonic(), self._bucket.find(self._name)
        try:
            if found is None:
                self._version = self._bucket.put_new(self._name, self._text(self._seconds))
            else:
                holder, seconds = _parse(found.content)
                if seconds and self._bucket.now(f"{self._name}.clock") - found.written < seconds + _CLOCK_TICK:
                    raise Locked(f"{self._what}, {holder}", hint="wait for it, then repeat the command")
                self._version = self._bucket.put_over(self._name, self._text(self._seconds), found.version)
        except AlreadyWritten as error:
            raise Locked(f"{self._what} since this moment", hint="wait for it, then repeat the command") from error
        self._require_conditions()
        self._until = began + self._seconds

    def _require_conditions(self) -> None:
        """Try once, over the lease that we hold, whether the store refuses a write of another version."""
        if self._bucket.is_conditional is None:
            try:
                self._bucket.put_over(self._name, self._text(0.0), _NO_VERSION)
                self._bucket.is_conditional = False
            except AlreadyWritten:
                self._bucket.is_conditional = True
        if not self._bucket.is_conditional:
            raise _ConditionalWritesUnsupported

    def renew(self) -> None:
        """Renew the lease, unless it was taken over; then `require` raises."""
        began = time.monotonic()
        try:
            self._version = self._bucket.put_over(self._name, self._text(self._seconds), self._version)
            self._until = began + self._seconds
        except AlreadyWritten:
            found = self._bucket.find(self._name)  # perhaps of an attempt of ours whose response was lost
            self._taken = found is None or self._token.encode() not in found.content
            if found is not None:
                self._version = found.version

    def release(self) -> None:
        """Release the lease, if it is still ours. If the store is unavailable, the lease expires by itself."""
        with contextlib.suppress(AlreadyWritten, StorageError):
            if not self._taken:
                self._bucket.put_over(self._name, self._text(0.0), self._version)

    def require(self) -> None:
        """Raise StageFailed unless the lease is held."""
        if self._taken or time.monotonic() >= self._until:
            raise StageFailed(f"{self._what}: the lease of this process has run out", hint="repeat the command")

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the lease in the background, and release it at the end."""

        def keep() -> None:
            while not self._taken and not self._done.wait(self._seconds / 4):
                with contextlib.suppress(StorageError):  # retried until the lease expires
                    self.renew()

        thread = threading.Thread(target=keep, name="amago-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()
            self.release()

    def _text(self, seconds: float) -> bytes:
        holder = f"{_this_process()} since {self._began}"
        return json.dumps(
            {"holder": holder, "token": self._token, "seconds": seconds, "renewal": secrets.token_hex(4)}
        ).encode()


def held_by_another(bucket: Bucket, name: str) -> str:
    """Return what the last write of the lease `name` is known by, which acquires, renews or releases it; "" if this
    process was the last to hold it, or none.
    """
    found = bucket.find(name)
    try:
        data = json.loads(found.content) if found is not None else {"holder": "", "renewal": ""}
        return "" if str(data["holder"]).startswith(f"{_this_process()} ") else str(data["renewal"])
    except MALFORMED:
        return ""


def _this_process() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


def _parse(content: bytes) -> tuple[str, float]:
    """Read the holder and duration of a lease; an unreadable one has expired."""
    try:
        data = json.loads(content)
        return str(data["holder"]), float(data["seconds"])
    except MALFORMED:
        return "an unknown process", 0.0
