"""Reading everything once, every column against its CRC and every file against what a lake may hold; and repair.

A damaged segment is quarantined: an entry of the log gives the reason and its trajectories, and readers ignore it from
then on; the file itself is not changed. Another entry ends that when the segment is intact again.

A repair writes the trajectories of a damaged segment whose own checksums are right into a new segment that replaces it;
the damaged file is kept in `quarantine/`. Where a footer cannot be read but the columns can, the footer is rebuilt from
what the SQL index recorded. The quarantine of a segment ends if nothing is lost; otherwise it stays, as a record. A
damaged log begins again with what can be read of it.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pipelines.errors import AmagoError, InputMissing, IntegrityError
from pipelines.events import Listener, Notice, Progress, silent
from pipelines.files import atomic
from pipelines.files.atomic import explain_errors
from pipelines.files.malformed import open_regular
from pipelines.lake import footer as footers
from pipelines.lake import segment as segments
from pipelines.lake.arrow import UNREADABLE, arrow_schema, to_numpy
from pipelines.lake.folders import (
    QUARANTINE,
    REWRITTEN,
    ROOT,
    blob_key,
    is_rewritten,
    list_all,
    parse_segment_name,
    segment_key,
)
from pipelines.lake.footer import FORMAT, Footer, encode, hex_uids, read_footer
from pipelines.lake.live import LiveTable
from pipelines.lake.log import Held, LakeLog, LogEntry, append, lease
from pipelines.lake.maintenance.compaction import rewrite
from pipelines.lake.segment import SegmentFile, StagedFiles, open_segment, stored_bytes
from pipelines.lake.sql import catalog

if TYPE_CHECKING:
    from pipelines.lake.store import Lake


_AHEAD = 16  # segments fetched at once


@dataclass(frozen=True, kw_only=True)
class _CorruptSegment:
    """A damaged segment: its id, the reason, and its uids (`damaged`: those whose own bytes are wrong, where known).
    `schema`: why its schema cannot be read, which is then all that is known to be damaged."""

    segment: str
    reason: str
    trajectories: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    schema: str = ""

    def __str__(self) -> str:
        return self.segment


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The findings of `verify`. `missing`: segments that the index knew and that are gone, with their number of
    trajectories; `logs`: damaged logs of dead writers, which were kept, and whose unreadable trajectories are lost;
    `foreign`: paths in `segments/` that no lake wrote; `log`: what is damaged or missing in the lake's log.
    """

    segments_checked: int
    trajectories: int
    bytes: int
    corrupt: tuple[_CorruptSegment, ...] = ()
    missing: Mapping[str, int] = field(default_factory=dict)
    logs: tuple[str, ...] = ()
    foreign: tuple[str, ...] = field(default=())
    log: tuple[str, ...] = ()


