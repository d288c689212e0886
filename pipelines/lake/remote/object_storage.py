"""Lake files in an object store.

An object appears atomically. Names are listed every time: there is no modification time to check. Files under
`segments/` never change, so they are cached on this host once read (see `pipelines.lake.remote.cache`); everything else
is requested each time.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pyarrow import fs

from pipelines.errors import StorageError
from pipelines.lake.remote import lease as remote_lease
from pipelines.lake.remote import s3
from pipelines.lake.remote.cache import FileCache, host_directory
from pipelines.lake.remote.s3 import Location, connect

FIXED = "segments/"
CHUNK = 16 << 20  # bytes in one request
PARALLEL = 16  # requests at once
TAIL = 1 << 14  # bytes of a file's end that are read at least


class ObjectStorage:
    """Files at "s3://bucket/prefix"; see `Storage`. Errors of the store are raised as StorageError."""

    def __init__(self, location: Location | str) -> None:
        self._location = Location.parse(location) if isinstance(location, str) else location
        self._connection = connect(self._location)
        self._conditional = s3.ConditionalWrites(self._connection)
        self._sizes: dict[str, int] = {}  # of immutable files, as last listed

    @functools.cached_property
    def local(self) -> Path:
        return host_directory(self._location.identity, f"{self._location.bucket}-{self._location.prefix}")

    def url(self, key: str = "") -> str:
        return self._location.shown(key) if key else str(self._location)

    def below(self, folder: str) -> ObjectStorage:
        return ObjectStorage(self._location.below(folder))

    def create_folders(self) -> None:
        """Do nothing: there are no folders, and those of this host are created on use."""

    def names(self, folder: str) -> list[str]:
        found = self._list(folder)
        if f"{folder}/".startswith(FIXED):
            self._sizes.update((f"{folder}/{i.base_name}", i.size) for i in found if i.type == fs.FileType.File)
        return [info.base_name for info in found]

    def folders(self, folder: str) -> list[str]:
        return [info.base_name for info in self._list(folder) if info.type == fs.FileType.Directory]

    def listings(self, folders: Sequence[str]) -> Iterator[list[str]]:
        with ThreadPoolExecutor(min(PARALLEL, len(folders) or 1)) as pool:
            yield from pool.map(self.names, folders)

    def stamp(self, folder: str) -> int | None:
        return None

    def read(self, key: str) -> bytes:
        with self._connection.asking() as store, store.open_input_file(self._location.path(key)) as file:
            return file.read()

    def tail(self, key: str, count: int) -> bytes:
        if not key.startswith(FIXED):
            return self._read_tail(key, count)
        whole, end = self._cache.find(key), f"{key}.tail"
        held = _end_of(whole, count) if whole is not None else None
        if held is not None:
            return held
        kept = self._cache.find(end)
        held = _end_of(kept, count) if kept is not None else None
        if held is not None and (len(held) == count or len(held) < TAIL):  # a shorter one is the whole file
            return held
        content = self._read_tail(key, max(count, TAIL))
        with contextlib.suppress(OSError):  # caching is optional
            self._cache.forget(end)
            self._cache.take(end, lambda part: part.write_bytes(content))
        return content[-count:]

    def write(self, key: str, content: bytes) -> None:
        self._put(key, content)

    def create(self, key: str, content: bytes) -> None:
        if s3.is_available():
            try:
                self._conditional.put_new(self._location.object(key), content)
                return
            except s3.AlreadyWritten as error:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.url(key)) from error
            except s3.ConditionalWritesUnsupported:
                pass
        # Of two processes that get here at the same time, both believe to be first; the later one's content stays.
        if self.exists(key):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.url(key))
        self._put(key, content)

    def publish(self, staged: Path, key: str) -> None:
        with open(staged, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._put(key, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")
        if not key.startswith(FIXED):
            staged.unlink()
            return
        self._sizes[key] = size
        with contextlib.suppress(OSError):  # the first reader here would fetch it
            self._cache.adopt(key, staged)
        staged.unlink(missing_ok=True)

    def remove(self, key: str) -> None:
        self.forget(key)
        self._sizes.pop(key, None)
        with contextlib.suppress(FileNotFoundError), self._connection.asking() as store:
            store.delete_file(self._location.path(key))

    def exists(self, key: str) -> bool:
        return self._info(key).type == fs.FileType.File

    def size(self, key: str) -> int:
        if key in self._sizes:
            return self._sizes[key]
        main = key.removesuffix(".blob.arrow") + ".arrow"
        if main != key and main in self._sizes:  # its blob was published first, and would have been listed too
            raise self._missing(key)
        return int(self._found(key).size)

    def age(self, key: str, now: float) -> float:
        return now - float(self._found(key).mtime_ns) / 1e9

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

    def forget(self, key: str) -> bool:
        end, whole = self._cache.forget(f"{key}.tail"), self._cache.forget(key)
        return end or whole

    def hold(self, name: str, *, what: str) -> contextlib.AbstractContextManager[Callable[[], None]]:
        key = self._location.object(f"locks/{name}.json")
        return remote_lease.hold(self._conditional, key, local=self.local / "locks" / f"{name}.lock", what=what)

    @functools.cached_property
    def _cache(self) -> FileCache:
        return FileCache(self.local)

    def _list(self, folder: str) -> list[fs.FileInfo]:
        selector = fs.FileSelector(self._location.path(folder), allow_not_found=True)
        with self._connection.asking() as store:
            found = store.get_file_info(selector)
        return [info for info in found if info.base_name]

    def _info(self, key: str) -> fs.FileInfo:
        with self._connection.asking() as store:
            return store.get_file_info(self._location.path(key))

    def _found(self, key: str) -> fs.FileInfo:
        info = self._info(key)
        if info.type != fs.FileType.File:
            raise self._missing(key)
        return info

    def _missing(self, key: str) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url(key))

    def _put(self, key: str, content: bytes | mmap.mmap) -> None:
        """Write an object in one call: a stream that ends early would leave a shorter object."""
        with self._connection.asking() as store, store.open_output_stream(self._location.path(key)) as stream:
            stream.write(content)

    def _read_tail(self, key: str, count: int) -> bytes:
        with self._connection.asking() as store, store.open_input_file(self._location.path(key)) as file:
            size = file.size()
            return file.read_at(min(count, size), max(0, size - count))

    def _download(self, key: str, part: Path) -> int:
        with self._connection.asking() as store, store.open_input_file(self._location.path(key)) as source:
            size, done = source.size(), 0
            with open(part, "wb") as target:
                while done < size:
                    chunk = source.read_at(min(CHUNK, size - done), done)
                    if not chunk:
                        raise StorageError(f"'{self.url(key)}' ended after {done} of {size} bytes")
                    target.write(chunk)
                    done += len(chunk)
        return done

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
    """Return the last `count` bytes of a local file; None if it is gone."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return os.pread(file.fileno(), min(count, size), max(0, size - count))
    except FileNotFoundError:
        return None
