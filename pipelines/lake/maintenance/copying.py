"""Copying trajectories from one lake into another that may hold others already.

A segment all of whose trajectories are copied is copied as a file, under its id. From others, the trajectories that are
selected, live and missing in the target are written into new segments, so every uid stays live once, however often a
copy is repeated. A derived trajectory keeps its base if the base is in the target or is copied too; otherwise it is
written out in full and has no base. Copies are verified against their checksums before they are published.

Repeating an interrupted copy copies what is missing. What expired in the target since the first copy does not return.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.errors import IntegrityError, StageFailed, UsageError
from pipelines.events import Listener, Notice, Progress, silent
from pipelines.files import atomic
from pipelines.files.atomic import explain_errors
from pipelines.lake import collectors
from pipelines.lake import segment as segments
from pipelines.lake.folders import COPIED, FolderChooser, blob_key, list_all, segment_key
from pipelines.lake.footer import Footer, hex_uids, read_footer
from pipelines.lake.live import LiveTable, Segment
from pipelines.lake.maintenance.retention import ExpiredUids
from pipelines.lake.reading import Reader, find_pieces
from pipelines.lake.schema import Column
from pipelines.lake.segment import SegmentFile, StagedFiles, UnsealedBatch
from pipelines.lake.storage import LocalStorage, is_remote
from pipelines.lake.uids import contains, find_place, raw_uids

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

_SEAL_BYTES = 64 << 20
_PASSES = 5  # over a source whose files are rewritten and removed meanwhile


@dataclass
class CopyResult:
    """The effect of a copy. `segments` were copied as files, `rewritten` trajectories into new ones; `present` existed
    before. `damaged`: ids of source segments that could not be copied, or only in part.
    """

    segments: int = 0
    rewritten: int = 0
    trajectories: int = 0
    steps: int = 0
    bytes: int = 0
    present: int = 0
    damaged: list[str] = field(default_factory=list)


def refuse_nested(source: Lake, target: Path | str) -> None:
    """Raise UsageError if one lake would be inside the other."""
    if not isinstance(source.storage, LocalStorage) or is_remote(target):
        return
    ours, theirs = source.path.resolve(), Path(target).resolve()
    if ours != theirs and (ours in theirs.parents or (theirs in ours.parents and (theirs / "lake.json").exists())):
        raise UsageError(f"'{target}' and lake '{source.name}': one is inside the other", hint="choose another target")


def copy(source: Lake, target: Lake, *, where: str = "", listener: Listener = silent) -> CopyResult:
    """Copy the live trajectories of `source` that match the SQL predicate `where` (empty: all); a piece of an episode
    brings the others.

    Others may read and write both lakes meanwhile; Locked if another process copies into the target. Damage in the
    source is reported, skipped and included in the result. UsageError for wrong SQL or one lake given twice,
    StageFailed if a storage fails.
    """
    if source.id == target.id:
        raise UsageError(f"'{source.name}' and '{target.name}' are the same lake")
    source.salvage(listener=listener)
    chosen = None
    if where.strip():
        from pipelines.lake.sql.selection import select

        chosen = select(source, where, listener=listener).uids
        pieces = find_pieces(source, listener=listener)
        siblings = {uid for one in hex_uids(chosen) for uid in pieces.get(one, ())} if pieces else set()
        chosen = np.union1d(chosen, raw_uids(sorted(siblings)))
    with target.storage.hold("copy", what=f"lake '{target.name}' is being copied into"):
        job = _CopyJob(source, target, chosen, listener)
        ExpiredUids(target.storage).begin()
        with explain_errors(f"copy '{source.name}' into '{target.name}'"):
            for attempt in range(_PASSES):
                if job.copy_once(first=attempt == 0):
                    return job.done
    raise StageFailed(f"files of lake '{source.name}' vanish while they are copied", hint="repeat the command later")


@dataclass
class _CopyJob:
    """A copy in progress: what the target has, and what is queued for new segments."""

    source: Lake
    target: Lake
    chosen: np.ndarray | None  # uids ("S16"), sorted
    listener: Listener
    done: CopyResult = field(default_factory=CopyResult)

    def __post_init__(self) -> None:
        self._reader = Reader(self.source, listener=self.listener)
        self._there = LiveTable(self.target, self.listener)
        self._folders = FolderChooser(self.target.storage)
        self._pending: dict[tuple[str, tuple[str, ...], bool], list[UnsealedBatch]] = {}
        self._pending_bytes = 0
        self._collectors: set[str] = set()
        self._missed = False
        for path in (self.target.local / "tmp").glob(f"{COPIED}.*.tmp"):  # of dead copies
            path.unlink(missing_ok=True)

    def copy_once(self, *, first: bool) -> bool:
        """Make one pass over the source; returns whether nothing was missed. `first`: count what is present already."""
        self._missed, self._first = False, first
        self._reader.refresh()
        self.done.damaged += [id for id in self._reader.live.log.list_quarantined() if id not in self.done.damaged]
        files: dict[str, list[Segment]] = {}
        for segment in self._reader.live.segments:
            if len(segment.uids):
                files.setdefault(segment.file, []).append(segment)
        files = dict(sorted(files.items()))
        for overlays in (False, True):
            self._read_target()
            mine = {id: own for id, own in files.items() if own[0].is_overlay == overlays}
            for number, (id, own) in enumerate(mine.items(), 1):
                try:
                    self._copy_from(id, own)
                except FileNotFoundError:  # rewritten and swept meanwhile
                    self._missed = True
                except IntegrityError as error:
                    self._report_damage(id, str(error))
                what = "derived" if overlays else "copy"
                self.listener(Progress(stage=what, done=number, total=len(mine), unit="segments"))
            self._flush()
        for name in sorted(self._collectors - {""}):
            record = collectors.read(self.source, name)
            if record is not None and collectors.read(self.target, name) is None:
                collectors.write(self.target, record)
        return not self._missed

    def _read_target(self) -> None:
        """Read what the target has: its live uids, sorted, and ids whose trajectories are not needed (again)."""
        self._there.refresh()
        parts = [np.zeros(0, "S16"), *(segment.uids for segment in self._there.segments)]
        numbers = np.repeat(np.arange(-1, len(parts) - 1), [len(part) for part in parts])
        uids = np.concatenate(parts)
        order = np.argsort(uids)
        self._present, self._present_in = uids[order], numbers[order]
        log = self._there.log
        self._expired = ExpiredUids(self.target.storage).read()
        self._known = {*list_all(self.target.storage), *self._there.rewritten, *log.moved, *log.whole}

    def _copy_from(self, id: str, own: list[Segment]) -> None:
        alive = np.concatenate([segment.uids for segment in own])
        alive = alive[~contains(self._expired, alive)]
        if self.chosen is not None:
            alive = alive[contains(self.chosen, alive)]
        if id in self._known or not len(alive):
            self.done.present += len(alive) if self._first else 0
            return
        footer = read_footer(self.source.storage, id)
        uids = footer.uids()
        wanted = contains(np.sort(alive), uids)
        missing = wanted & ~contains(self._present, uids) & ~self._came_before(footer)
        self.done.present += int((wanted & ~missing).sum()) if self._first else 0
        if not missing.any():
            return
        self._register(footer.header["schema"])
        self._collectors.update(footer.trajectories["collector"].unique().to_pylist())
        # A segment that the target rewrote itself counts there by its log alone.
        bases = footer.places.bases
        bases_are_there = bases is None or (self._there.find_bases(bases)[0] >= 0).all()
        if missing.all() and bases_are_there and self._there.log.is_finished(id):
            try:
                self._copy_file(id, footer)
                return
            except IntegrityError as error:
                self._report_damage(id, str(error))
        for uid in hex_uids(uids[missing]):
            try:
                self._queue(uid)
            except IntegrityError as error:
                self._report_damage(id, str(error))

    def _register(self, schema_id: str) -> None:
        new, known = self.source.schema(schema_id), self.target.schemas().values()
        self.target.register(new)
        if known and all(each.spaces != new.spaces for each in known):
            count = len(known) + 1
            text = f"lake '{self.target.name}' now holds steps of {count} different spaces; each is sampled separately"
            self.listener(Notice(text=text))

    def _came_before(self, footer: Footer) -> np.ndarray:
        """Return (n,) bool: which were rewritten from segments that the target has or had under the same id."""
        came = np.zeros(footer.trajectories.num_rows, dtype=bool)
        for old in footer.replaces:
            if old in self._known:
                first, count = footer.part(old)
                came[first : first + count] = True
        return came

    def _copy_file(self, id: str, footer: Footer) -> None:
        name = self._name_writer()
        tmp = self.target.local / "tmp"
        columns = self.source.schema(footer.header["schema"]).columns
        wide = any(column.is_blob and column.name in footer.columns for column in columns)
        main = self._fetch(tmp, name, segment_key(id))
        staged, blob = StagedFiles(main, None), None
        try:
            if wide:
                blob = self._fetch(tmp, name, blob_key(id))
                staged = StagedFiles(main, blob)
            file = SegmentFile(staged.main, columns, wide=None if blob is None else lambda: blob)
            file.require_cover()
            wrong = file.list_damaged_columns()
            if wrong:
                where = self.source.storage.url(segment_key(id))
                raise IntegrityError(f"segment '{where}' is damaged: wrong checksum in {', '.join(wrong)}")
            size = sum(path.stat().st_size for path in (staged.main, blob) if path is not None)
            staged.publish(self.target.storage, id)
        except BaseException:
            staged.discard()
            segments.drop_orphan(self.target.storage, id)
            raise
        table = footer.trajectories
        self.done.segments += 1
        self.done.bytes += size
        self.done.trajectories += table.num_rows
        self.done.steps += int(table["length"].to_numpy().sum())

    def _fetch(self, tmp: Path, name: str, key: str) -> Path:
        path = self.source.storage.fetch(key)
        with open(path, "rb") as content:
            return atomic.stage(tmp, name, lambda file: shutil.copyfileobj(content, file, 1 << 20))

    def _queue(self, uid: str) -> None:
        """Queue one trajectory for a new segment. IntegrityError if it is damaged."""
        segment, _ = self._reader.locate(uid)
        row, own = self._read(uid)
        base = row["base_uid"]
        place = None if base is None else find_place(self._present, base.hex())
        lies_in = None if place is None else self._there.segments[self._present_in[place]].file
        if base is not None and lies_in is None:
            self._read(base.hex())  # verifies what it shares with its base
            schema = self.source.schema(segment.schema_id)
            whole = self._reader.read(uid).columns
            own = {column.name: column.as_stored(whole[column.name]) for column in schema.columns}
            row |= {"crc": self._compute_crc(own.values()), "base_uid": None, "base_offset": None}
        base = row["base_uid"]
        row |= {"base_uid": base and base.hex(), "base_segment": lies_in, "tags": list(row["tags"] or ())}
        key = (segment.schema_id, tuple(own), base is not None)
        self._pending.setdefault(key, []).append(UnsealedBatch([bytes.fromhex(uid)], own, row))
        self._pending_bytes += sum(values.nbytes for values in own.values())
        if self._pending_bytes >= _SEAL_BYTES:
            self._flush()

    def _read(self, uid: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the row of a trajectory and the columns that it stores itself, in storage form. IntegrityError if they
        differ from what was written.
        """
        segment, _ = self._reader.locate(uid)
        row, whole = dict(self._reader.row(uid)), self._reader.read(uid).columns
        columns = [column for column in self.source.schema(segment.schema_id).columns if column.name in segment.columns]
        own = {column.name: column.as_stored(whole[column.name]) for column in columns}
        if self._compute_crc(own.values()) != row["crc"]:
            raise IntegrityError(f"trajectory {uid} of lake '{self.source.name}' is damaged: it has a wrong checksum")
        return row, own

    def _flush(self) -> None:
        for (schema_id, names, overlay), items in self._pending.items():
            columns: list[Column] = [c for c in self.source.schema(schema_id).columns if c.name in names]
            writer = self._name_writer()
            tmp = self.target.local / "tmp"
            staged = segments.stage(tmp, writer, schema_id, columns, items, sequence=0, overlay=overlay)
            size = sum(path.stat().st_size for path in (staged.main, staged.blob) if path is not None)
            staged.publish_new(self.target.storage, self._folders, writer, overlay=overlay)
            self.done.rewritten += len(items)
            self.done.trajectories += len(items)
            self.done.steps += sum(item.row["length"] for item in items)
            self.done.bytes += size
        self._pending, self._pending_bytes = {}, 0

    def _report_damage(self, id: str, reason: str) -> None:
        if id not in self.done.damaged:
            self.done.damaged.append(id)
            text = f"{reason}; only its undamaged trajectories are copied"
            self.listener(Notice(text=text, level="warning"))

    @staticmethod
    def _name_writer() -> str:
        return f"{COPIED}.{os.getpid():x}.{secrets.token_hex(4)}"

    @staticmethod
    def _compute_crc(columns: Iterable[np.ndarray]) -> int:
        return functools.reduce(lambda crc, values: segments.checksum(values, crc), columns, 0)