class Quarantine:
    """The damaged segments of a lake: entries of its log, and what is kept of the segments under `quarantine/`."""

    def __init__(self, lake: Lake) -> None:
        self._lake, self._storage = lake, lake.storage

    def enter(self, id: str, damage: Mapping[str, Any] | None) -> None:
        """Quarantine a segment, with what is known of its damage, or end that (None). Under the maintenance lease."""
        about = {id: None if damage is None else dict(damage)}
        append(self._storage, LogEntry(time=time.time(), reason="verified", quarantine=about))

    def release(self, id: str) -> None:
        """End the quarantine of a segment, under the maintenance lease. StageFailed if the storage fails."""
        self.enter(id, None)
        key = self._footer_key(id)
        with explain_errors(f"remove '{self._storage.url(key)}'"):
            self._storage.remove(key)

    def remember(self, id: str) -> None:
        """Keep what the index knows of a segment whose footer cannot be read: the index will forget it, and repair
        needs it.
        """
        known = catalog.SqlIndex(self._lake).recall_footer(id)
        if known is None or self._storage.exists(self._footer_key(id)):
            return
        facts, table = known
        header = {name: facts[name] for name in ("kind", "schema", "writer", "t_commit", "rows")}
        header |= {"format": FORMAT, "sequence": parse_segment_name(id)[1], "columns": dict.fromkeys(facts["columns"])}
        # Which part came from which segment is not recorded.
        header["replaces"] = {old: [0, table.num_rows] for old in facts["replaces"]}
        self._storage.write(self._footer_key(id), json.dumps(encode(header, table)).encode())

    def restore(self, id: str, held: Held) -> bool:
        """Give a segment whose footer cannot be read the one that the index recorded; False if that is not possible.

        The columns come first in the file and are read as a stream. If they are damaged too, the new footer does not
        vouch for them, and the segment stays known as damaged.
        """
        storage, key = self._storage, segment_key(id)
        try:
            texts = json.loads(storage.read(self._footer_key(id)))
            footer = footers.decode({name.encode(): text.encode() for name, text in texts.items()}, id)
            header, table = dict(footer.header), footer.trajectories
        except (IntegrityError, *UNREADABLE):
            return False
        columns = self._lake.schema(header["schema"]).columns
        stored = [column for column in columns if column.name in header["columns"]]
        plain = [column for column in stored if not column.is_blob]
        try:
            stream = pa.ipc.open_stream(pa.py_buffer(storage.read(key)).slice(_MAGIC))
            batch = stream.read_next_batch()
        except (*UNREADABLE, StopIteration):
            return False
        rows = int((table["length"].to_numpy() + 1).sum())
        if not stream.schema.equals(arrow_schema(plain)) or batch.num_rows != rows:
            return False
        values = {c.name: c.as_stored(to_numpy(c, batch.column(place))) for place, c in enumerate(plain)}
        crcs: dict[str, int | None] = {name: segments.checksum(column) for name, column in values.items()}

        def write(crcs: Mapping[str, int | None]) -> StagedFiles:
            texts = encode({**header, "columns": {column.name: crcs.get(column.name) for column in stored}}, table)
            name = f"{REWRITTEN}.{secrets.token_hex(4)}"
            return segments.stage_files(self._lake.local / "tmp", name, plain, values, lambda: texts)

        draft = write(crcs)
        try:
            file = SegmentFile(draft.main, columns, wide=lambda: storage.fetch(blob_key(id)))
            file.require_cover()
            crcs |= {column.name: file.compute_checksum(column.name) for column in stored if column.is_blob}
            is_sound = bool(file.check_trajectories().all())
        except IntegrityError:
            return False
        finally:
            draft.discard()
        self._keep_copy(key)
        held()
        storage.publish(write(crcs if is_sound else {}).main, key)
        storage.forget(key)
        return True

    def set_aside(self, id: str, held: Held) -> None:
        """Move a segment's remaining files into quarantine."""
        for key in (segment_key(id), blob_key(id)):
            if self._storage.exists(key):
                self._keep_copy(key)
                held()
                self._storage.remove(key)
                self._storage.forget(key)

    def _keep_copy(self, key: str) -> None:
        """Copy a file into quarantine, unless it is there already: the first copy is the damaged one."""
        to = f"{QUARANTINE}/{key.rpartition('/')[2]}"
        if self._storage.exists(to):
            return
        with open_regular(self._storage.fetch(key)) as content:
            staged = atomic.stage(
                self._lake.local / "tmp", f"{REWRITTEN}.aside", lambda file: shutil.copyfileobj(content, file)
            )
        self._storage.publish(staged, to)

    def _footer_key(self, id: str) -> str:
        """Return the key of the footer that the index recorded for a segment."""
        return f"{QUARANTINE}/{id.rpartition('/')[2]}.footer"


