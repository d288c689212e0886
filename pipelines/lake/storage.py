"""Storage of a lake's files: a local directory or an object store.

A key is a relative path with slashes, e.g. "segments/2026010203/0006...-w.1f.9a0b-00000000.arrow". Methods raise
OSError as the system raises it, FileNotFoundError for a missing key.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pipelines.config.host import find_memory
from pipelines.config.places import STORES, refuse_scheme
from pipelines.errors import InputMissing
from pipelines.files import atomic
from pipelines.files.checksums import checksum
from pipelines.files.locks import hold_exclusively, hold_lock
from pipelines.files.malformed import RECORD_BYTES, read_limited

FRESH_SECONDS = 2.0  # a file may appear within the same tick of the file system's clock
_SCHEMES = tuple(f"{scheme}:" for scheme in STORES)


class Storage(Protocol):
    """Files by key. Files under `segments/` and `manifests/` are never changed, only added and removed."""

    @property
    def local(self) -> Path:
        """A directory of this host for logs, locks, staged files and the index."""

    def url(self, key: str = "") -> str:
        """Return the name of the place, or of a file in it, for messages and records."""

    def below(self, folder: str) -> Storage:
        """Open the storage that begins at `folder` of this one."""

    def create_folders(self) -> None:
        """Create the folders that a new lake needs."""

    def names(self, folder: str) -> list[str]:
        """Return the names in `folder`, which may include folders; none if there is no such folder."""

    def folders(self, folder: str) -> list[str]:
        """List the folders in `folder`."""

    def listings(self, folders: Sequence[str]) -> Iterator[list[str]]:
        """Yield `names` of several folders."""

    def keys(self, after: str, *, limit: int | None = None) -> list[str]:
        """Return the keys that sort after `after`, in order; `limit`: that many at most."""

    def stamp(self, folder: str) -> int | None:
        """Return a value that changes when a name in `folder` appears or disappears: its modification time in ns, 0 if
        there is no such folder; None if unknown.
        """

    def read(self, key: str) -> bytes:
        """Read a file."""

    def tail(self, key: str, count: int) -> bytes:
        """Read the last `count` bytes of a file, or all of it."""

    def write(self, key: str, content: bytes) -> None:
        """Replace a file atomically and durably."""

    def create(self, key: str, content: bytes) -> None:
        """Write a new file; FileExistsError if another process was first."""

    def find(self, key: str, *, limit: int = RECORD_BYTES) -> tuple[bytes, Mapping[str, str]] | None:
        """Return the content of a file of at most `limit` bytes, and its version; None if there is no such file."""

    def swap(self, key: str, content: bytes, version: Mapping[str, str] | None) -> None:
        """Replace this version of a file atomically (None: there is none yet). FileExistsError if there is another."""

    def publish(self, staged: Path, key: str) -> None:
        """Move a synced file of `local`/tmp to its place atomically."""

    def remove(self, *keys: str) -> None:
        """Remove files, as far as they exist."""

    def exists(self, key: str) -> bool:
        """Check whether a file exists."""

    def size(self, key: str) -> int:
        """Look up the size of a file in bytes."""

    def age(self, key: str, now: float) -> float:
        """Count the seconds since a file was written, by the storage's clock."""

    def fetch(self, key: str) -> Path:
        """Return a local file with the content, to be mapped. It may vanish while it is not open."""

    def prefetch(self, keys: Iterable[str]) -> None:
        """Fetch files that will be needed, several at a time. An error recurs when the file is needed."""

    def prefetch_tails(self, keys: Iterable[str], count: int) -> None:
        """Fetch the last `count` bytes of files that will be needed, as `prefetch` does."""

    def room(self) -> int | None:
        """Return how many bytes of files under `segments/` this host keeps at hand: the cache of a remote lake, the
        memory for a local one; None if unknown."""

    def forget(self, key: str) -> bool:
        """Drop this host's copy of a remote file; returns whether there was one."""

    def hold(self, name: str, *, what: str) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Hold the lease `name` exclusively; Locked reports the holder, and `what`. Yields a function that raises
        StageFailed once the lease is lost.
        """

    def held_by_another(self, name: str) -> str:
        """Return a token that changes while another process holds the lease `name`, or holds it again and again; "" if
        this process was the last to hold it, or if nobody knows."""


HEADER = "lake.json"


def require_lake(storage: Storage) -> None:
    """Raise InputMissing if there is no lake any more. To a reader a removed one looks like one without segments."""
    try:
        there = storage.exists(HEADER)
    except OSError as error:
        raise atomic.make_storage_error(error, f"read '{storage.url(HEADER)}'") from error
    if not there:
        raise InputMissing(f"there is no lake at '{storage.url()}' any more", hint="it was removed or moved")


class LocalStorage:
    """A directory."""

    def __init__(self, root: Path) -> None:
        self.root = self.local = root

    def url(self, key: str = "") -> str:
        return str(self.root / key)

    def below(self, folder: str) -> LocalStorage:
        return LocalStorage(self.root / folder)

    def create_folders(self) -> None:
        for name in ("schemas", "segments", "wal", "tmp", "locks"):
            (self.root / name).mkdir(parents=True, exist_ok=True)

    def names(self, folder: str) -> list[str]:
        try:
            return os.listdir(self.root / folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def folders(self, folder: str) -> list[str]:
        try:
            with os.scandir(self.root / folder) as entries:
                return [entry.name for entry in entries if _is_folder(entry)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def listings(self, folders: Sequence[str]) -> Iterator[list[str]]:
        return map(self.names, folders)

    def keys(self, after: str, *, limit: int | None = None) -> list[str]:
        found = (
            os.path.relpath(os.path.join(top, name), self.root)
            for top, _, names in os.walk(self.root)
            for name in names
        )
        return sorted(key for key in found if key > after)[:limit]

    def stamp(self, folder: str) -> int | None:
        try:
            return os.stat(f"{self.root}/{folder}").st_mtime_ns  # called often: a Path costs more than the call
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def read(self, key: str) -> bytes:
        return read_limited(self.root / key)

    def tail(self, key: str, count: int) -> bytes:
        descriptor = os.open(self.root / key, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would block
        try:
            size = os.fstat(descriptor).st_size
            return os.pread(descriptor, min(count, size), max(0, size - count))
        finally:
            os.close(descriptor)

    def write(self, key: str, content: bytes) -> None:
        staged, path = self._stage(key, content)
        try:
            atomic.publish(staged, path)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise

    def create(self, key: str, content: bytes) -> None:
        atomic.publish_new(*self._stage(key, content))

    def _stage(self, key: str, content: bytes) -> tuple[Path, Path]:
        path = self.root / key
        self._make_parent(path)
        return atomic.stage(path.parent, f".{path.name}", lambda file: file.write(content)), path

    def find(self, key: str, *, limit: int = RECORD_BYTES) -> tuple[bytes, Mapping[str, str]] | None:
        try:
            content = read_limited(self.root / key, limit)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return content, {"checksum": checksum(content)}

    def swap(self, key: str, content: bytes, version: Mapping[str, str] | None) -> None:
        with hold_lock(self.root / "locks" / "swap.lock"):
            found = self.find(key)
            if (None if found is None else found[1]) != version:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.url(key))
            self.write(key, content)

    def publish(self, staged: Path, key: str) -> None:
        path = self.root / key
        self._make_parent(path)
        try:
            atomic.publish(staged, path)
        except FileNotFoundError:  # its folder was empty and has just been swept
            if not staged.exists():
                raise
            self._make_parent(path)
            atomic.publish(staged, path)

    def remove(self, *keys: str) -> None:
        for key in keys:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(self.root / key)

    def exists(self, key: str) -> bool:
        return (self.root / key).is_file()

    def size(self, key: str) -> int:
        return os.stat(self.root / key).st_size

    def age(self, key: str, now: float) -> float:
        return now - os.stat(self.root / key).st_mtime

    def fetch(self, key: str) -> Path:
        return self.root / key

    def prefetch(self, keys: Iterable[str]) -> None:
        """Do nothing: files are local."""

    def prefetch_tails(self, keys: Iterable[str], count: int) -> None:
        """Do nothing: files are local."""

    def room(self) -> int | None:
        return find_memory()

    def forget(self, key: str) -> bool:
        return False

    @contextlib.contextmanager
    def hold(self, name: str, *, what: str) -> Iterator[Callable[[], None]]:
        with hold_exclusively(self.root / "locks" / f"{name}.lock", what=what):
            yield lambda: None

    def held_by_another(self, name: str) -> str:
        return ""

    def _make_parent(self, path: Path) -> None:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.sync_directory(path.parent.parent)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link that leads to itself leads nowhere
            return False
        raise


def is_remote(location: Path | str) -> bool:
    """Return whether `location` names an object store (a Path has lost one of the slashes of "s3://")."""
    return str(location).startswith(_SCHEMES)


def connect(location: Path | str) -> Storage:
    """Return the storage at a directory or at "s3://bucket/prefix" (gs://, az://). UsageError for any other scheme."""
    if is_remote(location):
        from pipelines.lake.object_storage import ObjectStorage

        return ObjectStorage(str(location))
    refuse_scheme(location)
    return LocalStorage(Path(location))
