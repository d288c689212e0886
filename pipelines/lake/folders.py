"""Names of segments and the folders that hold them.

A segment's id is "FOLDER/STEM", "FOLDER/STEM.ovl" for an overlay. There is a folder an hour, and further ones once it
has many files: `segments/2026010203/`, then `segments/2026010203_0001/` and so on. A reader lists only the folders that
changed, and no folder grows with the lake. Names sort by time, as do ids ("_" sorts after "/"). An object store has one
folder an hour: every listing there is a request, and nothing reports which folder changed (`KeyWatcher`).
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence

from pipelines.files.atomic import make_storage_error
from pipelines.lake.storage import FRESH_SECONDS, Storage

ROOT = "segments"
LOG = "log"
QUARANTINE = "quarantine"  # damaged files, kept aside
REWRITTEN = "compact"  # label of writers that rewrite segments
COPIED = "copy"  # label of writers that copy trajectories from another lake
FULL = 128  # files in a folder, at which a writer uses the next one
COUNTED_EVERY = 16  # own publications
WATCHED_HOURS = 48
WATCHED_FOLDERS = 16  # the newest, besides the last of each hour
TURN = 16  # of the others, at each listing
_LAST = 9999


def segment_key(id: str) -> str:
    return f"segments/{id}.arrow"


def blob_key(id: str) -> str:
    return f"segments/{id}.blob.arrow"


def is_rewritten(id: str) -> bool:
    """Return whether a segment may have been rewritten from others, which its footer lists."""
    return f"-{REWRITTEN}." in id


def parse_segment_name(id: str) -> tuple[str, int, bool]:
    """Return the writer, its sequence number, and whether the segment is an overlay, from a segment's name.

    >>> parse_segment_name("2026010203/0006476bd2f0e2d6-actor.1f.9c0d-00000007.ovl")
    ('actor.1f.9c0d', 7, True)
    """
    name = id.rpartition("/")[2]
    writer, _, sequence = name.removesuffix(".ovl").partition("-")[2].rpartition("-")
    return writer, int(sequence) if sequence.isdecimal() else -1, name.endswith(".ovl")


def by_hour(names: Iterable[str]) -> dict[str, list[str]]:
    """Group folders by hour, in the order in which they were opened."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        found.setdefault(name.partition("_")[0], []).append(name)
    return found


