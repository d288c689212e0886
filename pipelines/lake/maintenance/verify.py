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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pipelines.errors import AmagoError, InputMissing, IntegrityError
from pipelines.events import Listener, Notice, Progress, silent
from pipelines.files import atomic
from pipelines.files.atomic import explained
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
    segment_key,
    written_by,
)
from pipelines.lake.footer import FORMAT, Footer, hex_uids, metadata, read_footer
from pipelines.lake.live import LiveTable
from pipelines.lake.log import Held, LakeLog, LogEntry, append, lease
from pipelines.lake.maintenance.compaction import SegmentPart, rewrite
from pipelines.lake.segment import SegmentFile, StagedFiles, open_segment, stored_bytes
from pipelines.lake.sql import catalog
from pipelines.lake.storage import Storage

if TYPE_CHECKING:
    from pipelines.lake.store import Lake


_AHEAD = 16  # segments fetched at once


@dataclass(frozen=True, kw_only=True)
class _CorruptSegment:
    """A damaged segment: its id, the reason, and its uids (`damaged`: those whose own bytes are wrong, where known)."""

    segment: str
    reason: str
    trajectories: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()

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


def verify(lake: Lake, listener: Listener = silent) -> VerifyReport:
    """Read every segment and compare checksums; mark the damaged ones. Damage is reported, not raised; InputMissing for
    segments of a newer format.
    """
    known = catalog.SqlIndex(lake).recall_segments()  # before segments are listed
    log = LakeLog(lake.storage, lake.id, listener)
    log.refresh()
    ids = [id for id in list_all(lake.storage) if id not in log.whole]
    corrupt, trajectories, size = [], 0, 0
    for done, id in enumerate(ids, 1):
        if done % _AHEAD == 1:
            # A copy on this host proves nothing about the original.
            keys = [key for each in ids[done - 1 : done - 1 + _AHEAD] for key in (segment_key(each), blob_key(each))]
            for key in keys:
                lake.storage.forget(key)
            lake.storage.prefetch(keys)
        with contextlib.suppress(FileNotFoundError):  # it expired meanwhile
            uids, damage = _check(lake, id)
            if damage is not None:
                corrupt.append(damage)
                _mark_damaged(lake, damage, log, listener)
            else:
                if not log.is_superseded(id) and log.is_finished(id):
                    trajectories += int(log.select_unexpired(id, uids).sum())
                size += stored_bytes(lake.storage, id)
                if id in log.quarantined:
                    _release(lake, id, listener)
        listener(Progress(stage="verify", done=done, total=len(ids), unit="segments"))
    return VerifyReport(
        segments_checked=len(ids),
        trajectories=trajectories,
        bytes=size,
        corrupt=tuple(corrupt),
        missing=_find_missing(lake, known, log),
        logs=tuple(
            lake.storage.url(f"{QUARANTINE}/{name}")
            for name in sorted(lake.storage.names(QUARANTINE))
            if name.endswith(".wal")
        ),
        foreign=tuple(_foreign(lake.storage)),
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


def _check(lake: Lake, id: str) -> tuple[np.ndarray, _CorruptSegment | None]:
    """Read a segment completely; return its uids ("S16") and the damage, if anything differs from its footer.
    InputMissing for a newer format, FileNotFoundError.
    """
    uids = np.zeros(0, "S16")
    try:
        footer = read_footer(lake.storage, id)
        uids = footer.uids()
        file = _open(lake, id, footer)
    except IntegrityError as error:
        known = tuple(hex_uids(uids)) or tuple(catalog.SqlIndex(lake).recall_uids(id))
        return uids, _CorruptSegment(segment=id, reason=str(error), trajectories=known)
    wrong = file.list_damaged_columns()
    if not wrong:
        return uids, None
    reason = f"segment '{file.path}' is damaged: wrong checksum in {', '.join(wrong)}"
    damaged = tuple(hex_uids(uids[~file.check_trajectories()]))
    return uids, _CorruptSegment(segment=id, reason=reason, trajectories=tuple(hex_uids(uids)), damaged=damaged)


def _open(lake: Lake, id: str, footer: Footer) -> SegmentFile:
    """Open a segment; IntegrityError unless its schema is there and its trajectories cover it."""
    try:
        columns = lake.schema(footer.header["schema"]).columns
    except InputMissing as error:
        if lake.storage.exists(f"schemas/{footer.header['schema']}.json"):  # of a newer version, not damaged
            raise
        raise IntegrityError(f"segment '{footer.path}' cannot be read: {error}") from error
    file = open_segment(lake.storage, id, columns)
    file.require_cover()
    return file


def _mark_damaged(lake: Lake, found: _CorruptSegment, log: LakeLog, listener: Listener) -> None:
    text = f"{found.reason}; it is quarantined with its {len(found.trajectories)} trajectories"
    try:
        if not found.damaged:  # otherwise its footer can be read
            with explained("keep what is known of it"):
                _remember(lake, found.segment)
        if found.segment not in log.quarantined:
            with lease(lake):
                _enter(lake, found.segment, {name: value for name, value in asdict(found).items() if name != "segment"})
    except (AmagoError, ValueError) as error:  # ValueError: a foreign name that no entry can hold
        text = f"{found.reason}; it cannot be quarantined: {error}"
    listener(Notice(text=text, level="warning"))


def _release(lake: Lake, id: str, listener: Listener) -> None:
    try:
        with lease(lake):
            release(lake, id)
    except AmagoError as error:
        text = f"segment '{id}' is intact again, but its quarantine cannot be ended: {error}"
        listener(Notice(text=text, level="warning"))


def _enter(lake: Lake, id: str, damage: Mapping[str, Any] | None) -> None:
    """Quarantine a segment, with what is known of its damage, or end that (None). Under the maintenance lease."""
    append(
        lake.storage,
        LogEntry(time=time.time(), reason="verified", quarantine={id: None if damage is None else dict(damage)}),
    )


def _remember(lake: Lake, id: str) -> None:
    """Keep what the index knows of a segment whose footer cannot be read: the index will forget it, and repair needs
    it.
    """
    known = catalog.SqlIndex(lake).recall_footer(id)
    if known is None or lake.storage.exists(_memory_key(id)):
        return
    facts, table = known
    header = {name: facts[name] for name in ("kind", "schema", "writer", "t_commit", "rows")}
    whole = [0, table.num_rows]
    header |= {"format": FORMAT, "sequence": written_by(id)[1], "columns": dict.fromkeys(facts["columns"])}
    header["replaces"] = dict.fromkeys(facts["replaces"], whole)  # which part was which is not recorded
    lake.storage.write(_memory_key(id), json.dumps(metadata(header, table)).encode())


def release(lake: Lake, id: str) -> None:
    """End the quarantine of a segment. StageFailed if the storage fails."""
    _enter(lake, id, None)
    with explained(f"remove '{lake.storage.url(_memory_key(id))}'"):
        lake.storage.remove(_memory_key(id))


def _memory_key(id: str) -> str:
    """Return the key of the footer that the index recorded for a segment."""
    return f"{QUARANTINE}/{id.rpartition('/')[2]}.footer"


def _foreign(storage: Storage) -> Iterator[str]:
    yield from (storage.url(f"{ROOT}/{name}") for name in sorted(set(storage.names(ROOT)) - set(storage.folders(ROOT))))
    for folder in sorted(storage.folders(ROOT)):
        names = set(storage.names(f"{ROOT}/{folder}"))
        for name in sorted(names):
            belongs = name.endswith(".arrow") and (
                not name.endswith(".blob.arrow") or name.removesuffix(".blob.arrow") + ".arrow" in names
            )
            if not belongs:
                yield storage.url(f"{ROOT}/{folder}/{name}")


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
    storage fails.
    """
    if not (report.corrupt or report.log):
        return RepairResult(segments={})
    made: dict[str, str | None] = {}
    with lease(lake) as held, explained(f"repair '{lake.name}'"):
        lake.storage.create_folders()  # copying a lake loses empty folders
        log = LakeLog(lake.storage, lake.id, listener)
        log.refresh()
        if log.problems:
            log.shorten(list_all(lake.storage))
            log.refresh()
        live = _live(lake, listener)  # the segments that a damaged one was rewritten from may still exist
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
                release(lake, id)
            else:
                damage = log.quarantined.get(id, {"trajectories": list(uids)})
                _enter(lake, id, {**damage, "repaired": time.time(), "into": made[id], "lost": gone})
    return RepairResult(segments=made, lost=tuple(lost), orphans=tuple(orphans), unknown=tuple(unknown))


def _repair(lake: Lake, id: str, live: set[str], log: LakeLog, held: Held, listener: Listener) -> str | None:
    """Return what became of a damaged segment. Its file is in quarantine afterwards, unless it was restored."""
    into: str | None = None
    if not log.is_superseded(id) and _OURS.fullmatch(id.rpartition("/")[2]):
        try:
            if _readable(lake, id) or _restore(lake, id, held):
                footer = read_footer(lake.storage, id)
                file = _open(lake, id, footer)
                keep = file.check_trajectories()
                if keep.all() and not file.list_damaged_columns():
                    release(lake, id)
                    return id
                wanted = log.select_unexpired(id, footer.uids())
                elsewhere = {uid for uid, w in zip(hex_uids(footer.uids()), wanted, strict=True) if w} <= live
                if not elsewhere and (keep & wanted).any():
                    written = rewrite(lake, [SegmentPart(id, keep & wanted)], held, listener=listener)
                    into = None if written is None else written.id
        except (FileNotFoundError, IntegrityError, InputMissing) as error:
            listener(Notice(text=f"no trajectory of segment '{id}' can be read: {error}", level="warning"))
    _set_aside(lake, id, held)
    return into


def _readable(lake: Lake, id: str) -> bool:
    try:
        _ = read_footer(lake.storage, id).trajectories
        return True
    except IntegrityError:
        return False


def _restore(lake: Lake, id: str, held: Held) -> bool:
    """Give a segment whose footer cannot be read the one that the index recorded; False if that is not possible.

    The columns come first in the file and are read as a stream. If they are damaged too, the new footer does not vouch
    for them, and the segment stays known as damaged.
    """
    memory = _memory(lake, id)
    if memory is None:
        return False
    header, table = memory
    columns = lake.schema(header["schema"]).columns
    plain = [column for column in columns if column.name in header["columns"] and not column.is_blob]
    wide = [column for column in columns if column.name in header["columns"] and column.is_blob]
    rows = table["length"].to_numpy() + 1
    try:
        data = pa.py_buffer(lake.storage.read(segment_key(id)))
        stream = pa.ipc.open_stream(data.slice(_MAGIC))
        batch = stream.read_next_batch()
    except (*UNREADABLE, StopIteration):
        return False
    if not stream.schema.equals(arrow_schema(plain)) or batch.num_rows != rows.sum():
        return False
    values = {column.name: to_numpy(column, batch.column(place)) for place, column in enumerate(plain)}
    stored = {column.name: column.as_stored(values[column.name]) for column in plain}
    crcs: dict[str, int | None] = {name: segments.checksum(column) for name, column in stored.items()}
    tmp, name = lake.local / "tmp", f"{REWRITTEN}.{secrets.token_hex(4)}"

    def write(crcs: Mapping[str, int | None]) -> StagedFiles:
        texts = footers.metadata({**header, "columns": crcs}, table)
        return segments.stage_files(tmp, name, plain, stored, lambda: texts)

    order = [column.name for column in columns if column.name in header["columns"]]
    draft = write({name: crcs.get(name) for name in order})
    try:
        file = SegmentFile(draft.main, columns, wide=lambda: lake.storage.fetch(blob_key(id)))
        file.require_cover()
        crcs |= {column.name: file.compute_checksum(column.name) for column in wide}
        vouched = bool(file.check_trajectories().all())
    except IntegrityError:
        return False
    finally:
        draft.discard()
    _keep_copy(lake.storage, lake.local, segment_key(id), id, ".arrow")
    held()
    lake.storage.publish(write({name: crcs[name] if vouched else None for name in order}).main, segment_key(id))
    lake.storage.forget(segment_key(id))
    return True


def _memory(lake: Lake, id: str) -> tuple[dict[str, Any], pa.Table] | None:
    """Return the header and trajectories of a segment as recorded when it was marked."""
    try:
        memory = json.loads(lake.storage.read(_memory_key(id)))
        texts = {name.encode(): text.encode() for name, text in memory.items()}
        footer = footers.decode(texts, id)
        return dict(footer.header), footer.trajectories
    except (IntegrityError, *UNREADABLE):
        return None


def _set_aside(lake: Lake, id: str, held: Held) -> None:
    """Move a segment's remaining files into quarantine."""
    for key, ending in ((segment_key(id), ".arrow"), (blob_key(id), ".blob.arrow")):
        if lake.storage.exists(key):
            _keep_copy(lake.storage, lake.local, key, id, ending)
            held()
            lake.storage.remove(key)
            lake.storage.forget(key)


def _keep_copy(storage: Storage, local: Path, key: str, id: str, ending: str) -> None:
    """Copy a file into quarantine, unless it is there already: the first copy is the damaged one."""
    to = f"{QUARANTINE}/{id.rpartition('/')[2]}{ending}"
    if storage.exists(to):
        return
    with open_regular(storage.fetch(key)) as content:
        staged = atomic.stage(local / "tmp", f"{REWRITTEN}.aside", lambda file: shutil.copyfileobj(content, file))
    storage.publish(staged, to)


def _live(lake: Lake, listener: Listener) -> set[str]:
    live = LiveTable(lake, listener)
    live.refresh()
    return {uid for segment in live.segments for uid in hex_uids(segment.uids)}


def _find_lost(lake: Lake, uids: Sequence[str], log: LakeLog, listener: Listener) -> tuple[list[str], list[str]]:
    """Return those of `uids` that are neither live nor expired, and the uids derived from them."""
    live = _live(lake, listener)
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
