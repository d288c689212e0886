"""Lake files in an object store, the cache of this host, and leases.

An object appears atomically. Names are listed every time: there is no modification time to check. Files under
`segments/` never change, so they are cached on this host once read; everything else is requested each time.

**Cache.** $AMAGO_CACHE (else $XDG_CACHE_HOME/amago, else ~/.cache/amago) has a directory for each lake, with `wal tmp
locks index.duckdb` like a local lake, and `cache` with immutable files of the store. The cached files of all lakes take
$AMAGO_CACHE_BYTES at most (else 20 GB, or a tenth of the disk if that is less); the least recently used are evicted. A
mapped file may be evicted: it stays on the disk until it is unmapped.

**Leases.** One process of any host holds a lease at a time. It is an object `locks/NAME.json` with its holder and
duration; the holder renews it well before it expires, always on condition that no other process has written it. An
expired lease may be taken over. Its age is measured by the store's clock only. A released lease has a duration of 0
seconds. Without conditional writes a user declares one host to be the only one that maintains the lake, and its
processes exclude each other by a lock there.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipelines.errors import InputMissing, Locked, StageFailed, StorageError, UsageError
from pipelines.files.atomic import explain_errors
from pipelines.files.locks import hold_exclusively, hold_lock
from pipelines.files.malformed import MALFORMED, RECORD_BYTES
from pipelines.files.user_cache import cache_home
from pipelines.lake.bucket import AlreadyWritten, Bucket, Location, Version, connect

_FIXED = ("segments/", "manifests/")
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
        with self._name_errors(key):
            return self._bucket.read(self._location.object(key))

    def tail(self, key: str, count: int) -> bytes:
        if not key.startswith(_FIXED):
            return self._read_tail(key, count)
        end = f"{key}.tail"
        held = self._read_cached_end(key, count)
        if held is not None:
            return held
        held = self._read_cached_end(end, count)
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
        with self._name_errors(key):
            return self._bucket.status(self._location.object(key)).size

    def age(self, key: str, now: float) -> float:
        with self._name_errors(key):
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
        self._run_parallel(self.fetch, wanted)

    def prefetch_tails(self, keys: Iterable[str], count: int) -> None:
        self._run_parallel(lambda key: self.tail(key, count), list(dict.fromkeys(keys)))

    def room(self) -> int | None:
        return self._cache.room()

    def forget(self, key: str) -> bool:
        end, whole = self._cache.forget(f"{key}.tail"), self._cache.forget(key)
        return end or whole

    def hold(self, name: str, *, what: str) -> contextlib.AbstractContextManager[Callable[[], None]]:
        lease = Lease(self._bucket, self._location.object(f"locks/{name}.json"), what=what)
        return lease.hold(self.local / "locks" / f"{name}.lock")

    def held_by_another(self, name: str) -> str:
        found = self._bucket.find(self._location.object(f"locks/{name}.json"))
        try:
            data = json.loads(found.content) if found is not None else {"holder": "", "renewal": ""}
            return "" if str(data["holder"]).startswith(f"{name_process()} ") else str(data["renewal"])
        except MALFORMED:
            return ""

    @functools.cached_property
    def _cache(self) -> FileCache:
        return FileCache(self.local)

    @contextlib.contextmanager
    def _name_errors(self, key: str) -> Iterator[None]:
        """Give an error of a missing file the whole name."""
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(error.errno, error.strerror, self.url(key)) from error

    def _read_tail(self, key: str, count: int) -> bytes:
        with self._name_errors(key):
            return self._bucket.tail(self._location.object(key), count)

    def _download(self, key: str, part: Path) -> int:
        size = self._sizes.get(key)
        held = self._read_cached_end(f"{key}.tail", size or _TAIL)
        if held is not None and (len(held) == size or len(held) < _TAIL):  # it is the whole file
            return part.write_bytes(held)
        with self._name_errors(key):
            return self._bucket.download(self._location.object(key), part)

    def _run_parallel(self, work: Callable[[str], object], keys: Sequence[str]) -> None:
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

    def _read_cached_end(self, key: str, count: int) -> bytes | None:
        """Read the last `count` bytes of a cached file; None if it is not there."""
        with contextlib.suppress(FileNotFoundError):
            if (path := self._cache.find(key)) is not None:
                with open(path, "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    return os.pread(file.fileno(), min(count, size), max(0, size - count))
        return None


DEFAULT_BYTES, DEFAULT_SHARE = 20 * 10**9, 10
_ROOM, _STRIDE = 10, 50  # an eviction makes room for a tenth; one is considered after each fiftieth downloaded
_STRIPES = 256  # downloads of one host that may go on at once
_FOLDERS = ("wal", "tmp", "locks", "cache")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def host_directory(identity: str, label: str) -> Path:
    """Return the directory of this host for a remote lake, creating it if missing; `label` makes its name readable."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", label)[-40:].strip("-")
    directory = cache_home().absolute() / f"{readable}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    with explain_errors(f"write '{directory}', which this host needs for the lake (AMAGO_CACHE names another place)"):
        for name in _FOLDERS:
            (directory / name).mkdir(parents=True, exist_ok=True)
    return directory


