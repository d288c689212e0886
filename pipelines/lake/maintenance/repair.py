"""Repairing a lake: undamaged trajectories of damaged segments stay live, lost ones are reported.

The trajectories of a damaged segment whose own checksums are right are written into a new segment that replaces it; the
damaged file is kept in `quarantine/`. Where a footer cannot be read but the columns can, the footer is rebuilt from
what the SQL index recorded. The quarantine of a segment ends if nothing is lost; otherwise it stays, as a record. A
damaged log begins again with what can be read of it.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipelines.errors import AmagoError, InputMissing, IntegrityError
from pipelines.events import Listener, Notice, silent
from pipelines.files import atomic
from pipelines.files.atomic import explained
from pipelines.files.malformed import open_regular
from pipelines.lake import footer as footers
from pipelines.lake import segment as segments
from pipelines.lake.arrow import UNREADABLE, arrow_schema, to_numpy
from pipelines.lake.folders import QUARANTINE, REWRITTEN, blob_key, list_all, segment_key
from pipelines.lake.footer import Footer, hex_uids, read_footer
from pipelines.lake.live import LiveTable
from pipelines.lake.log import Held, LakeLog, lease
from pipelines.lake.maintenance.rewrite import SegmentPart, rewrite
from pipelines.lake.maintenance.verify import VerifyReport, enter, memory_key, release
from pipelines.lake.segment import SegmentFile, StagedFiles, open_segment
from pipelines.lake.storage import Storage

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

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
        lost, orphans = _missing(lake, [uid for id in ours for uid in known[id]], log, listener)
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
                enter(lake, id, {**damage, "repaired": time.time(), "into": made[id], "lost": gone})
    return RepairResult(segments=made, lost=tuple(lost), orphans=tuple(orphans), unknown=tuple(unknown))


def _repair(lake: Lake, id: str, live: set[str], log: LakeLog, held: Held, listener: Listener) -> str | None:
    """Return what became of a damaged segment. Its file is in quarantine afterwards, unless it was restored."""
    into: str | None = None
    if not log.is_superseded(id) and _OURS.fullmatch(id.rpartition("/")[2]):
        try:
            if _readable(lake, id) or _restore(lake, id, held):
                footer, file = _open(lake, id)
                keep = segments.sound(file)
                if keep.all() and not segments.wrong_columns(file):
                    release(lake, id)
                    return id
                wanted = log.select_unexpired(id, footer.uids())
                elsewhere = {uid for uid, w in zip(hex_uids(footer.uids()), wanted, strict=True) if w} <= live
                if not elsewhere and (keep & wanted).any():
                    written = rewrite(lake, [SegmentPart(id, keep & wanted)], held, listener=listener)
                    into = None if written is None else written.id
        except (FileNotFoundError, IntegrityError) as error:
            listener(Notice(text=f"no trajectory of segment '{id}' can be read: {error}", level="warning"))
    _quarantine(lake, id, held)
    return into


def _readable(lake: Lake, id: str) -> bool:
    try:
        _ = read_footer(lake.storage, id).trajectories
        return True
    except IntegrityError:
        return False


def _open(lake: Lake, id: str) -> tuple[Footer, SegmentFile]:
    footer = read_footer(lake.storage, id)
    try:
        file = open_segment(lake.storage, id, lake.schema(footer.header["schema"]).columns)
    except InputMissing as error:
        raise IntegrityError(str(error)) from error
    segments.require_cover(file)
    return footer, file


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
    stored = {column.name: segments.as_stored(column, values[column.name]) for column in plain}
    crcs: dict[str, int | None] = {name: segments.checksum(column) for name, column in stored.items()}
    tmp, name = lake.local / "tmp", f"{REWRITTEN}.{secrets.token_hex(4)}"

    def write(crcs: Mapping[str, int | None]) -> StagedFiles:
        texts = footers.metadata({**header, "columns": crcs}, table)
        return segments.stage_files(tmp, name, plain, stored, lambda: texts)

    order = [column.name for column in columns if column.name in header["columns"]]
    draft = write({name: crcs.get(name) for name in order})
    try:
        file = SegmentFile(draft.main, columns, wide=lambda: lake.storage.fetch(blob_key(id)))
        segments.require_cover(file)
        crcs |= {column.name: segments.column_checksum(file, column.name) for column in wide}
        vouched = bool(segments.sound(file).all())
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
        memory = json.loads(lake.storage.read(memory_key(id)))
        texts = {name.encode(): text.encode() for name, text in memory.items()}
        footer = footers.decode(texts, id)
        return dict(footer.header), footer.trajectories
    except (IntegrityError, *UNREADABLE):
        return None


def _quarantine(lake: Lake, id: str, held: Held) -> None:
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


def _missing(lake: Lake, uids: Sequence[str], log: LakeLog, listener: Listener) -> tuple[list[str], list[str]]:
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
