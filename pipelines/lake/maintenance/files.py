"""The files of a lake with their ages, sizes and live trajectories, for maintenance; and deletion of those that are no
longer needed: of segments that the log hides, and of maintainers that died.

A refresh costs as much as there is new: a footer is read once, and liveness is computed again only for files of which
something was moved or removed.

A reader may still be about to open a file that it knows: files stay for a grace period after they were removed from the
live set. A file whose log still exists stays too, or salvage would not see that it was published.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from pipelines.errors import AmagoError
from pipelines.events import Listener, Progress, silent
from pipelines.files.atomic import explain_errors
from pipelines.lake.folders import (
    COPIED,
    LOG,
    REWRITTEN,
    ROOT,
    WATCHED_HOURS,
    blob_key,
    by_hour,
    folders,
    is_rewritten,
    list_names,
    parse_segment_name,
    segment_ids,
    segment_key,
)
from pipelines.lake.footer import Footer, read_footer, uid_array
from pipelines.lake.live import LiveTable
from pipelines.lake.log import Held, LogEntry, append
from pipelines.lake.manifest import ManifestWriter
from pipelines.lake.segment import stored_bytes
from pipelines.lake.storage import LocalStorage
from pipelines.lake.uids import contains

if TYPE_CHECKING:
    from pipelines.lake.store import Lake


@dataclass(frozen=True, eq=False)
class File:
    """A segment's file with n trajectories, of which `alive` (n,) bool are live.

    `uids` (n,) "S16"; `steps` (n,) int64, actions; `times` (n,) float64, when each was first committed; `collectors`
    (n,) their names; `episodes` as of `Footer.episodes`. For an overlay: `base_ids` (n,) names of the bases' segments,
    `base_uids` (n,) "S16". `replaces`: index of the first trajectory and number of those that come from a segment of
    another id.
    """

    id: str
    kind: tuple[str, bool, tuple[str, ...]]
    bytes: int
    replaces: Mapping[str, tuple[int, int]]
    uids: np.ndarray
    steps: np.ndarray
    times: np.ndarray
    collectors: np.ndarray
    episodes: np.ndarray | None
    base_ids: np.ndarray
    base_uids: np.ndarray
    alive: np.ndarray

    @property
    def is_overlay(self) -> bool:
        return self.kind[1]

    @property
    def row_bytes(self) -> np.ndarray:
        """(n,) float64: the share of each trajectory in the file's bytes, by its rows."""
        rows = (self.steps + 1).astype(np.float64)
        return rows * (self.bytes / max(rows.sum(), 1.0))

    @cached_property
    def live_bytes(self) -> float:
        return float(self.row_bytes[self.alive].sum())

    @cached_property
    def live_steps(self) -> int:
        return int(self.steps[self.alive].sum())

    def select_from(self, ids: Collection[str]) -> np.ndarray:
        """Return (n,) bool: which trajectories come from the segments `ids`, also through rewriting."""
        found = np.full(len(self.uids), self.id in ids)
        for old, (first, count) in self.replaces.items():
            if old in ids:
                found[first : first + count] = True
        return found

    @property
    def is_wasteful(self) -> bool:
        """Whether at least half of the file is dead, so that it is worth rewriting alone."""
        return self.live_bytes <= 0.5 * self.bytes