def limit_bytes(home: Path) -> int:
    """Return the maximum size of the cached files below `home`. UsageError if AMAGO_CACHE_BYTES is not a number."""
    text = os.environ.get("AMAGO_CACHE_BYTES")
    if not text:
        return min(DEFAULT_BYTES, shutil.disk_usage(home).total // DEFAULT_SHARE)
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise UsageError(f"AMAGO_CACHE_BYTES is '{text}'", hint="give a number of bytes, e.g. 50G")
    return int(float(found[1]) * _UNITS[found[2].upper()])


class FileCache:
    """Files of one lake by key, under `home`/cache, shared by processes and threads."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.limit = limit_bytes(home)
        self._added = 0

    def find(self, key: str) -> Path | None:
        """Return the file, if it is cached, and mark it as used."""
        path = self._path(key)
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        return path

    def take(self, key: str, download: Callable[[Path], int]) -> Path:
        """Return the file, which `download` writes if it is not cached. One process of the host does; others wait."""
        stripe = f"fetch-{zlib.crc32(key.encode()) % _STRIPES:02x}"
        part = self._home / "tmp" / f"{stripe}.part"  # the lock's holder alone writes it; the next one cleans up
        with hold_lock(self._home / "locks" / f"{stripe}.lock"):
            found = self.find(key)
            if found is not None:
                return found
            try:
                size = self._fill(part, download)
                path = self._keep(key, part)
            finally:
                part.unlink(missing_ok=True)
        self._count(size)
        return path

    def adopt(self, key: str, staged: Path) -> None:
        """Cache a file that was just uploaded."""
        size = staged.stat().st_size
        self._keep(key, staged)
        self._count(size)

    def forget(self, key: str) -> bool:
        """Drop the file; returns whether it was cached."""
        try:
            self._path(key).unlink()
        except FileNotFoundError:
            return False
        return True

    def room(self) -> int:
        """Return the bytes that cached files may take, as far as there is space on the disk."""
        free = shutil.disk_usage(self._home).free
        return self.limit if free >= self.limit else min(self.limit, free + sum(size for _, size, _ in self._files()))

    def evict(self, target: int) -> int:
        """Remove the least recently used files of any lake of this host until `target` bytes are left; returns the
        number of bytes removed.
        """
        with hold_lock(self._home.parent / "evict.lock"):
            files = sorted(self._files(), key=lambda file: file[0])
            left = before = sum(size for _, size, _ in files)
            for _, size, path in files:
                if left <= target:
                    break
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                left -= size
        return before - left

    def _path(self, key: str) -> Path:
        if ".." in key.split("/"):  # a damaged file may name anything
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        return self._home / "cache" / key

    def _keep(self, key: str, file: Path) -> Path:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.utime(file)
        os.replace(file, path)
        return path

    def _fill(self, part: Path, download: Callable[[Path], int]) -> int:
        """Download; if the disk is full, once more after evicting half of the cache."""
        try:
            return download(part)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            part.unlink(missing_ok=True)
            if not self.evict(sum(size for _, size, _ in self._files()) // 2):
                raise
        return download(part)

    def _count(self, size: int) -> None:
        """Count a new file; the size of the cache is checked once enough is new."""
        self._added += size
        if self._added * _STRIDE >= self.limit:
            self._added = 0
            if sum(size for _, size, _ in self._files()) > self.limit:
                self.evict(self.limit - self.limit // _ROOM)

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """Yield time of last use (ns), bytes and path of every cached file of this host."""
        for lake in self._home.parent.iterdir():
            for folder, _, names in os.walk(lake / "cache"):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        path = os.path.join(folder, name)
                        status = os.stat(path)
                        yield status.st_mtime_ns, status.st_size, path


SECONDS = 60.0
_CLOCK_TICK = 1.0  # ages are in whole seconds
DECLARED = "AMAGO_MAINTAINER"
_NO_VERSION: Version = {"e_tag": f'"{"0" * 32}"', "version": "1"}


class _ConditionalWritesUnsupported(Exception):
    """The store does not support conditional writes."""


class Lease:
    """One attempt to hold a lease for `seconds`."""

    def __init__(self, bucket: Bucket, name: str, *, what: str, seconds: float = SECONDS) -> None:
        self._bucket, self._name, self._what, self._seconds = bucket, name, what, seconds
        self._token, self._began = secrets.token_hex(8), time.strftime("%H:%M:%S")
        self._version: Version = {}
        self._until = 0.0
        self._taken = False
        self._done = threading.Event()

    @contextlib.contextmanager
    def hold(self, local: Path) -> Iterator[Callable[[], None]]:
        """Hold the lease; yields a function that raises StageFailed once it is lost.

        Locked if another process has it. `local`: lock file of this host. InputMissing if the store has no conditional
        writes, unless the user declares this host the only maintainer.
        """
        with hold_exclusively(local, what=self._what):
            try:
                self.acquire()
            except _ConditionalWritesUnsupported:
                if os.environ.get(DECLARED, "") in ("", "0"):
                    raise InputMissing(
                        "the object store has no conditional writes, so a host cannot know whether another one "
                        "maintains the lake",
                        hint=f"{DECLARED}=1 declares this host the only one that does",
                    ) from None
                yield lambda: None
                return
            with self.keep_renewing():
                yield self.require

    def acquire(self) -> None:
        """Acquire the lease. Locked reports the holder; ConditionalWritesUnsupported: the store ignores conditions."""
        if self._bucket.is_conditional is False:
            raise _ConditionalWritesUnsupported
        began, found = time.monotonic(), self._bucket.find(self._name)
        try:
            if found is None:
                self._version = self._bucket.put_new(self._name, self._encode(self._seconds))
            else:
                try:
                    data = json.loads(found.content)
                    holder, seconds = str(data["holder"]), float(data["seconds"])
                except MALFORMED:  # an unreadable lease has expired
                    holder, seconds = "", 0.0
                if seconds and self._bucket.now(f"{self._name}.clock") - found.written < seconds + _CLOCK_TICK:
                    raise Locked(f"{self._what}, {holder}", hint="wait for it, then repeat the command")
                self._version = self._bucket.put_over(self._name, self._encode(self._seconds), found.version)
        except AlreadyWritten as error:
            raise Locked(f"{self._what} since this moment", hint="wait for it, then repeat the command") from error
        self._require_conditions()
        self._until = began + self._seconds

    def _require_conditions(self) -> None:
        """Try once, over the lease that we hold, whether the store refuses a write of another version."""
        if self._bucket.is_conditional is None:
            try:
                self._bucket.put_over(self._name, self._encode(0.0), _NO_VERSION)
                self._bucket.is_conditional = False
            except AlreadyWritten:
                self._bucket.is_conditional = True
        if not self._bucket.is_conditional:
            raise _ConditionalWritesUnsupported

    def renew(self) -> None:
        """Renew the lease, unless it was taken over; then `require` raises."""
        began = time.monotonic()
        try:
            self._version = self._bucket.put_over(self._name, self._encode(self._seconds), self._version)
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
                self._bucket.put_over(self._name, self._encode(0.0), self._version)

    def require(self) -> None:
        """Raise StageFailed unless the lease is held."""
        if self._taken or time.monotonic() >= self._until:
            raise StageFailed(f"{self._what}: the lease of this process has run out", hint="repeat the command")

    @contextlib.contextmanager
    def keep_renewing(self) -> Iterator[None]:
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

    def _encode(self, seconds: float) -> bytes:
        said = {"holder": f"{name_process()} since {self._began}", "token": self._token, "seconds": seconds}
        return json.dumps(said | {"renewal": secrets.token_hex(4)}).encode()


def name_process() -> str:
    """Name this process as the holder of a lease."""
    return f"pid {os.getpid()} on {socket.gethostname()}"
