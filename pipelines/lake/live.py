"""What is live: the trajectories of a lake that count, in a reproducible order.

A refresh costs as much as there is new.

Live = in a segment that is there - removed by the log - duplicates (by uid) - overlays whose base is not live. The log
(`LakeLog`) answers for segments and expired trajectories, `choose_live` for duplicates and overlays. The SQL index
applies the same two to what it stores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipelines.errors import AmagoError
from pipelines.events import Listener, Notice, silent
from pipelines.lake.folders import FolderWatcher, KeyWatcher, is_rewritten, list_all, segment_key
from pipelines.lake.footer import Bases, Footer, Places, prefetch_footers, read_footer
from pipelines.lake.log import LakeLog, LogNews
from pipelines.lake.manifest import Manifests
from pipelines.lake.storage import LocalStorage, require_lake
from pipelines.lake.uids import UidSet, contains, positions

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

_ATTEMPTS = 5  # to restore a table from segments that are rewritten meanwhile
_TOGETHER = 1 << 20  # trajectories that are added at once: looking up uids costs less, and memory 32 B for each


def choose_live(uids: np.ndarray, has_base: np.ndarray, known: UidSet) -> np.ndarray:
    """Return (n,) bool: which of these trajectories, in the order of their precedence, count besides those `known`, to
    which they are added. A uid counts once; `has_base` (n,) bool is False for an overlay without its base.
    """
    if has_base.all():
        return known.add(uids)
    counts = has_base.copy()
    counts[counts] = known.add(uids[counts])
    return counts


@dataclass(frozen=True, eq=False)
class Segment:
    """The live trajectories of a segment: `uids` (n,) "S16", `row0` (n,) u4, or int64 in a file of more rows, `length`
    (n,) u4 (actions) and `first_step` (n,) u4, the time of row 0 in its episode (None: 0 for all); `episode` as of
    `Footer.episodes`.

    `id` is the name under which they were first seen here; their rows are in the file of segment `file`, which changes
    when they are rewritten. For an overlay, `columns` are those it stores, and `base` (n,) is the number (index in
    `LiveTable.segments`) of the segment that holds the others, from row `base_row0` on; otherwise `base` is its own
    number and `base_row0` is `row0`.
    """

    number: int
    id: str
    file: str
    schema_id: str
    is_overlay: bool
    columns: tuple[str, ...]
    uids: np.ndarray
    row0: np.ndarray
    length: np.ndarray
    first_step: np.ndarray | None
    bases: tuple[np.ndarray, np.ndarray] | None = None
    episode: np.ndarray | None = None

    @property
    def base(self) -> np.ndarray:
        return self.bases[0] if self.bases is not None else np.full(len(self.uids), self.number)

    @property
    def base_row0(self) -> np.ndarray:
        return self.bases[1] if self.bases is not None else self.row0

    def only(self, keep: np.ndarray) -> Segment:
        """Return the segment with some of its trajectories; `keep` is a mask or an index."""
        bases = None if self.bases is None else (self.bases[0][keep], self.bases[1][keep])
        names = ("uids", "row0", "length", "first_step", "episode")
        own = {name: values[keep] for name in names if (values := getattr(self, name)) is not None}
        return replace(self, **own, bases=bases)


def _narrow(rows: np.ndarray) -> np.ndarray:
    """Return row numbers (n,) as u4 if they fit."""
    return rows.astype(np.uint32) if rows.max(initial=0) < 2**32 else rows


class Findings(NamedTuple):
    """What refreshes have found, for other processes to repeat: ids of segments in the order in which they were added,
    those of segments rewritten from others and of segments that vanished, and what is new in the log.
    """

    segments: list[str]
    rewritten: list[str]
    vanished: list[str]
    log: LogNews


class RefreshResult(NamedTuple):
    """The effect of a refresh: trajectories `added`, and numbers of known segments that `changed` (moved or shrank)."""

    added: int
    changed: tuple[int, ...]


@dataclass
class LiveTable:
    """The live trajectories by segment. `segments` grows at each `refresh`; an entry is replaced when its trajectories
    move to another file or are removed.

    Unreadable segments are reported to `listener`, kept in `unreadable` (id -> reason) and skipped. `only`: which
    segments to look at, by id; the footers of others are not read. `thorough`: read every footer itself, where others
    believe manifests, and the log at every refresh, where others read that of an object store at every other one;
    maintenance rests on both. `admitted`: the only segments whose trajectories are taken in, by id; those that are
    rewritten from them are followed. `observe` is called with the id and the footer of each segment that is read:
    decoding it again would cost as much as all the rest.
    """

    lake: Lake
    listener: Listener = silent
    only: Callable[[str], bool] = lambda id: True
    thorough: bool = False
    admitted: Collection[str] | None = None
    observe: Callable[[str, Footer], None] = lambda id, footer: None
    segments: list[Segment] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._storage = self.lake.storage
        local = isinstance(self._storage, LocalStorage)
        self._changes: FolderWatcher | KeyWatcher = (FolderWatcher if local else KeyWatcher)(self._storage)
        self.log = LakeLog(self._storage, self.lake.id, self.listener)
        self._manifests = Manifests(self._storage, self.lake.id)
        self.listed_rows: dict[str, int] = {}
        """How many rows the files have that were not opened yet, as a manifest says, by id."""
        self._reported: set[str] = set()  # quarantined segments
        self._known: set[str] = set()  # segments that were taken in, or cannot be read
        self._hidden: set[str] = set()  # segments that are there, but hidden by the log
        self._where: dict[str, str] = {}  # id -> the segment that was rewritten from it and has its trajectories
        self._rewritten: dict[str, Footer] = {}  # of this refresh
        self._lost = False  # one of them was gone
        self.files: dict[str, list[int]] = {}  # file -> numbers of the segments whose trajectories it has
        self._settling: set[str] = set()  # hidden files that still have numbers
        self._derived: dict[int, set[int]] = {}  # number -> those of overlays on it
        self._waiting: dict[str, Footer] = {}  # overlays whose bases were not found yet
        self._waited: set[str] = set()  # those of them that an earlier refresh has not found either
        self._vanished: set[str] = set()
        self._seen = UidSet(self._find_live)  # the live ones
        self._dropped: list[np.ndarray] = []  # uids that were live until now
        self._covered: dict[str, np.ndarray] = {}  # segment -> its uids that another segment had first
        self._orphaned: dict[str, np.ndarray] = {}  # overlay -> bases that it lost, while there were copies
        self._changed: set[int] = set()
        self._new: set[str] = set()  # there, not taken in yet
        self._counted = self._shared = 0  # segments that a refresh has counted; in the findings given so far
        self._findings: tuple[list[str], list[str]] = [], []  # rewritten and vanished, since findings were given

    def refresh(self) -> RefreshResult:
        """Pick up segments that were added, rewritten or removed. After an error the next refresh resumes there."""
        vanished, self._vanished = self._vanished, set()
        self._waited = set(self._waiting)
        try:
            self._list()
            if vanished or self._vanished or not (self._known or self._new):
                require_lake(self._storage)
            self._update(vanished)
            if self._waiting.keys() - self._waited:  # a base may be in a folder that was listed just before
                self.look_back()
                self._list()
                self._update(set())
        except BaseException:
            self._vanished |= vanished
            raise
        return self._report_changes()

    def _update(self, vanished: set[str]) -> None:
        if not (self._known or self.thorough) and self._new:
            self._manifests.load()
        # The log is read after the listing: it names every rewritten segment, whether or not the listing has it.
        touched = self.log.refresh(None if self.thorough else self._changes.log)
        for id, text in self.log.list_quarantined().items() if not self.thorough else ():
            if id not in self._reported:
                self._reported.add(id)
                self._warn(text)
        self._apply_log(touched)
        self._learn(self._new)
        self._settle()
        # A file that was gone at the last refresh already, and whose trajectories have not moved to another one.
        held = [id for id in sorted(vanished) if any(len(self.segments[n].uids) for n in self.files.get(id, ()))]
        self._drop([id for id in held if not self._storage.exists(segment_key(id))])
        self._uncover()
        new = sorted(self._new - self._known if self.admitted is None else self._new.intersection(self.admitted))
        self._prefetch(new)
        self._admit(new, patient=True)
        self._new.clear()

    def _prefetch(self, ids: Iterable[str]) -> None:
        """Fetch the footers that will be read of these segments."""
        wanted = [id for id in ids if id not in self._known and not self.log.hides(id)]
        prefetch_footers(self._storage, (id for id in wanted if not self._manifests.names(id)))

    def _report_changes(self) -> RefreshResult:
        self._rewritten.clear()
        self._manifests.clear()
        added, before = sum(len(segment.uids) for segment in self.segments[self._counted :]), self._counted
        self._counted = len(self.segments)
        changed = tuple(sorted(number for number in self._changed if number < before))
        self._changed.clear()
        return RefreshResult(added, changed)

    def restore(self, ids: Sequence[str]) -> RefreshResult:
        """Add exactly these segments, in the order in which another process saw them; of those that are known already,
        apply what was rewritten or removed.
        """
        if not self._known:
            self._manifests.load()
        for _ in range(_ATTEMPTS):
            self._apply_log(self.log.refresh())
            rewritten = sorted(self.log.added | {*list_all(self._storage, rewritten=True)})
            self._prefetch((*ids, *rewritten))
            self._learn(rewritten)
            self._settle()
            if not self._lost:  # otherwise it was rewritten and removed just now
                break
        self._uncover()
        self._admit_in_order(ids)
        return self._report_changes()

    def _admit_in_order(self, ids: Iterable[str]) -> None:
        """Add segments in this order, overlays too; those known are passed over."""
        for id in ids:
            self._admit([id], patient=False)

    def look_back(self) -> None:
        """List the whole lake at the next refresh, even where a listing usually begins at what is new."""
        self._changes.look_back()

    def collect_findings(self) -> Findings:
        """Collect what was found since the last call."""
        new, self._shared = [segment.id for segment in self.segments[self._shared :]], len(self.segments)
        (rewritten, vanished), self._findings = self._findings, ([], [])
        return Findings(new, rewritten, vanished, self.log.collect_news())

    def repeat(self, found: Findings) -> RefreshResult:
        """Apply what another process has found, without listing anything, not even manifests: footers are read."""
        self._apply_log(self.log.take(found.log))
        self._prefetch(found.segments)
        self._learn(found.rewritten)
        self._settle()
        self._drop(found.vanished)
        self._uncover()
        self._admit_in_order(found.segments)
        self._new.clear()
        return self._report_changes()

    def _apply_log(self, touched: Collection[str]) -> None:
        """Apply what is new in the log, which concerns the segments `touched`."""
        for id in sorted(touched):
            if id in self.log.added and id not in self._known and self.only(id):
                self._new.add(id)
        self._review(touched)

    def _review(self, ids: Iterable[str]) -> None:
        """Apply what the log says of these segments now."""
        for id in sorted(ids):
            if self.log.hides(id):
                if id in self._known:
                    self._hidden.add(id)
                if self.files.get(id):
                    self._settling.add(id)
            elif id in self._hidden:
                self._hidden.discard(id)
                self._where.pop(id, None)
                if not self.files.get(id):  # taken in again, as if it was new
                    self._known.discard(id)
                    self._new.add(id)
            segments = [self.segments[number] for number in self.files.get(id, ())]
            dead = self.log.find_dead(id) if segments else np.zeros(0, "S16")
            if len(dead):  # one search for all: a merged file has many segments
                alive = ~contains(dead, np.concatenate([segment.uids for segment in segments]))
                ends = np.cumsum([len(segment.uids) for segment in segments])
                for segment, keep in zip(segments, np.split(alive, ends[:-1]), strict=True):
                    self._reduce(segment, keep)

    def _learn(self, ids: Iterable[str]) -> None:
        """Read the footers of the segments among `ids` that were rewritten from others."""
        self._lost = False
        wanted = [id for id in sorted(ids) if is_rewritten(id) and id not in self._known and not self.log.hides(id)]
        self._prefetch(wanted)
        for id in wanted:
            footer = self._footer(id)
            if footer is None:
                self._lost |= id not in self.unreadable
                self._review(self.log.ignore(id) if id in self.unreadable else ())
                continue
            self._rewritten[id] = footer
            self._findings[0].append(id)
            self._where.update(dict.fromkeys(footer.replaces, id))

    def _settle(self) -> None:
        """Move trajectories to the segments that were rewritten from theirs; drop those that the log removed."""
        for id, footer in self._rewritten.items():
            self._move(id, footer)
        for id in sorted(self._settling):
            final = self.log.find_final(id)
            if final != id and self.files.get(id) and not self.log.hides(final):
                continue  # its footer cannot be read at the moment
            for number in self.files.get(id, ()):
                self._reduce(self.segments[number], np.zeros(len(self.segments[number].uids), dtype=bool))
            self._settling.discard(id)

    def _move(self, id: str, footer: Footer) -> None:
        """Move known trajectories to the rewritten segment `id`."""
        moved = [number for old in footer.replaces for number in self.files.pop(old, ())]
        if not moved:
            return
        uids, row0 = footer.places.uids, footer.places.row0
        order = np.argsort(uids)
        for segment in (self.segments[number] for number in moved):
            place = positions(uids, segment.uids, order)
            found = (place >= 0) & self.log.select_live(id, segment.uids)
            self._reduce(segment, found, file=id, row0=row0[place[found]])
        self.files.setdefault(id, []).extend(moved)

    def _drop(self, ids: Sequence[str]) -> None:
        self._findings[1].extend(ids)
        for segment in (self.segments[number] for id in ids for number in self.files.get(id, ())):
            self._reduce(segment, np.zeros(len(segment.uids), dtype=bool))

    def _reduce(
        self, old: Segment, keep: np.ndarray, *, file: str | None = None, row0: np.ndarray | None = None
    ) -> None:
        """Keep some trajectories of a segment, perhaps in another file, and update the overlays of it."""
        if keep.all() and file is None:
            return
        self._dropped.append(old.uids[~keep])
        new = old.only(keep)
        if file is not None and row0 is not None:
            new = replace(new, file=file, row0=_narrow(row0))
        self.segments[old.number] = new
        self._changed.add(old.number)
        if old.number not in self._derived:
            return
        moved_to = np.full(len(old.uids), -1, dtype=np.int64)
        moved_to[keep] = new.row0
        for overlay in (self.segments[number] for number in self._derived[old.number]):
            assert overlay.bases is not None
            base, base_row0 = overlay.bases
            rows = np.flatnonzero(base == old.number)
            place = np.searchsorted(old.row0, base_row0[rows], side="right") - 1
            alive = np.ones(len(base), dtype=bool)
            alive[rows] = moved_to[place] >= 0
            if self._covered and not alive.all():  # a base may have a copy, which counts from now on
                lost = old.uids[place[moved_to[place] < 0]]
                self._orphaned[overlay.id] = np.append(self._orphaned.get(overlay.id, lost[:0]), lost)
            fresh = base_row0.astype(np.int64)
            fresh[rows] += moved_to[place] - old.row0[place]
            self._dropped.append(overlay.uids[~alive])
            self.segments[overlay.number] = replace(overlay, bases=(base, _narrow(fresh))).only(alive)
            self._changed.add(overlay.number)

    def _uncover(self) -> None:
        """Take in again the segments with another copy of what is no longer live, and overlays of that: a trajectory
        that expired may be derived or imported again, under the same uid.
        """
        if not self._dropped:
            return
        gone, self._dropped = np.concatenate(self._dropped), []
        self._seen.discard(gone)
        found = {id for id, uids in self._covered.items() if np.isin(uids, gone).any()}
        for id in sorted(found):
            copies = self._covered.pop(id)
            found |= {overlay for overlay, bases in self._orphaned.items() if np.isin(bases, copies).any()}
        self._orphaned = {id: bases for id, bases in self._orphaned.items() if id not in found}
        self._known -= found
        self._new |= found

    def _admit(self, ids: Iterable[str], *, patient: bool) -> None:
        """Add segments, then overlays. If `patient`, an overlay whose base is missing waits for the next refresh."""
        waiting = self._waiting.items()
        overlays = self._waiting = {
            id: footer for id, footer in waiting if id not in self._where and not self.log.hides(id)
        }
        segments: list[tuple[str, Footer, Places]] = []
        count = 0
        try:
            for id in ids:
                if id in self._known:
                    continue
                file = self.file_of(id)
                if self.log.hides(file):
                    self._hidden.add(file)
                    continue
                footer = self._rewritten.get(file) or self._footer(file)
                self._known.add(id)
                if footer is None:
                    continue
                if footer.is_overlay:
                    overlays[id] = footer
                    continue
                if footer.replaces and id == file:  # the segments it was rewritten from came first: is there more?
                    full, segments, count = segments, [], 0
                    self._add(full)
                    taken = sum(len(self.segments[number].uids) for number in self.files.get(id, ()))
                    if taken == np.count_nonzero(self.log.select_live(id, footer.places.uids)):
                        continue
                places = self._take_part(id, footer)
                segments.append((id, footer, places))
                count += len(places.uids)
                if count >= _TOGETHER:
                    full, segments, count = segments, [], 0
                    self._add(full)
        finally:  # they are known now, whatever error ended the loop
            self._add(segments)
        self._waiting = {}
        for id, footer in sorted(overlays.items()):
            places = self._take_part(id, footer)
            assert places.bases is not None
            alive = self.log.select_live(self.file_of(id), places.uids)
            bases = set(places.bases.segment[alive].tolist())
            missing = {
                base for base in bases if not self._find_numbers(base) and not self.log.hides(self.log.find_final(base))
            }
            if missing and patient and id not in self._waited and not missing & self.unreadable.keys():
                self._waiting[id] = footer
                continue
            if missing:
                self._warn(f"overlay '{id}' derives from missing segments: {', '.join(sorted(missing))}")
            self._add([(id, footer, places)])

    def _add(self, found: Sequence[tuple[str, Footer, Places]]) -> None:
        """Add the trajectories of segments, or of the parts of rewritten ones that were these segments. Overlays come
        one by one: the base of one may be another copy."""
        if not found:
            return
        wanted = [self.log.select_live(self.file_of(id), places.uids) for id, _, places in found]
        bases = None
        if found[0][1].is_overlay:
            derived = found[0][2].bases
            assert derived is not None
            bases = self.find_bases(derived, anywhere=True)
            wanted[0] &= bases[0] >= 0
        kept = choose_live(np.concatenate([places.uids for _, _, places in found]), np.concatenate(wanted), self._seen)
        done = 0
        for (id, footer, places), own_wanted in zip(found, wanted, strict=True):
            keep, done = kept[done : done + len(places.uids)], done + len(places.uids)
            file, number = self.file_of(id), len(self.segments)
            segment = Segment(
                number=number,
                id=id,
                file=file,
                schema_id=footer.header["schema"],
                is_overlay=footer.is_overlay,
                columns=footer.columns,
                uids=places.uids,
                row0=_narrow(places.row0),
                length=places.length,
                first_step=places.first_step if places.first_step.any() else None,
                bases=None if bases is None else (bases[0].astype(np.uint32), _narrow(bases[1])),
                episode=places.episode,
            )
            copies, own = places.uids[own_wanted & ~keep], [self.segments[n].uids for n in self._find_numbers(id)]
            if len(copies) > sum(map(len, own)):  # otherwise they have moved to this file
                self._covered[id] = np.setdiff1d(copies, np.concatenate([copies[:0], *own]))
            # A mask copies, so that a part does not keep the whole in memory.
            self.segments.append(segment.only(keep))
            self.files.setdefault(file, []).append(number)
            for base in np.unique(bases[0][keep]).tolist() if bases is not None else ():
                self._derived.setdefault(base, set()).add(number)

    def _take_part(self, id: str, footer: Footer) -> Places:
        """Select the trajectories of segment `id` from the file that has them now."""
        return footer.places if id not in self._where else footer.places.part(*footer.part(id))

    def find_bases(self, bases: Bases, *, anywhere: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Find the number of the base's segment (-1 if it is not live) and its first row for each overlay row.

        The base is looked for in the segment that the overlay names; with `anywhere`, a copy in another one will do.
        """
        ids, uids, offset = bases
        base, row0 = np.full(len(ids), -1), np.zeros(len(ids), dtype=np.int64)

        def look_in(numbers: Iterable[int], rows: np.ndarray) -> None:
            for segment in (self.segments[number] for number in numbers):
                place = positions(segment.uids, uids[rows])
                found = place >= 0
                base[rows[found]] = segment.number
                row0[rows[found]] = segment.row0[place[found]] + offset[rows[found]]

        for id in dict.fromkeys(ids):
            look_in(self._find_numbers(id), np.flatnonzero(ids == id))
        lost = np.flatnonzero(base < 0)
        if anywhere and (live := self._seen.contains(uids[lost])).any():
            look_in((segment.number for segment in self.segments if not segment.is_overlay), lost[live])
        return base, row0

    def _find_live(self, uids: np.ndarray) -> np.ndarray:
        """Return (n,) bool: which of `uids` ("S16") are live. Searches all segments: it is asked about copies only."""
        wanted = np.sort(uids)
        live = [segment.uids[contains(wanted, segment.uids)] for segment in self.segments]
        return contains(np.sort(np.concatenate([wanted[:0], *live])), uids)

    @property
    def rewritten(self) -> Collection[str]:
        """Ids of segments that were rewritten into those that are there."""
        return self._where.keys()

    def file_of(self, id: str) -> str:
        """Return the id of the segment whose file holds the trajectories of segment `id` now."""
        return self._where.get(id, id)

    def _find_numbers(self, id: str) -> list[int]:
        """Return the numbers of the segments that have the trajectories of `id`, in whatever file."""
        return self.files.get(self.file_of(id), [])

    def _footer(self, id: str) -> Footer | None:
        try:
            listed = self._manifests.find(id)
            if listed is not None:
                self.listed_rows[id] = listed.header["rows"]
                return listed
            footer = read_footer(self._storage, id)
            places = footer.places
            self.observe(id, footer)
            return Footer.of_places(footer.header, footer.path, places)
        except FileNotFoundError:  # expired or rewritten since it was listed: the next refresh finds out
            self.look_back()
        except AmagoError as error:
            self.unreadable[id] = str(error)
            self._warn(f"{error}; it is skipped, see: amago lake verify {self.lake.name}")
        return None

    def _warn(self, text: str) -> None:
        self.listener(Notice(text=text, level="warning"))

    def _list(self) -> None:
        """Note segments that are new and files that are gone."""
        for new, gone in self._changes:
            self._new.update(id for id in new if id not in self._known and self.only(id))
            self._vanished.update(gone)
            self._hidden.difference_update(gone)