def verify(lake: Lake, listener: Listener = silent) -> VerifyReport:
    """Read every segment and compare checksums; mark the damaged ones. Damage is reported, not raised; InputMissing for
    segments of a newer format.
    """
    storage, quarantine = lake.storage, Quarantine(lake)
    known = catalog.SqlIndex(lake).recall_segments()  # before segments are listed
    log = LakeLog(storage, lake.id, listener)
    log.refresh()
    ids = [id for id in list_all(storage) if id not in log.whole]
    corrupt, trajectories, size = [], 0, 0
    for done, id in enumerate(ids, 1):
        if done % _AHEAD == 1:
            # A copy on this host proves nothing about the original.
            keys = [key for each in ids[done - 1 : done - 1 + _AHEAD] for key in (segment_key(each), blob_key(each))]
            for key in keys:
                storage.forget(key)
            storage.prefetch(keys)
        with contextlib.suppress(FileNotFoundError):  # it expired meanwhile
            uids, damage = _check(lake, id, log)
            if damage is not None and damage.schema:  # once that is there again, its trajectories are, too
                corrupt.append(damage)
                listener(Notice(text=damage.reason, level="warning"))
            elif damage is not None:
                corrupt.append(damage)
                text = f"{damage.reason}; it is quarantined with its {len(damage.trajectories)} trajectories"
                try:
                    if not damage.damaged:  # otherwise its footer can be read
                        with explain_errors("keep what is known of it"):
                            quarantine.remember(id)
                    if id not in log.quarantined:
                        with lease(lake):
                            own = ("segment", "schema")
                            about = {name: value for name, value in asdict(damage).items() if name not in own}
                            quarantine.enter(id, about)
                except (AmagoError, ValueError) as error:  # ValueError: a foreign name that no entry can hold
                    text = f"{damage.reason}; it cannot be quarantined: {error}"
                listener(Notice(text=text, level="warning"))
            else:
                if not log.is_superseded(id) and log.is_finished(id):
                    trajectories += int(log.select_unexpired(id, uids).sum())
                size += stored_bytes(storage, id)
                if id in log.quarantined:
                    try:
                        with lease(lake):
                            quarantine.release(id)
                    except AmagoError as error:
                        text = f"segment '{id}' is intact again, but its quarantine cannot be ended: {error}"
                        listener(Notice(text=text, level="warning"))
        listener(Progress(stage="verify", done=done, total=len(ids), unit="segments"))
    foreign = [f"{ROOT}/{name}" for name in sorted(set(storage.names(ROOT)) - set(storage.folders(ROOT)))]
    for folder in sorted(storage.folders(ROOT)):
        names = set(storage.names(f"{ROOT}/{folder}"))
        foreign += [
            f"{ROOT}/{folder}/{name}"
            for name in sorted(names)
            if not name.endswith(".arrow")
            or (name.endswith(".blob.arrow") and name.removesuffix(".blob.arrow") + ".arrow" not in names)
        ]
    logs = sorted(name for name in storage.names(QUARANTINE) if name.endswith(".wal"))
    return VerifyReport(
        segments_checked=len(ids),
        trajectories=trajectories,
        bytes=size,
        corrupt=tuple(corrupt),
        missing=_find_missing(lake, known, log),
        logs=tuple(storage.url(f"{QUARANTINE}/{name}") for name in logs),
        foreign=tuple(map(storage.url, foreign)),
        log=log.problems,
    )


def _find_missing(lake: Lake, known: Mapping[str, int], log: LakeLog) -> dict[str, int]:
    """Return those of the `known` segments, with their numbers of trajectories, that are gone for no reason: not
    rewritten, expired or quarantined.
    """
    gone = known.keys() - set(list_all(lake.storage))
    log.refresh()  # again: an entry comes before its files go
    if not gone or log.forgot_at >= catalog.SqlIndex(lake).read_time():  # it no longer says which segments expired
        return {}
    replaced: set[str] = set()
    for id in filter(is_rewritten, list_all(lake.storage)):
        with contextlib.suppress(FileNotFoundError, AmagoError):
            replaced.update(read_footer(lake.storage, id).replaces)
    aside = {name.partition(".")[0] for name in lake.storage.names(QUARANTINE)}
    return {
        id: known[id]
        for id in sorted(gone - replaced)
        if id.rpartition("/")[2].partition(".")[0] not in aside and not log.hides(id)
    }


