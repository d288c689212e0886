"""Reading everything once: every column against its CRC, every file against what a lake may hold.

A damaged segment is quarantined: an entry of the log gives the reason and its trajectories, and readers ignore it from
then on; the file itself is not changed. Another entry ends that when the segment is intact again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pipelines.errors import AmagoError, InputMissing, IntegrityError
from pipelines.events import Listener, Notice, Progress, silent
from pipelines.files.atomic import explained
from pipelines.lake import segment as segments
from pipelines.lake.folders import QUARANTINE, ROOT, blob_key, is_rewritten, list_all, segment_key, written_by
from pipelines.lake.footer import FORMAT, Footer, metadata, read_footer
from pipelines.lake.log import LakeLog, LogEntry, append, lease
from pipelines.lake.schema import Column
from pipelines.lake.segment import SegmentFile, open_segment, stored_bytes
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
    known = catalog.remembered_segments(lake)  # before segments are listed
    log = LakeLog(lake.storage, lake.id, listener)
    log.refresh()
    ids = [id for id in list_all(lake.storage) if id not in log.whole]
    corrupt, trajectories, size = [], 0, 0
    for done, id in enumerate(ids, 1):
        if done % _AHEAD == 1:
            _refetch(lake.storage, ids[done - 1 : done - 1 + _AHEAD])
        try:
            footer = check(lake, id)
            if not log.is_superseded(id) and log.is_finished(id):
                trajectories += int(log.select_unexpired(id, footer.uids()).sum())
            size += stored_bytes(lake.storage, id)
            if id in log.quarantined:
                _release(lake, id, listener)
        except FileNotFoundError:
            pass  # expired meanwhile
        except _Damage as damage:
            corrupt.append(damage.found)
            _quarantine(lake, damage.found, log, listener)
        listener(Progress(stage="verify", done=done, total=len(ids), unit="segments"))
    return VerifyReport(
        segments_checked=len(ids),
        trajectories=trajectories,
        bytes=size,
        corrupt=tuple(corrupt),
        missing=_missing(lake, known, log),
        logs=tuple(lake.storage.url(f"{QUARANTINE}/{name}") for name in _damaged_logs(lake.storage)),
        foreign=tuple(_foreign(lake.storage)),
        log=log.problems,
    )


def _damaged_logs(storage: Storage) -> list[str]:
    return sorted(name for name in storage.names(QUARANTINE) if name.endswith(".wal"))


def _missing(lake: Lake, known: Mapping[str, int], log: LakeLog) -> dict[str, int]:
    """Return those of the `known` segments, with their numbers of trajectories, that are gone for no reason: not
    rewritten, expired or quarantined.
    """
    gone = known.keys() - set(list_all(lake.storage))
    log.refresh()  # again: an entry comes before its files go
    if not gone or log.forgot_at >= catalog.modified(lake):  # it no longer says which segments expired
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


def _refetch(storage: Storage, ids: Sequence[str]) -> None:
    """Fetch the originals of cached files, because a local copy proves nothing about them."""
    keys = [key for id in ids for key in (segment_key(id), blob_key(id))]
    for key in keys:
        storage.forget(key)
    storage.prefetch(keys)


class _Damage(Exception):
    def __init__(self, found: _CorruptSegment) -> None:
        super().__init__(found.reason)
        self.found = found


def check(lake: Lake, id: str) -> Footer:
    """Read a segment completely. _Damage if anything differs from its footer, InputMissing for a newer format,
    FileNotFoundError.
    """
    uids: tuple[str, ...] = ()
    try:
        footer = read_footer(lake.storage, id)
        table = footer.trajectories
        uids = tuple(uid.hex() for uid in table["uid"].to_pylist())
        file = open_segment(lake.storage, id, _columns(lake, footer))
        segments.require_cover(file)
    except IntegrityError as error:
        known = uids or tuple(catalog.remembered(lake, id))
        raise _Damage(_CorruptSegment(segment=id, reason=str(error), trajectories=known)) from error
    _check_columns(id, file, uids)
    return footer


def _columns(lake: Lake, footer: Footer) -> Sequence[Column]:
    try:
        return lake.schema(footer.header["schema"]).columns
    except InputMissing as error:
        if lake.storage.exists(f"schemas/{footer.header['schema']}.json"):  # of a newer version, not damaged
            raise
        raise IntegrityError(f"segment '{footer.path}' cannot be read: {error}") from error


def _check_columns(id: str, file: SegmentFile, uids: tuple[str, ...]) -> None:
    wrong = segments.wrong_columns(file)
    if wrong:
        reason = f"segment '{file.path}' is damaged: wrong checksum in {', '.join(wrong)}"
        whole = segments.sound(file)
        damaged = tuple(uid for uid, fine in zip(uids, whole, strict=True) if not fine)
        raise _Damage(_CorruptSegment(segment=id, reason=reason, trajectories=uids, damaged=damaged))


def _quarantine(lake: Lake, found: _CorruptSegment, log: LakeLog, listener: Listener) -> None:
    text = f"{found.reason}; it is quarantined with its {len(found.trajectories)} trajectories"
    try:
        if not found.damaged:  # otherwise its footer can be read
            with explained("keep what is known of it"):
                _remember(lake, found.segment)
        if found.segment not in log.quarantined:
            with lease(lake):
                enter(lake, found.segment, {name: value for name, value in asdict(found).items() if name != "segment"})
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


def enter(lake: Lake, id: str, damage: Mapping[str, Any] | None) -> None:
    """Quarantine a segment, with what is known of its damage, or end that (None). Under the maintenance lease."""
    append(
        lake.storage,
        LogEntry(time=time.time(), reason="verified", quarantine={id: None if damage is None else dict(damage)}),
    )


def _remember(lake: Lake, id: str) -> None:
    """Keep what the index knows of a segment whose footer cannot be read: the index will forget it, and repair needs
    it.
    """
    known = catalog.remembered_footer(lake, id)
    if known is None or lake.storage.exists(memory_key(id)):
        return
    facts, table = known
    header = {name: facts[name] for name in ("kind", "schema", "writer", "t_commit", "rows")}
    whole = [0, table.num_rows]
    header |= {"format": FORMAT, "sequence": written_by(id)[1], "columns": dict.fromkeys(facts["columns"])}
    header["replaces"] = dict.fromkeys(facts["replaces"], whole)  # which part was which is not recorded
    lake.storage.write(memory_key(id), json.dumps(metadata(header, table)).encode())


def release(lake: Lake, id: str) -> None:
    """End the quarantine of a segment. StageFailed if the storage fails."""
    enter(lake, id, None)
    with explained(f"remove '{lake.storage.url(memory_key(id))}'"):
        lake.storage.remove(memory_key(id))


def memory_key(id: str) -> str:
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
