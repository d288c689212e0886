"""An incremental listing of a lake in an object store, where keys come in order and each thousand costs a request.

The name of a segment begins with the time at which it was published, so a look lists from some seconds before the
newest name that was seen. Names can appear late: an upload takes time, and clocks differ. So every other look also
lists a page of the last quarter of an hour, and of the whole lake, in turn; the latter finds what was deleted, too. A
look is two requests, whatever the lake's size, and one more for each thousand names that are new. The log is listed at
every other look: until then the lake seems to be as it was before.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator, Sequence

from pipelines.files.atomic import storage_error
from pipelines.lake.folders import ROOT, segment_ids
from pipelines.lake.log import FOLDER
from pipelines.lake.storage import Storage

_OVERLAP_SECONDS = 10.0  # which each look lists again
_RECENT_SECONDS = 900.0  # which are listed in turn again and again
_ROUND_SECONDS = 600.0  # between two beginnings of a listing of the whole lake, at least
PAGE = 1000  # keys in one request
_END = f"{ROOT}0"  # sorts after all keys in `ROOT`


class KeyWatcher:
    """The ids of segments that appear and disappear in an object store; see `FolderWatcher`."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._ids: list[str] = []  # in order
        self._newest = 0  # time of the newest name, in microseconds
        self._looks = 0
        self._everything = True
        self._recent_place = self._whole_place = ""  # where a listing in turn goes on; "": at its beginning
        self._whole_began = 0.0
        self.log: Sequence[str] | None = None
        """The names of the log's files, as last listed."""

    def look_back(self) -> None:
        """List the whole lake at the next look: something was not where it should be."""
        self._everything = True

    def __iter__(self) -> Iterator[tuple[list[str], list[str]]]:
        """Yield the ids of segments that appeared since the last look, and of those that disappeared."""
        try:
            if self._everything:
                self._recent_place = self._whole_place = ""
                self._whole_began = time.monotonic()
            yield self._list_newest(f"{ROOT}/" if self._everything else self._before_newest(_OVERLAP_SECONDS))
            if self._everything or self._looks % 2 == 0:
                self.log = self._storage.names(FOLDER)
            elif self._looks % 4 == 1 and self._is_whole_due:
                yield self._list_whole()
            else:
                yield self._list_recent()
        except OSError as error:
            raise storage_error(error, f"list '{self._storage.url()}'") from error
        self._everything = False
        self._looks += 1

    def _before_newest(self, seconds: float) -> str:
        """Return the key from which the names of the last `seconds` begin. A writer's clock may be ahead of ours."""
        start = max(0, min(self._newest, time.time_ns() // 1000) - int(seconds * 1e6))
        return f"{ROOT}/{time.strftime('%Y%m%d%H', time.gmtime(start // 1_000_000))}/{start:016x}"

    def _list_newest(self, after: str) -> tuple[list[str], list[str]]:
        keys = self._storage.keys(after)
        return self._compare(after, _END, keys[: bisect.bisect_left(keys, _END)])

    def _list_recent(self) -> tuple[list[str], list[str]]:
        after = self._recent_place or self._before_newest(_RECENT_SECONDS)
        self._recent_place, found = self._list_page(after)
        return found

    @property
    def _is_whole_due(self) -> bool:
        return bool(self._whole_place) or time.monotonic() - self._whole_began >= _ROUND_SECONDS

    def _list_whole(self) -> tuple[list[str], list[str]]:
        if not self._whole_place:
            self._whole_began = time.monotonic()
        self._whole_place, found = self._list_page(self._whole_place or f"{ROOT}/")
        return found

    def _list_page(self, after: str) -> tuple[str, tuple[list[str], list[str]]]:
        """List a page; return where the next one begins ("" after the last), and what it changed."""
        keys = self._storage.keys(after, limit=PAGE)
        place = keys[-1] if len(keys) == PAGE and keys[-1] < _END else ""
        return place, self._compare(after, place or _END, keys[: bisect.bisect_left(keys, _END)])

    def _compare(self, after: str, last: str, keys: Sequence[str]) -> tuple[list[str], list[str]]:
        """Compare the keys after `after`, up to `last`, with those known; note and return the new and the gone ids."""
        ids = segment_ids(keys)
        first = bisect.bisect_right(self._ids, after.removeprefix(f"{ROOT}/"))
        end = len(self._ids) if last == _END else bisect.bisect_right(self._ids, last.removeprefix(f"{ROOT}/"))
        known, listed = set(self._ids[first:end]), set(ids)
        new, gone = [id for id in ids if id not in known], sorted(known - listed)
        if new or gone:
            self._ids[first:end] = sorted(listed)
        for id in new[-1:]:
            self._newest = max(self._newest, _time_of(id))
        return new, gone


def _time_of(id: str) -> int:
    """Return the time in the name of a segment, in microseconds; 0 if there is none."""
    name = id.rpartition("/")[2]
    try:
        return int(name[:16], 16)
    except ValueError:
        return 0
