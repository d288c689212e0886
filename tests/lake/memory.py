"""An object store in memory, whose requests are counted, for what a server would be too slow for."""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

PAGE = 1000


class MemoryStorage:
    """Files of a lake by key, as `pipelines.lake.storage.Storage`; `requests` are those that S3 would have counted.

    `spend` is called with the number of requests that follow one another.
    """

    def __init__(self, local: Path, *, spend: Callable[[int], None] = lambda count: None) -> None:
        self.local = local
        for name in ("wal", "tmp", "locks", "cache"):
            (local / name).mkdir(parents=True, exist_ok=True)
        self.requests: Counter[str] = Counter()
        self._spend = spend
        self._files: dict[str, bytes] = {}
        self._sorted: list[str] = []

    def put(self, keys: Iterable[str], content: bytes = b"") -> None:
        """Add files as others would: without a request of ours."""
        new = [key for key in keys if key not in self._files]
        self._files.update((key, content) for key in new)
        if len(new) > 100 + len(self._sorted) // 20:
            self._sorted = sorted(self._files)
        else:
            for key in new:
                bisect.insort(self._sorted, key)

    def drop(self, key: str) -> None:
        """Remove a file as others would."""
        del self._files[key]
        del self._sorted[bisect.bisect_left(self._sorted, key)]

    def url(self, key: str = "") -> str:
        return f"memory://{key}"

    def below(self, folder: str) -> MemoryStorage:
        raise NotImplementedError

    def create_folders(self) -> None:
        pass

    def names(self, folder: str) -> list[str]:
        inside = self._inside(folder)
        self._count("LIST", max(1, -(-len(inside) // PAGE)))
        return list(dict.fromkeys(key[len(folder) + 1 :].partition("/")[0] for key in inside))

    def folders(self, folder: str) -> list[str]:
        inside = [key[len(folder) + 1 :] for key in self._inside(folder)]
        self._count("LIST")
        return list(dict.fromkeys(key.partition("/")[0] for key in inside if "/" in key))

    def listings(self, folders: Sequence[str]) -> Iterator[list[str]]:
        return map(self.names, folders)

    def keys(self, after: str, *, limit: int | None = None) -> list[str]:
        first = bisect.bisect_right(self._sorted, after)
        found = self._sorted[first : None if limit is None else first + limit]
        self._count("LIST", max(1, -(-len(found) // PAGE)))
        return found

    def stamp(self, folder: str) -> int | None:
        return None

    def read(self, key: str) -> bytes:
        self._count("GET")
        if key not in self._files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        return self._files[key]

    def tail(self, key: str, count: int) -> bytes:
        return self.read(key)[-count:]

    def write(self, key: str, content: bytes) -> None:
        self._count("PUT")
        self.put([key])
        self._files[key] = content

    def create(self, key: str, content: bytes) -> None:
        if key in self._files:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key)
        self.write(key, content)

    def publish(self, staged: Path, key: str) -> None:
        self.write(key, staged.read_bytes())
        staged.unlink()

    def remove(self, *keys: str) -> None:
        self._count("DELETE")
        for key in keys:
            if key in self._files:
                self.drop(key)

    def exists(self, key: str) -> bool:
        self._count("HEAD")
        return key in self._files

    def size(self, key: str) -> int:
        return len(self._files[key])

    def age(self, key: str, now: float) -> float:
        return 0.0

    def fetch(self, key: str) -> Path:
        path = self.local / "cache" / key.replace("/", "-")
        path.write_bytes(self.read(key))
        return path

    def prefetch(self, keys: Iterable[str]) -> None:
        pass

    def prefetch_tails(self, keys: Iterable[str], count: int) -> None:
        pass

    def room(self) -> int | None:
        return None

    def forget(self, key: str) -> bool:
        return False

    @contextlib.contextmanager
    def hold(self, name: str, *, what: str) -> Iterator[Callable[[], None]]:
        yield lambda: None

    def held_by_another(self, name: str) -> str:
        return ""

    def _inside(self, folder: str) -> list[str]:
        first = bisect.bisect_left(self._sorted, f"{folder}/")
        return self._sorted[first : bisect.bisect_left(self._sorted, f"{folder}0")]

    def _count(self, kind: str, count: int = 1) -> None:
        self.requests[kind] += count
        self._spend(count)