def _check(lake: Lake, id: str, log: LakeLog) -> tuple[np.ndarray, _CorruptSegment | None]:
    """Read a segment completely; return its uids ("S16") and the damage, if anything differs from its footer. Where it
    cannot be read, the index knows its uids, until it is quarantined, and then the log.
    InputMissing for a newer format, FileNotFoundError.
    """
    uids = np.zeros(0, "S16")
    try:
        footer = read_footer(lake.storage, id)
        uids = footer.uids()
        file = _open(lake, id, footer)
    except _SchemaLost as error:
        known = tuple(hex_uids(uids))
        return uids, _CorruptSegment(segment=id, reason=str(error), trajectories=known, schema=error.reason)
    except IntegrityError as error:
        recorded = log.quarantined.get(id, {}).get("trajectories", ())
        known = tuple(hex_uids(uids)) or tuple(catalog.SqlIndex(lake).recall_uids(id)) or tuple(recorded)
        return uids, _CorruptSegment(segment=id, reason=str(error), trajectories=known)
    wrong = file.list_damaged_columns()
    if not wrong:
        return uids, None
    reason = f"segment '{file.path}' is damaged: wrong checksum in {', '.join(wrong)}"
    damaged = tuple(hex_uids(uids[~file.check_trajectories()]))
    return uids, _CorruptSegment(segment=id, reason=reason, trajectories=tuple(hex_uids(uids)), damaged=damaged)


class _SchemaLost(IntegrityError):
    """A segment cannot be checked since its schema cannot be read, for this `reason`."""

    def __init__(self, path: str, error: AmagoError) -> None:
        super().__init__(f"segment '{path}' cannot be read: {error.message}", hint=error.hint)
        self.reason = error.message


def _open(lake: Lake, id: str, footer: Footer) -> SegmentFile:
    """Open a segment; IntegrityError unless its schema is there and its trajectories cover it."""
    try:
        columns = lake.schema(footer.header["schema"]).columns
    except InputMissing as error:
        if lake.storage.exists(f"schemas/{footer.header['schema']}.json"):  # of a newer version, not damaged
            raise
        raise _SchemaLost(footer.path, error) from error
    except IntegrityError as error:
        raise _SchemaLost(footer.path, error) from error
    file = open_segment(lake.storage, id, columns)
    file.require_cover()
    return file


_OURS = re.compile(r"[0-9a-f]{16}-.+-[0-9]{8}(\.ovl)?")
_MAGIC = 8  # bytes before the first message of an Arrow file


@dataclass(frozen=True, kw_only=True)
class RepairResult:
    """The effect of a repair. `segments`: damaged ids and what they became (None: nothing; their own id: restored).

    `lost`: uids of trajectories that were live and no longer are; `orphans`: intact derived trajectories whose base is
    lost; `unknown`: ids of segments whose content is unknown.
    """

    segments: Mapping[str, str | None]
    lost: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return not (self.lost or self.unknown)