class FolderChooser:
    """The choice of the folder in which a writer publishes: the newest of the hour, or the next one if that is full.

    Writers do not coordinate: those that open the next folder at the same time open the same one, and a folder may
    exceed `FULL` by the files of writers that have not counted yet.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._hour = ""
        self._number = 0
        self._left = 0  # publications before files are counted again

    def choose(self, hour: str) -> str:
        """Return the folder for a file that is published now. OSError as the storage raises it."""
        if self._storage.stamp(ROOT) is None:
            return hour
        if hour != self._hour:
            self._hour, self._number, self._left = hour, self._newest(hour), 0
        elif self._storage.stamp(f"{ROOT}/{self._name_folder(hour, self._number + 1)}"):  # another writer has opened it
            self._number, self._left = max(self._number, self._newest(hour)), 0
        if not self._left:
            while (
                self._number < _LAST
                and len(self._storage.names(f"{ROOT}/{self._name_folder(hour, self._number)}")) >= FULL
            ):
                self._number = max(self._number + 1, self._newest(hour))
            self._left = COUNTED_EVERY
        self._left -= 1
        return self._name_folder(hour, self._number)

    def _newest(self, hour: str) -> int:
        numbers = (name.partition("_") for name in self._storage.folders(ROOT))
        own = (number for of, _, number in numbers if of == hour and number.isdecimal() and len(number) == 4)
        return max(map(int, own), default=0)

    @staticmethod
    def _name_folder(hour: str, number: int) -> str:
        return f"{hour}_{number:04d}" if number else hour

    def name_segment(self, writer: str, sequence: int, *, overlay: bool) -> str:
        """Return the id of a segment published now. The writer's name and sequence number make it unique, whatever the
        clock.
        """
        now = time.time_ns() // 1000
        folder = self.choose(time.strftime("%Y%m%d%H", time.gmtime(now // 1_000_000)))
        return f"{folder}/{now:016x}-{writer}-{sequence:08d}{'.ovl' if overlay else ''}"


class FolderWatcher:
    """An incremental listing of segments. Its cost follows the number of changes.

    A folder is listed again only if its modification time changed or is too recent to be reliable. It checks the newest
    folders and the last folder of each of the newest 48 hours, because clocks may be wrong; any unknown folder; and
    some of the others in turn, where a writer that was suspended for long may still publish.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._root: int | None = None  # stamp of the folder of folders
        self._watched: list[str] = []
        self._others: list[str] = []
        self._unknown: set[str] = set()
        self._turn = 0
        self._stamps: dict[str, int | None] = {}
        self._names: dict[str, set[str]] = {}
        self.log: Sequence[str] | None = None  # never listed here

    def look_back(self) -> None:
        """Do nothing: a look finds all that changed."""

    def __iter__(self) -> Iterator[tuple[list[str], list[str]]]:
        """Yield the ids of segments that appeared in a folder since the last time, and of those that disappeared.

        Each change is reported once; after an error the next iteration resumes there.
        """
        root, settled = read_stamp(self._storage, ROOT)
        if root != self._root:
            yield from self._arrange()
            self._root = root if settled else None
        looked_at, due = self._watched, []
        if self._others:
            if self._turn >= len(self._others):
                self._turn = 0
            looked_at = sorted({*self._watched, *self._unknown, *self._others[self._turn : self._turn + TURN]})
        for folder in looked_at:
            stamp, settled = read_stamp(self._storage, f"{ROOT}/{folder}")
            if stamp != self._stamps.get(folder):
                due.append((folder, stamp if settled else None))
        for (folder, stamp), listed in zip(due, list_each(self._storage, [folder for folder, _ in due]), strict=True):
            known = self._names.setdefault(folder, set())
            new = [name for name in listed if name not in known]
            gone = known.difference(listed) if len(known) + len(new) > len(listed) else ()
            known.difference_update(gone)
            known.update(new)
            self._stamps[folder] = stamp
            self._unknown.discard(folder)
            yield segment_ids(folder, new), segment_ids(folder, gone)
        self._turn += TURN

    def _arrange(self) -> Iterator[tuple[list[str], list[str]]]:
        """Update the list of folders. All files of a folder that is gone are gone."""
        hours = by_hour(folders(self._storage, ROOT))
        here = [folder for hour in hours.values() for folder in hour]
        watched = {opened[-1] for opened in list(hours.values())[-WATCHED_HOURS:]} | set(here[-WATCHED_FOLDERS:])
        self._watched = sorted(watched)
        self._others = [folder for folder in here if folder not in watched]
        self._unknown = set(here) - self._names.keys()
        for folder in self._names.keys() - set(here):
            self._stamps.pop(folder, None)
            yield [], segment_ids(folder, self._names.pop(folder))


def read_stamp(storage: Storage, folder: str) -> tuple[int | None, bool]:
    """Return the stamp of a folder, and whether any later change is certain to change it: a file may appear within the
    same tick of the file system's clock. StageFailed if the storage fails.
    """
    now = time.time_ns()
    try:
        stamp = storage.stamp(folder)
    except OSError as error:
        raise make_storage_error(error, f"read '{storage.url(folder)}'") from error
    return stamp, stamp is not None and now - stamp > FRESH_SECONDS * 1e9


def folders(storage: Storage, folder: str) -> list[str]:
    """List the folders in `folder`. StageFailed if the storage fails."""
    try:
        return storage.folders(folder)
    except OSError as error:
        raise make_storage_error(error, f"read '{storage.url(folder)}'") from error


def list_all(storage: Storage, *, rewritten: bool = False) -> list[str]:
    """Return the sorted ids of all segments; `rewritten`: only of those rewritten from others."""
    ids = (id for folder, names in list_names(storage).items() for id in sorted(segment_ids(folder, names)))
    return [id for id in ids if not rewritten or is_rewritten(id)]


def list_names(storage: Storage) -> dict[str, list[str]]:
    """Return the names of all files of segments by folder, in the order of the folders."""
    here = sorted(folders(storage, ROOT))
    return dict(zip(here, list_each(storage, here), strict=True))


