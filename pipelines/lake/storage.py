"""Where the files of a lake lie: in a local directory, or in an object store.

A key is a relative path with slashes, e.g. "segments/2026010203/0006…-w.1f.9a0b-00000000.arrow". Methods raise
OSError as the system gives it, FileNotFoundError for a key that is not there.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from pipelines.config.lakes import refuse_scheme
from pipelines.files import atomic
from pipelines.files.locks import exclusive
from pipelines.files.malformed import read_limited

FRESH_SECONDS = 2.0  # a file may appear in the same tick of the file system's clock
_SCHEME = "s3:"


class Storage(Protocol):
    """Files by key. What lies under `segments/` is never changed, only added and removed."""

    @property
    def local(self) -> Path:
        """A directory of this host for logs, locks, files on their way and the index."""

    def url(self, key: str = "") -> str:
        """What messages and records call the place, or a file in it."""

    def below(self, folder: str) -> Storage:
        """The storage that begins at `folder` of this one."""

    def create_folders(self) -> None:
        """Make what a new lake needs before its first file."""

    def names(self, folder: str) -> list[str]:
        """Names of what lies directly in `folder`, folders perhaps among it; none if there is no such folder."""

    def folders(self, folder: str) -> list[str]:
        """Names of the folders directly in `folder`."""

    def listings(self, folders: Sequence[str]) -> Iterator[list[str]]:
        """As `names`, for several folders."""

    def stamp(self, folder: str) -> int | None:
        """Something that moves when a name appears in `folder` or goes: its modification time in ns, 0 if there is no
        such folder; None where that is not known.
        """

    def read(self, key: str) -> bytes:
        """The content of a file."""

    def tail(self, key: str, count: int) -> bytes:
        """The last `count` bytes of a file, or all of it."""

    def write(self, key: str, content: bytes) -> None:
        """Replace a file in one step that survives a power cut."""

    def create(self, key: str, content: bytes) -> None:
        """As `write`; FileExistsError when somebody was first."""

    def publish(self, staged: Path, key: str) -> None:
        """Give a synced file of `local`/tmp its place in one step; it is gone from there afterwards."""

    def remove(self, key: str) -> None:
        """Remove a file; nothing happens if it is gone."""

    def exists(self, key: str) -> bool:
        """Whether there is such a file."""

    def size(self, key: str) -> int:
        """Bytes of a file."""

    def age(self, key: str, now: float) -> float:
        """Seconds since the file was written, as the storage's clock has it."""

    def fetch(self, key: str) -> Path:
        """A local file with the content, to be mapped. It may vanish as long as it is not open."""

    def prefetch(self, keys: Iterable[str]) -> None:
        """These will be fetched: get what is not here, several at a time. What fails then fails when it is needed."""

    def prefetch_tails(self, keys: Iterable[str], count: int) -> None:
        """As `prefetch`, for files of which the last `count` bytes will be read."""

    def forget(self, key: str) -> bool:
        """Drop what this host has of a file that lies elsewhere, and say whether there was something."""

    def hold(self, name: str, *, what: str) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Be the only process that holds `name`; Locked says who holds it, and that it is `what`. Gives a function
        that raises StageFailed once it is not held any more.
        """


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

    def stamp(self, folder: str) -> int | None:
        try:
            return os.stat(f"{self.root}/{folder}").st_mtime_ns  # looked at often: a Path costs more than the look
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def read(self, key: str) -> bytes:
        return read_limited(self.root / key)

    def tail(self, key: str, count: int) -> bytes:
        descriptor = os.open(self.root / key, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait
        try:
            size = os.fstat(descriptor).st_size
            return os.pread(descriptor, min(count, size), max(0, size - count))
        finally:
            os.close(descriptor)

    def write(self, key: str, content: bytes) -> None:
        path = self.root / key
        self._make_room(path)
        staged = atomic.stage(path.parent, f".{path.name}", lambda file: file.write(content))
        try:
            atomic.publish(staged, path)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise

    def create(self, key: str, content: bytes) -> None:
        path = self.root / key
        self._make_room(path)
        staged = atomic.stage(path.parent, f".{path.name}", lambda file: file.write(content))
        atomic.publish_new(staged, path)

    def publish(self, staged: Path, key: str) -> None:
        path = self.root / key
        self._make_room(path)
        try:
            atomic.publish(staged, path)
        except FileNotFoundError:  # its folder, an empty one, was swept in this moment
            if not staged.exists():
                raise
            self._make_room(path)
            atomic.publish(staged, path)

    def remove(self, key: str) -> None:
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
        """They are here."""

    def prefetch_tails(self, keys: Iterable[str], count: int) -> None:
        """They are here."""

    def forget(self, key: str) -> bool:
        return False

    @contextlib.contextmanager
    def hold(self, name: str, *, what: str) -> Iterator[Callable[[], None]]:
        with exclusive(self.root / "locks" / f"{name}.lock", what=what):
            yield lambda: None

    def _make_room(self, path: Path) -> None:
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
    """Whether `location` names an object store (a Path has lost one of the slashes of "s3://")."""
    return str(location).startswith(_SCHEME)


def connect(location: Path | str) -> Storage:
    """The storage at a directory or at "s3://bucket/prefix". UsageError for any other scheme."""
    if is_remote(location):
        from pipelines.lake.remote.object_storage import ObjectStorage

        return ObjectStorage(str(location))
    refuse_scheme(location)
    return LocalStorage(Path(location))