def repair(lake: Lake, report: VerifyReport, *, listener: Listener = silent) -> RepairResult:
    """Repair the damage that `report` lists. Locked while another process maintains the lake; StageFailed if the
    storage fails; IntegrityError if a schema is damaged or missing, which says nothing of its segments: they stay.
    """
    from pipelines.lake.store import HEAL

    if unread := next((found.schema for found in report.corrupt if found.schema), ""):
        raise IntegrityError(f"{unread}; its segments are left as they are", hint=HEAL)
    if not (report.corrupt or report.log):
        return RepairResult(segments={})
    made: dict[str, str | None] = {}
    quarantine = Quarantine(lake)
    with lease(lake) as held, explain_errors(f"repair '{lake.name}'"):
        lake.storage.create_folders()  # copying a lake loses empty folders
        log = LakeLog(lake.storage, lake.id, listener)
        log.refresh()
        if log.problems:
            log.shorten(list_all(lake.storage))
            log.refresh()
        live = _read_live(lake, listener)  # the segments that a damaged one was rewritten from may still exist
        for found in report.corrupt:
            made[found.segment] = _repair(lake, found.segment, live, log, held, listener)
        known = {found.segment: found.trajectories for found in report.corrupt}
        ours = [id for id in known if _OURS.fullmatch(id.rpartition("/")[2])]
        lost, orphans = _find_lost(lake, [uid for id in ours for uid in known[id]], log, listener)
        unknown = [id for id in ours if not known[id] and made[id] is None]
        for id, uids in known.items():
            gone = sorted({*lost} & {*uids})
            if made[id] == id:
                continue
            # A rewritten segment stays quarantined: those that it was rewritten from count in its place.
            if not gone and id not in unknown and (made[id] is not None or id not in log.added):
                quarantine.release(id)
            else:
                damage = log.quarantined.get(id, {"trajectories": list(uids)})
                quarantine.enter(id, {**damage, "repaired": time.time(), "into": made[id], "lost": gone})
    return RepairResult(segments=made, lost=tuple(lost), orphans=tuple(orphans), unknown=tuple(unknown))


def _repair(lake: Lake, id: str, live: set[str], log: LakeLog, held: Held, listener: Listener) -> str | None:
    """Return what became of a damaged segment. Its file is in quarantine afterwards, unless it was restored."""
    into: str | None = None
    quarantine = Quarantine(lake)
    if not log.is_superseded(id) and _OURS.fullmatch(id.rpartition("/")[2]):
        try:
            readable = True
            try:
                _ = read_footer(lake.storage, id).trajectories
            except IntegrityError:
                readable = quarantine.restore(id, held)
            if readable:
                footer = read_footer(lake.storage, id)
                file = _open(lake, id, footer)
                keep = file.check_trajectories()
                if keep.all() and not file.list_damaged_columns():
                    quarantine.release(id)
                    return id
                wanted = log.select_unexpired(id, footer.uids())
                elsewhere = {uid for uid, w in zip(hex_uids(footer.uids()), wanted, strict=True) if w} <= live
                if not elsewhere and (keep & wanted).any():
                    written = rewrite(lake, {id: keep & wanted}, held, listener=listener)
                    into = None if written is None else written.id
        except (FileNotFoundError, IntegrityError, InputMissing) as error:
            listener(Notice(text=f"no trajectory of segment '{id}' can be read: {error}", level="warning"))
    quarantine.set_aside(id, held)
    return into


def _read_live(lake: Lake, listener: Listener) -> set[str]:
    live = LiveTable(lake, listener, thorough=True)
    live.refresh()
    return {uid for segment in live.segments for uid in hex_uids(segment.uids)}


def _find_lost(lake: Lake, uids: Sequence[str], log: LakeLog, listener: Listener) -> tuple[list[str], list[str]]:
    """Return those of `uids` that are neither live nor expired, and the uids derived from them."""
    live = _read_live(lake, listener)
    expired = {uid for dead in log.dead.values() for uid in hex_uids(dead)}
    lost = [uid for uid in dict.fromkeys(uids) if uid not in live and uid not in expired]
    gone, orphans = set(lost), []
    for id in list_all(lake.storage):
        if id.endswith(".ovl") and not log.hides(id):
            try:
                table = read_footer(lake.storage, id).trajectories.select(["uid", "base_uid"])
            except (FileNotFoundError, AmagoError):
                continue
            pairs = zip(table["uid"].to_pylist(), table["base_uid"].to_pylist(), strict=True)
            orphans += [uid.hex() for uid, base in pairs if base.hex() in gone and uid.hex() not in expired]
    return lost, orphans