def list_each(storage: Storage, names: Sequence[str]) -> Iterator[list[str]]:
    """Yield the names in each of these folders. StageFailed if the storage fails."""
    try:
        yield from storage.listings([f"{ROOT}/{name}" for name in names])
    except OSError as error:
        raise make_storage_error(error, f"read '{storage.url(ROOT)}'") from error


def segment_ids(folder: str, names: Iterable[str]) -> list[str]:
    """Pick the segments out of the names in a folder, in their order, and return their ids."""
    inside = f"{folder}/" if folder else ""
    return [f"{inside}{name[:-6]}" for name in names if name.endswith(".arrow") and not name.endswith(".blob.arrow")]


_OVERLAP_SECONDS = 10.0  # which each look lists again
_RECENT_SECONDS = 900.0  # which are listed in turn again and again
_ROUND_SECONDS = 600.0  # between two beginnings of a listing of the whole lake, at least
PAGE = 1000  # keys in one request
_END = f"{ROOT}0"  # sorts after all keys in `ROOT`


class KeyWatcher:
    """An incremental listing of a lake in an object store, where keys come in order and each thousand costs a request;
    see `FolderWatcher`.

    The name of a segment begins with the time at which it was published, so a look lists from some seconds before the
    newest name that was seen. Names can appear late: an upload takes time, and clocks differ. So every fourth look also
    lists a page of the last quarter of an hour, and every fourth one of the whole lake, which finds what was deleted,
    too. The others list the log: until then the lake seems to be as it was before. A look is two requests, whatever the
    lake's size, and one more for each thousand names that are new.
    """

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
            after = f"{ROOT}/" if self._everything else self._before_newest(_OVERLAP_SECONDS)
            keys = self._storage.keys(after)
            yield self._compare(after, _END, keys[: bisect.bisect_left(keys, _END)])
            if self._everything or self._looks % 2 == 0:
                self.log = self._storage.names(LOG)
            elif self._looks % 4 == 1 and (self._whole_place or time.monotonic() - self._whole_began >= _ROUND_SECONDS):
                if not self._whole_place:
                    self._whole_began = time.monotonic()
                self._whole_place, found = self._list_page(self._whole_place or f"{ROOT}/")
                yield found
            else:
                after = self._recent_place or self._before_newest(_RECENT_SECONDS)
                self._recent_place, found = self._list_page(after)
                yield found
        except OSError as error:
            raise make_storage_error(error, f"list '{self._storage.url()}'") from error
        self._everything = False
        self._looks += 1

    def _before_newest(self, seconds: float) -> str:
        """Return the key from which the names of the last `seconds` begin. A writer's clock may be ahead of ours."""
        start = max(0, min(self._newest, time.time_ns() // 1000) - int(seconds * 1e6))
        return f"{ROOT}/{time.strftime('%Y%m%d%H', time.gmtime(start // 1_000_000))}/{start:016x}"

    def _list_page(self, after: str) -> tuple[str, tuple[list[str], list[str]]]:
        """List a page; return where the next one begins ("" after the last), and what it changed."""
        keys = self._storage.keys(after, limit=PAGE)
        place = keys[-1] if len(keys) == PAGE and keys[-1] < _END else ""
        return place, self._compare(after, place or _END, keys[: bisect.bisect_left(keys, _END)])

    def _compare(self, after: str, last: str, keys: Sequence[str]) -> tuple[list[str], list[str]]:
        """Compare the keys after `after`, up to `last`, with those known; note and return the new and the gone ids."""
        ids = segment_ids("", (key[len(ROOT) + 1 :] for key in keys))
        first = bisect.bisect_right(self._ids, after.removeprefix(f"{ROOT}/"))
        end = len(self._ids) if last == _END else bisect.bisect_right(self._ids, last.removeprefix(f"{ROOT}/"))
        known, listed = set(self._ids[first:end]), set(ids)
        new, gone = [id for id in ids if id not in known], sorted(known - listed)
        if new or gone:
            self._ids[first:end] = sorted(listed)
        for id in new[-1:]:
            with contextlib.suppress(ValueError):  # a foreign name, without a time
                self._newest = max(self._newest, int(id.rpartition("/")[2][:16], 16))
        return new, gone
