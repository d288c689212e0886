"""Lake files in an object store.

An object appears atomically. Names are listed every time: there is no modification time to check. Files under
`segments/` never change, so they are cached on this host once read (see `pipelines.lake.remote.cache`); everything else
is requested each time.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipelines.files.malformed import RECORD_BYTES
from pipelines.lake.remote import lease as remote_lease
from pipelines.lake.remote.bucket import AlreadyWritten, Location, Version, connect
from pipelines.lake.remote.cache import FileCache, host_directory

_FIXED = "segments/"
PARALLEL = 16  # requests at once
_TAIL = 1 << 14  # bytes of a file's end that are read at least


class ObjectStorage:
    """Files at "s3://bucket/prefix" (gs://, az://); see `Storage`. Errors of the store are raised as StorageError."""

    def __init__(self, location: Location | str) -> None:
        self._location = Location.parse(location) if isinstance(location, str) else location
        self._bucket = connect(self._location)
        self._sizes: dict[str, int] = {}  # of immutable files, as last listed

    @functools.cached_property
    def local(self) -> Path:
        return host_directory(self._location.identity, f"{self._location.bucket}-{self._location.prefix}")

    def url(self, key: str = "") -> str:
        return self._location.format_place(key) if key else str(self._location)

    def below(self, folder: str) -> ObjectStorage:
        return ObjectStorage(self._location.below(folder))

    def create_folders(self) -> None:
        """Do nothing: there are no folders, and those of this host are created on use."""

    def names(self, folder: str) -> list[str]:
        folders, files = self._bucket.folder(self._location.object(folder))
        if f"{folder}/".startswith(_FIXED):
            self._sizes.update((f"{folder}/{name}", size) for name, size in files.items())
        return [*folders, *files]

    def folders(self, folder: str) -> list[str]:
        return self._bucket.folder(self._location.object(folder))[0]

    def listings(self, folders: Sequence[str]) -> Iterator[list[str]]:
        with ThreadPoolExecutor(min(PARALLEL, len(folders) or 1)) as pool:
            yield from pool.map(self.names, folders)

    def keys(self, after: str, *, limit: int | None = None) -> list[str]:
        found = self._bucket.keys(self._location.prefix, after=after, limit=limit)
        self._sizes.update((key, size) for key, size in found.items() if key.startswith(_FIXED))
        return list(found)

    def stamp(self, folder: str) -> int | None:
        return None

    def read(self, key: str) -> bytes:
        with self._named(key):
            return self._bucket.read(self._location.object(key))

    def tail(self, key: str, count: int) -> bytes:
        if not key.startswith(_FIXED):
            return self._read_tail(key, count)
        whole, end = self._cache.find(key), f"{key}.tail"
        held = _end_of(whole, count) if whole is not None else None
        if held is not None:
            return held
        kept = self._cache.find(end)
        held = _end_of(kept, count) if kept is not None else None
        if held is not None and (len(held) == count or len(held) < _TAIL):  # a shorter one is the whole file
            return held
        content = self._read_tail(key, max(count, _TAIL))
        with contextlib.suppress(OSError):  # caching is optional
            self._cache.forget(end)
            self._cache.take(end, lambda part: part.write_bytes(content))
        return content[-count:]

    def write(self, key: str, content: bytes) -> None:
        self._bucket.put(self._location.object(key), content)

    def create(self, key: str, content: bytes) -> None:
        # Asked first for the sake of a store that ignores the condition. There, of two processes that get here at the
        # same time, both believe to be first; the later one's content stays.
        try:
            if self.exists(key):
                raise AlreadyWritten
            self._bucket.put_new(self._location.object(key), content)
        except AlreadyWritten as error:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.url(key)) from error

    def find(self, key: str, *, limit: int = RECORD_BYTES) -> tuple[bytes, Version] | None:
        try:
            found = self._bucket.get(self._location.object(key), limit=limit)
        except FileNotFoundError:
            return None
        return found.content, found.version

    def swap(self, key: str, content: bytes, version: Version | None) -> None:
        name = self._location.object(key)
        try:
            if version is None:
                self._bucket.put_new(name, content)
            else:
                self._bucket.put_over(name, content, version)
        except AlreadyWritten as error:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.url(key)) from error

    def publish(self, staged: Path, key: str) -> None:
        self._bucket.put(self._location.object(key), staged)
        if not key.startswith(_FIXED):
            staged.unlink()
            return
        self._sizes[key] = staged.stat().st_size
        with contextlib.suppress(OSError):  # the first reader here would fetch it
            self._cache.adopt(key, staged)
        staged.unlink(missing_ok=True)

    def remove(self, *keys: str) -> None:
        for key in keys:
            self.forget(key)
            self._sizes.pop(key, None)
        self._bucket.remove([self._location.object(key) for key in keys])

    def exists(self, key: str) -> bool:
        return self._bucket.exists(self._location.object(key))

    def size(self, key: str) -> int:
        if key in self._sizes:
            return self._sizes[key]
        main = key.removesuffix(".blob.arrow") + ".arrow"
        if main != key and main in self._sizes:  # its blob was published first, and would have been listed too
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url(key))
        with self._named(key):
            return self._bucket.status(self._location.object(key)).size

    def age(self, key: str, now: float) -> float:
        with self._named(key):
            return now - self._bucket.status(self._location.object(key)).written

    def fetch(self, key: str) -> Path:
        found = self._cache.find(key)
        return found if found is not None else self._cache.take(key, functools.partial(self._download, key))

    def prefetch(self, keys: Iterable[str]) -> None:
        missing = [key for key in dict.fromkeys(keys) if self._cache.find(key) is None]
        room = self._cache.limit // 2  # more would evict what was just fetched
        wanted = []
        for key in missing:
            room -= self._sizes.get(key, 0)
            if room < 0:
                break
            wanted.append(key)
        self._at_once(self.fetch, wanted)

    def prefetch_tails(self, keys: Iterable[str], count: int) -> None:
        self._at_once(lambda key: self.tail(key, count), list(dict.fromkeys(keys)))

    def room(self) -> int | None:
        return self._cache.room()

    def forget(self, key: str) -> bool:
        end, whole = self._cache.forget(f"{key}.tail"), self._cache.forget(key)
        return end or whole

    def hold(self, name: str, *, what: str) -> contextlib.AbstractContextManager[Callable[[], None]]:
        key = self._location.object(f"locks/{name}.json")
        return remote_lease.hold(self._bucket, key, local=self.local / "locks" / f"{name}.lock", what=what)

    def held_by_another(self, name: str) -> str:
        return remote_lease.held_by_another(self._bucket, self._location.object(f"locks/{name}.json"))

    @functools.cached_property
    def _cache(self) -> FileCache:
        return FileCache(self.local)

    @contextlib.contextmanager
    def _named(self, key: str) -> Iterator[None]:
        """Give an error of a missing file the whole name."""
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(error.errno, error.strerror, self.url(key)) from error

    def _read_tail(self, key: str, count: int) -> bytes:
        with self._named(key):
            return self._bucket.tail(self._location.object(key), count)

    def _download(self, key: str, part: Path) -> int:
        end, size = self._cache.find(f"{key}.tail"), self._sizes.get(key)
        held = _end_of(end, size or _TAIL) if end is not None else None
        if held is not None and (len(held) == size or len(held) < _TAIL):  # it is the whole file
            return part.write_bytes(held)
        with self._named(key):
            return self._bucket.download(self._location.object(key), part)

    def _at_once(self, work: Callable[[str], object], keys: Sequence[str]) -> None:
        """Send several requests at a time. Errors are ignored: they recur when a file is needed."""
        if not keys:
            return
        failed: list[OSError] = []

        def attempt(key: str) -> None:
            if failed:
                return
            try:
                work(key)
            except FileNotFoundError:
                pass
            except OSError as error:
                failed.append(error)  # the others would fail too

        with ThreadPoolExecutor(min(PARALLEL, len(keys))) as pool:
            list(pool.map(attempt, keys))


def _end_of(path: Path, count: int) -> bytes | None:
    """Read the last `count` bytes of a local file; None if it is gone."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return os.pread(file.fileno(), min(count, size), max(0, size - count))
    except FileNotFoundError:
        return None
