"""Following a lake: what is live, in an order that repeats, at a cost that follows what is new.

Live = listed - marked (tombstoned, quarantined) - trajectories seen before (by uid). An hour's directory is
listed again only if its modification time moved or is too fresh to trust; of the known directories the newest
48 are looked at (a writer's clock may be off), an unknown one always.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipelines.config.atomic import storage_error
from pipelines.errors import AmagoError
from pipelines.events import Listener, Notice, silent
from pipelines.lake.footer import Footer, read_footer, uid_array
from pipelines.lake.segment import segment_path

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

WATCHED_HOURS = 48
FRESH_SECONDS = 2.0  # a file may appear in the same tick of the file system's clock


@dataclass(frozen=True, eq=False)
class Segment:
    """A live segment and its trajectories: `uids` (n,) "S16", `row0` and `length` (actions), (n,) int64.

    For an overlay, `columns` are those it stores, and `base` (n,) is the number (place in
    `Follower.segments`) of the segment that holds the rest, from row `base_row0` on; otherwise `base` is its
    own number and `base_row0` is `row0`.
    """

    number: int
    id: str
    path: Path
    schema_id: str
    is_overlay: bool
    columns: tuple[str, ...]
    uids: np.ndarray
    row0: np.ndarray
    length: np.ndarray
    base: np.ndarray
    base_row0: np.ndarray


@dataclass
class Follower:
    """`segments` grows at each `refresh` and never changes otherwise. What cannot be read is told to
    `listener`, kept in `unreadable` (id -> reason) and passed over.
    """

    lake: Lake
    listener: Listener = silent
    segments: list[Segment] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._root = self.lake.path / "segments"
        self._hours: dict[str, int] = {}
        self._known: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._waiting: dict[str, Footer] = {}
        self._seen = UidSet()

    def refresh(self) -> int:
        """Take in what is new; returns the number of new trajectories."""
        marked = marked_segments(self.lake.path)
        new = sorted(id for id in self._listed() if Path(id).name not in marked)
        return self._admit(new, patient=True)

    def restore(self, ids: Sequence[str]) -> int:
        """Take in exactly these segments, in this order, as an earlier follower did; returns the
        trajectories.
        """
        marked = marked_segments(self.lake.path)
        return sum(self._admit([id], patient=False) for id in ids if Path(id).name not in marked)

    def _admit(self, ids: Iterable[str], *, patient: bool) -> int:
        """Steps first, then overlays. An overlay whose base is not there yet waits for the next refresh."""
        count, overlays = 0, self._waiting
        waited = set(overlays)
        self._waiting = {}
        for id in ids:
            if id in self._known:
                continue
            self._known.add(id)
            footer = self._footer(id)
            if footer is None:
                continue
            if footer.is_overlay:
                overlays[id] = footer
            else:
                count += self._add(id, footer)
        for id, footer in sorted(overlays.items()):
            bases = footer.trajectories["base_segment"].to_pylist()
            missing = set(bases) - self._numbers.keys()
            if missing and patient and id not in waited and not missing & self.unreadable.keys():
                self._waiting[id] = footer
                continue
            if missing:
                self._tell(f"overlay '{id}' derives from segments that are not here: {', '.join(sorted(missing))}")
            count += self._add(id, footer)
        return count

    def _add(self, id: str, footer: Footer) -> int:
        table, number = footer.trajectories, len(self.segments)
        uids = footer.uids()
        row0 = table["row0"].to_numpy()
        length = table["length"].to_numpy()
        base, base_row0 = np.full(len(uids), number), row0
        keep = self._seen.add(uids)
        if footer.is_overlay:
            base, base_row0 = self._bases(footer)
            keep &= base >= 0
        segment = Segment(
            number=number,
            id=id,
            path=footer.path,
            schema_id=footer.header["schema"],
            is_overlay=footer.is_overlay,
            columns=footer.columns,
            uids=uids[keep],
            row0=row0[keep],
            length=length[keep],
            base=base[keep],
            base_row0=base_row0[keep],
        )
        self.segments.append(segment)
        self._numbers[id] = number
        return len(segment.uids)

    def _bases(self, footer: Footer) -> tuple[np.ndarray, np.ndarray]:
        """Number of the base's segment (-1 where it is not live) and its first row, for every row of an
        overlay.
        """
        table = footer.trajectories
        ids = np.array(table["base_segment"].to_pylist(), dtype=object)
        uids, offset = uid_array(table["base_uid"]), table["base_offset"].to_numpy()
        base, row0 = np.full(len(ids), -1), np.zeros(len(ids), dtype=np.int64)
        for id in dict.fromkeys(ids):
            if id not in self._numbers:
                continue
            segment, rows = self.segments[self._numbers[id]], np.flatnonzero(ids == id)
            order = np.argsort(segment.uids)
            place = np.searchsorted(segment.uids, uids[rows], sorter=order)
            place = order[np.minimum(place, len(order) - 1)] if len(order) else np.zeros(len(rows), dtype=int)
            found = segment.uids[place] == uids[rows] if len(order) else np.zeros(len(rows), dtype=bool)
            base[rows[found]] = segment.number
            row0[rows[found]] = segment.row0[place[found]] + offset[rows[found]]
        return base, row0

    def _footer(self, id: str) -> Footer | None:
        try:
            footer = read_footer(segment_path(self.lake.path, id))
            _ = footer.trajectories
            return footer
        except FileNotFoundError:
            self.unreadable[id] = "it is gone"
        except AmagoError as error:
            self.unreadable[id] = str(error)
            self._tell(f"{error}; it is passed over, see: amago lake verify {self.lake.path}")
        return None

    def _tell(self, text: str) -> None:
        self.listener(Notice(text=text, level="warning"))

    def _listed(self) -> Iterable[str]:
        """Ids not known yet in the directories that may have changed."""
        hours = sorted(entry.name for entry in _scan(self._root) if entry.is_dir())
        watched = set(hours[-WATCHED_HOURS:])
        for hour in hours:
            if hour in self._hours and hour not in watched:
                continue
            try:
                now, modified = time.time_ns(), os.stat(self._root / hour).st_mtime_ns
            except FileNotFoundError:
                continue
            if self._hours.get(hour) == modified:
                continue
            self._hours[hour] = modified if now - modified > FRESH_SECONDS * 1e9 else -1
            for name in list_segments(self._root / hour):
                if f"{hour}/{name}" not in self._known:
                    yield f"{hour}/{name}"


def list_segments(hour: Path) -> list[str]:
    """Names (without ending) of the segments of an hour, overlays included, blobs not, sorted."""
    names = (entry.name for entry in _scan(hour))
    return sorted(n.removesuffix(".arrow") for n in names if n.endswith(".arrow") and not n.endswith(".blob.arrow"))


def all_segments(lake: Path) -> list[str]:
    """Ids of everything listed and not marked, sorted."""
    marked = marked_segments(lake)
    hours = sorted(entry.name for entry in _scan(lake / "segments") if entry.is_dir())
    return [f"{h}/{n}" for h in hours for n in list_segments(lake / "segments" / h) if n not in marked]


def marked_segments(lake: Path, folders: Sequence[str] = ("tombstones", "quarantine")) -> set[str]:
    """Names of segments taken out of sight by a tombstone or by quarantine."""
    return {
        entry.name.removesuffix(".json")
        for folder in folders
        for entry in _scan(lake / folder)
        if entry.name.endswith(".json")
    }


def _scan(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise storage_error(error, f"read '{directory}'") from error


class UidSet:
    """A growing set of uids in 16 bytes each: sorted runs, merged like a binary counter."""

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def add(self, uids: np.ndarray) -> np.ndarray:
        """(n,) bool: which of `uids` ("S16") were new, the first of equal ones only; all of them are in it
        now.
        """
        values, first = np.unique(uids, return_index=True)
        fresh = np.ones(len(values), dtype=bool)
        for run in self._runs:
            place = np.minimum(np.searchsorted(run, values), len(run) - 1)
            fresh &= run[place] != values
        new = np.zeros(len(uids), dtype=bool)
        new[first[fresh]] = True
        run = values[fresh]
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = np.sort(np.concatenate([self._runs.pop(), run]), kind="stable")
        if len(run):
            self._runs.append(run)
        return new