@dataclass
class FileTable:
    """The files of a lake that are not removed as a whole, by id; `log` is the lake's. `only`: which segments to look
    at, by id."""

    lake: Lake
    listener: Listener = silent
    only: Callable[[str], bool] = lambda id: True
    files: dict[str, File] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._new: dict[str, File] = {}  # read, but none of their trajectories was found to be live yet
        self.live = LiveTable(self.lake, self.listener, self.only, thorough=True, observe=self._keep)
        self.log = self.live.log
        self._manifests = ManifestWriter(self.lake)

    def refresh(self) -> None:
        """Pick up files that were added, rewritten or removed."""
        segments, before = self.live.segments, len(self.live.segments)
        changed = self.live.refresh().changed
        touched = {segments[number].file for number in (*changed, *range(before, len(segments)))}
        for id in sorted(touched | (self.files.keys() - self.live.files.keys())):
            self._look(id)

    def file_of(self, id: str) -> File | None:
        """Return the file that holds the trajectories of segment `id` now; None if they are removed."""
        return self.files.get(self.live.file_of(id))

    def _look(self, id: str) -> None:
        numbers = self.live.files.get(id)
        if not numbers or self.log.hides(id):
            self.files.pop(id, None)
            return
        try:
            file = self.files.get(id) or self._new.pop(id, None) or self._read(id, read_footer(self.lake.storage, id))
        except (FileNotFoundError, AmagoError):  # gone or damaged since it was listed
            self.files.pop(id, None)
            return
        segments = [self.live.segments[number] for number in numbers]
        uids = np.concatenate([segment.uids for segment in segments])
        # Writers leave no gaps between trajectories, so that their places follow from their first rows: searching
        # sorted numbers costs a tenth of searching uids.
        starts = np.cumsum(file.steps + 1) - (file.steps + 1)
        place = np.searchsorted(starts, np.concatenate([segment.row0 for segment in segments]))
        alive = np.zeros(len(starts), dtype=bool)
        if place.max(initial=0) < len(starts) and np.array_equal(file.uids[place], uids):
            alive[place] = True
        else:
            alive = contains(np.sort(uids), file.uids)
        self.files[id] = replace(file, alive=alive)

    def _keep(self, id: str, footer: Footer) -> None:
        with contextlib.suppress(FileNotFoundError):  # removed since: the next refresh finds out
            self._new[id] = self._read(id, footer)

    def _read(self, id: str, footer: Footer) -> File:
        table, overlay = footer.trajectories, footer.is_overlay
        names = pc.fill_null(table["collector"], "").combine_chunks().dictionary_encode()
        # Copies, since a view of one column would keep the footer's whole table: five times as much memory.
        return File(
            id=id,
            kind=(footer.header["schema"], overlay, footer.columns),
            bytes=stored_bytes(self.lake.storage, id),
            replaces={old: footer.part(old) for old in footer.replaces},
            uids=footer.places.uids,
            steps=table["length"].to_numpy().copy(),
            times=table["t_commit"].to_numpy().copy(),
            collectors=np.array(names.dictionary.to_pylist(), dtype=object)[names.indices.to_numpy()],
            episodes=footer.episodes(),
            base_ids=np.array(table["base_segment"].to_pylist() if overlay else [], dtype=object),
            base_uids=uid_array(table["base_uid"]).copy() if overlay else np.zeros(0, "S16"),
            alive=np.zeros(table.num_rows, dtype=bool),
        )

    def write_manifests(self, held: Held, *, forget: bool = False) -> None:
        """Bring the manifests of the files that count up to date, under the lease `held`; see `ManifestWriter`."""
        live = {id: len(file.uids) for id, file in self.files.items() if file.alive.any()}
        self._manifests.update(live, held, forget=forget)

    def list_overlays(self) -> list[File]:
        """List the files of derived trajectories."""
        return [file for file in self.files.values() if file.is_overlay]

    def find_bases(self, overlay: File) -> Iterator[tuple[File, np.ndarray]]:
        """Yield the files of an overlay's bases, each with the indices of the trajectories that derive from it."""
        for id in dict.fromkeys(overlay.base_ids):
            base = self.file_of(id)
            if base is not None:
                yield base, np.flatnonzero(overlay.base_ids == id)

    def count_live(self) -> tuple[int, int]:
        """Count the files with live trajectories, and their bytes."""
        live = [file.bytes for file in self.files.values() if file.alive.any()]
        return len(live), sum(live)


def count_live_steps(lake: Lake, label: str) -> Counter[str]:
    """Count the live steps of each collector, overlays apart, in the segments of writers whose names begin with `label`
    and in those rewritten or copied from others. Footers of other segments are not read."""

    def may_count(id: str) -> bool:
        writer, _, is_overlay = parse_segment_name(id)
        return not is_overlay and (is_rewritten(id) or writer.startswith((label, f"{COPIED}.")))

    table, found = FileTable(lake, only=may_count), Counter[str]()
    table.refresh()
    for file in table.files.values():
        for name, steps in zip(file.collectors[file.alive], file.steps[file.alive].tolist(), strict=True):
            found[name] += steps
    return found


