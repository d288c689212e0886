"""The cache of a host for lakes in object stores.

$AMAGO_CACHE (else $XDG_CACHE_HOME/amago, else ~/.cache/amago) has a directory for each lake, with `wal tmp locks
index.duckdb` like a local lake, and `cache` with immutable files of the store. The cached files of all lakes take
$AMAGO_CACHE_BYTES at most (else 20 GB, or a tenth of the disk if that is less); the least recently used are evicted. A
mapped file may be evicted: it stays on the disk until it is unmapped.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from pipelines.errors import UsageError
from pipelines.files.atomic import explained
from pipelines.files.locks import hold_lock
from pipelines.files.user_cache import cache_home

DEFAULT_BYTES, DEFAULT_SHARE = 20 * 10**9, 10
_ROOM, _STRIDE = 10, 50  # an eviction makes room for a tenth; one is considered after each fiftieth downloaded
_STRIPES = 256  # downloads of one host that may go on at once
_FOLDERS = ("wal", "tmp", "locks", "cache")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def host_directory(identity: str, label: str) -> Path:
    """Return the directory of this host for a remote lake, creating it if missing; `label` makes its name readable."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", label)[-40:].strip("-")
    directory = cache_home().absolute() / f"{readable}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    with explained(f"write '{directory}', which this host needs for the lake (AMAGO_CACHE names another place)"):
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