GRACE_SECONDS = 600.0
_TOGETHER = 100  # segments deleted between two looks at the lease: in an object store, by two requests
# Logs of other hosts are not visible: what they may still publish is left alone this long.
_ELSEWHERE_SECONDS = 86_400.0
_QUIET_SECONDS = 3600.0  # of a folder in which a long suspended writer may publish
_BLOB = ".blob.arrow"


@dataclass(frozen=True)
class SweepResult:
    """What was deleted; `waiting` segments are removed, but within their grace period."""

    segments: int
    bytes: int
    waiting: int


def sweep(
    inventory: FileTable, held: Held, *, grace_seconds: float = GRACE_SECONDS, listener: Listener = silent
) -> SweepResult:
    """Delete what was removed longer than the grace period ago, under the lease `held` and by a refreshed table.
    StageFailed if the storage fails.
    """
    lake, storage, log, now = inventory.lake, inventory.lake.storage, inventory.log, time.time()
    log.require_whole()
    with explain_errors(f"remove files of '{lake.name}'"):
        names = {f"{hour}/{name}" for hour, found in list_names(storage).items() for name in found}
        listed = set(segment_ids("", names))
        unfinished = sorted(id for id in listed if not log.is_finished(id) and id not in log.whole)
        if unfinished:  # also keeps a maintainer whose lease ran out from finishing it
            append(storage, LogEntry(time=now, reason="left unfinished", segments=unfinished), after=log.last)
            inventory.refresh()

        @functools.cache
        def age(key: str) -> float:
            try:
                return max(0.0, storage.age(key, now))
            except FileNotFoundError:
                return 0.0

        def has_log(id: str) -> bool:
            name = id.rpartition("/")[2].removesuffix(".ovl").partition("-")[2]
            return (lake.local / "wal" / f"{name}.wal").exists()

        due = {
            id: age(f"{LOG}/{log.removals[id].file}") + log.removals[id].seconds >= grace_seconds
            for id in listed
            if id in log.whole or log.is_superseded(id)
        }
        going = sorted(id for id, over in due.items() if over and not has_log(id))
        size = 0
        for start in range(0, len(going), _TOGETHER):
            some = going[start : start + _TOGETHER]
            size += sum(stored_bytes(storage, id) for id in some)
            held()
            storage.remove(*map(segment_key, some))  # blobs last: a reader that finds a segment finds it complete
            storage.remove(*map(blob_key, some))
            listener(Progress(stage="sweep", done=start + len(some), total=len(going), unit="segments"))
        held()
        # Blobs whose segment was never published, or was deleted.
        old = grace_seconds if isinstance(storage, LocalStorage) else max(grace_seconds, _ELSEWHERE_SECONDS)
        for id in (name.removesuffix(_BLOB) for name in names if name.endswith(_BLOB)):
            if id in listed or age(blob_key(id)) < old or has_log(id):
                continue
            if not storage.exists(segment_key(id)):  # checked last: its log is dropped once it is published
                storage.remove(blob_key(id))
        log.shorten(listed - set(going))
        _remove_leftovers(lake)
    return SweepResult(segments=len(going), bytes=size, waiting=len(due) - len(going))


def _remove_leftovers(lake: Lake) -> None:
    """Delete files of dead rewriters (the holder of the lease is the only living one) and empty folders."""
    for path in (lake.local / "tmp").glob(f"{REWRITTEN}.*.tmp"):
        path.unlink(missing_ok=True)
    storage, now = lake.storage, time.time()
    if isinstance(storage, LocalStorage):
        hours = list(by_hour(folders(storage, ROOT)).values())
        # No writer publishes in these: of hours long past, and filled before the last of an hour.
        quiet = [name for opened in hours[:-WATCHED_HOURS] for name in opened]
        filled = [name for opened in hours[-WATCHED_HOURS:] for name in opened[:-1]]
        quiet += [name for name in filled if storage.age(f"{ROOT}/{name}", now) > _QUIET_SECONDS]
        for folder in quiet:
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(storage.root / ROOT / folder)
