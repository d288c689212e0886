"""Merging many small segments into few large ones, and reclaiming the space of dead trajectories.

Several segments are rewritten as one: live trajectories only, in order, every row unchanged. The footer of the new
segment lists those it replaces, and those that they had replaced. It counts once an entry of the log says so, which
hides those in the same step. A crash before that leaves files that count for nothing; the next maintainer deletes them.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pipelines.errors import IntegrityError, UsageError
from pipelines.events import Listener, Notice, Progress, silent
from pipelines.files.atomic import explain_errors
from pipelines.lake import footer as footers
from pipelines.lake import segment as segments
from pipelines.lake.folders import REWRITTEN, FolderChooser
from pipelines.lake.footer import Footer, PackedTable
from pipelines.lake.log import Held, LogEntry, append, find_last_number, lease
from pipelines.lake.maintenance.files import GRACE_SECONDS, File, FileTable, SweepResult, sweep
from pipelines.lake.maintenance.retention import expire_orphans
from pipelines.lake.schema import Column
from pipelines.lake.segment import BlobCache, SegmentFile, checksum, open_segment

if TYPE_CHECKING:
    from pipelines.lake.store import Lake


TARGET_BYTES = 128 << 20
_SETTLE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class CompactionRules:
    """Thresholds of compaction. Segments below `small_bytes` are merged, up to `target_bytes` together; while a writer
    is active, those younger than `settle_seconds` are left alone, because more will follow. Below half the target, two
    segments fit into one, so that a lake of S bytes ends with at most 2 S / target segments.
    """

    small_bytes: int = TARGET_BYTES // 2
    target_bytes: int = TARGET_BYTES
    settle_seconds: float = _SETTLE_SECONDS

    def __post_init__(self) -> None:
        if not 0 < self.small_bytes <= self.target_bytes:
            raise UsageError(
                f"segments below {self.small_bytes} bytes cannot be merged up to {self.target_bytes}",
                hint="the target must be at least the size that counts as small",
            )


@dataclass(frozen=True)
class CompactionResult:
    """The effect of compaction, predicted in a dry run. `runs`: ids of the segments that became one, run by run;
    `segments` and `bytes` of live files, before and after.
    """

    runs: tuple[tuple[str, ...], ...]
    trajectories: int
    segments: tuple[int, int]
    bytes: tuple[int, int]
    swept: SweepResult | None = None


def compact(
    lake: Lake,
    rules: CompactionRules | None = None,
    *,
    grace_seconds: float = GRACE_SECONDS,
    dry_run: bool = False,
    listener: Listener = silent,
) -> CompactionResult:
    """Merge small segments, rewrite those that are half dead, then sweep. Locked while another process maintains the
    lake.

    Others may read and write meanwhile; the trajectories, and what a snapshot draws from them, stay the same. A damaged
    segment is left unchanged, with a Notice.
    """
    if not dry_run:
        lake.salvage(listener=listener)
    with lease(lake) as held:
        inventory = FileTable(lake, listener)
        inventory.refresh()
        planned = plan(inventory, rules or CompactionRules())
        before = inventory.count_live()
        if dry_run:
            files = [file for run in planned for file in run]
            return CompactionResult(
                runs=tuple(tuple(file.id for file in run) for run in planned),
                trajectories=sum(int(file.alive.sum()) for file in files),
                segments=(before[0], before[0] - len(files) + len(planned)),
                bytes=(before[1], before[1] - round(sum(file.bytes - file.live_bytes for file in files))),
            )
        inventory.log.require_whole()
        expire_orphans(inventory)
        done, trajectories = [], 0
        for number, run in enumerate(planned, 1):
            parts = {file.id: inventory.files[file.id].alive for file in run}
            written = rewrite(lake, parts, held, listener=listener)
            if written is not None:
                done.append(written.replaced)
                trajectories += written.trajectories
            listener(Progress(stage="compact", done=number, total=len(planned), unit="runs"))
        inventory.refresh()
        after = inventory.count_live()
        swept = sweep(inventory, held, grace_seconds=grace_seconds, listener=listener)
        inventory.write_manifests(held)
    return CompactionResult(tuple(done), trajectories, (before[0], after[0]), (before[1], after[1]), swept)


@dataclass(frozen=True)
class PurgeResult:
    """What a purge removed: `segments` and `bytes` of files. `waiting`: segments that still hold the bytes of expired
    trajectories, since they are damaged, or their collector has not yet deleted its log.
    """

    segments: int
    bytes: int
    waiting: int


def purge(lake: Lake, *, listener: Listener = silent) -> PurgeResult:
    """Remove the bytes of all expired trajectories from the storage, at once: segments that hold some are rewritten,
    replaced files have no grace period, the index, which lists trajectories, is deleted, and so are the manifests that
    do. Locked while another process maintains the lake.

    Readers that had such a file open read on; others find the new one.
    """
    from pipelines.lake.sql.catalog import SqlIndex  # imports duckdb

    lake.salvage(listener=listener)
    with lease(lake) as held:
        inventory = FileTable(lake, listener)
        inventory.refresh()
        inventory.log.require_whole()
        expire_orphans(inventory)
        planned = [file for file in inventory.files.values() if file.alive.any() and not file.alive.all()]
        for number, file in enumerate(planned, 1):
            rewrite(lake, {file.id: file.alive}, held, listener=listener)
            listener(Progress(stage="purge", done=number, total=len(planned), unit="segments"))
        inventory.refresh()
        swept = sweep(inventory, held, grace_seconds=0.0, listener=listener)
        SqlIndex(lake).discard()
        inventory.write_manifests(held, forget=True)
        kept = sum(1 for file in inventory.files.values() if file.alive.any() and not file.alive.all())
    return PurgeResult(segments=swept.segments, bytes=swept.bytes, waiting=swept.waiting + kept)


def plan(inventory: FileTable, rules: CompactionRules) -> list[list[File]]:
    """Choose the files to rewrite, each run into one."""
    writing = any((inventory.lake.local / "wal").glob("*.wal"))
    newest = time.time() - (rules.settle_seconds if writing else 0.0)
    settled = [file for file in inventory.files.values() if file.alive.any() and file.times.max() <= newest]
    return group_runs(settled, small_bytes=rules.small_bytes, target_bytes=rules.target_bytes)


def group_runs(files: Iterable[File], *, small_bytes: int, target_bytes: int) -> list[list[File]]:
    """Group small or half dead files of one schema, kind and set of columns into runs, in the order of their ids. A run
    has several files, or one that is half dead; their live bytes fit the target.
    """
    kinds: dict[tuple[str, bool, tuple[str, ...]], list[File]] = defaultdict(list)
    for file in sorted(files, key=lambda file: file.id):
        if file.bytes < small_bytes or file.is_wasteful:
            kinds[file.kind].append(file)
    found: list[list[File]] = []
    for kind in sorted(kinds):
        run: list[File] = []
        for file in kinds[kind]:
            if run and sum(member.live_bytes for member in [*run, file]) > target_bytes:
                found.append(run)
                run = []
            run.append(file)
        found.append(run)
    return [run for run in found if len(run) > 1 or run[0].is_wasteful]


_CACHE_BYTES = 8 << 20  # of decoded wide rows, for each file that is being read


@dataclass
class _SoundPart:
    """A segment to rewrite that was read and verified: which trajectories `keep` (n,) bool, their rows in `file`,
    `spans` [start, stop), neighbours joined, and the `table` of them by `TRAJECTORIES`. `footer` has no decoded table.
    """

    id: str
    keep: np.ndarray
    file: SegmentFile
    footer: Footer
    spans: tuple[tuple[int, int], ...]
    table: pa.Table | None

    @classmethod
    def open(cls, lake: Lake, id: str, keep: np.ndarray) -> _SoundPart:
        """Read a segment. IntegrityError if its footer, or a trajectory to keep, is damaged."""
        schema_id = footers.read_footer(lake.storage, id).header["schema"]
        cache = BlobCache(limit_bytes=_CACHE_BYTES)
        file = open_segment(lake.storage, id, lake.schema(schema_id).columns, cache=cache)
        file.require_cover()
        if not np.array_equal(file.check_trajectories(keep), keep):
            raise IntegrityError(f"segment '{file.path}' is damaged: a trajectory has a wrong checksum")
        file.release_pages()
        table = file.footer.trajectories
        rows = table["length"].to_numpy() + 1
        stops = np.cumsum(rows)[keep]
        spans: list[tuple[int, int]] = []
        for start, stop in zip((stops - rows[keep]).tolist(), stops.tolist(), strict=True):
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, stop))
        footer = replace(file.footer, packed=b"")
        del file.footer  # decoded again if anything asks for it
        return cls(id, keep, file, footer, tuple(spans), table if keep.all() else table.filter(pa.array(keep)))


@dataclass(frozen=True)
class RewriteResult:
    """A new segment, and the ids of those that were merged into it."""

    id: str
    replaced: tuple[str, ...]
    trajectories: int


def rewrite(
    lake: Lake, parts: Mapping[str, np.ndarray], held: Held, *, listener: Listener = silent
) -> RewriteResult | None:
    """Write one segment from `parts`, under the lease `held`: segments of the same schema, kind and columns, each with
    a mask (n,) bool of the trajectories to keep.

    A part with a wrong checksum among what it keeps is left unchanged, with a Notice; None if nothing is left to do.
    The plain columns of the result are held in memory. StageFailed if the disk fails.
    """
    with explain_errors(f"rewrite segments of '{lake.name}'"):
        held()
        lake.storage.create_folders()  # copying a lake loses empty folders
        position = find_last_number(lake.storage)
        sources = []
        for id, keep in parts.items():  # each a download, in an object store
            held()
            try:
                sources.append(_SoundPart.open(lake, id, keep))
            except IntegrityError as error:
                text = f"{error}; it is left unchanged, see: amago lake verify {lake.name}"
                listener(Notice(text=text, level="warning"))
        if not sources or (len(sources) == 1 and len(parts) > 1 and sources[0].keep.all()):
            return None
        return _write(lake, sources, held, position)


class _WideColumn:
    """The kept rows of a wide column, read once, in order; `crc` is that of the rows read so far."""

    def __init__(self, column: Column, sources: Sequence[_SoundPart], rows: int) -> None:
        self._column, self._rows = column, rows
        self._spans = [(source.file, start, stop) for source in sources for start, stop in source.spans]
        self._given = self.crc = 0

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self._rows)
        assert start == self._given, "rows are read in order"
        self._given, needed = stop, stop - start
        pieces = []
        while needed:
            file, first, last = self._spans[0]
            taken = min(needed, last - first)
            pieces.append(file.read_rows(self._column.name, first, first + taken))
            self._spans[0] = (file, first + taken, last)
            if first + taken == last:
                self._spans.pop(0)
            needed -= taken
        values = self._column.as_stored(np.concatenate(pieces) if len(pieces) > 1 else pieces[0])
        self.crc = checksum(values, self.crc)
        return values


def _write(lake: Lake, sources: Sequence[_SoundPart], held: Held, position: int) -> RewriteResult:
    first = sources[0].footer
    # The table is packed first: where trajectories are short, it is as large as the columns.
    table = pa.concat_tables([source.table for source in sources])
    for source in sources:
        source.table = None
    place, lengths = footers.TRAJECTORIES.get_field_index("row0"), table["length"].to_numpy() + 1
    row0 = pa.array(np.cumsum(lengths) - lengths)
    count, packed = table.num_rows, PackedTable.pack(table.set_column(place, footers.TRAJECTORIES.field(place), row0))
    del table, lengths, row0
    pa.default_memory_pool().release_unused()  # Arrow would keep as much as the tables took
    rows = sum(stop - start for source in sources for start, stop in source.spans)
    columns = [column for column in sources[0].file.schema_columns if column.name in first.columns]
    values: dict[str, Any] = {}
    for column in columns:
        if column.is_blob:
            values[column.name] = _WideColumn(column, sources, rows)
            continue
        kept = [source.file.columns[column.name][a:b] for source in sources for a, b in source.spans]
        values[column.name] = column.as_stored(np.concatenate(kept) if len(kept) > 1 else kept[0].copy())
        del kept
        for source in sources:  # otherwise the column would be in memory twice
            source.file.release_pages()
    # Of each replaced segment, indirect ones included: the index of its first trajectory, and their number.
    replaces, done = {}, 0
    for source in sources:
        before = np.concatenate([[0], np.cumsum(source.keep)]).tolist()
        for old in source.footer.replaces:
            begin, number = source.footer.part(old)
            replaces[old] = (done + before[begin], before[begin + number] - before[begin])
        replaces[source.id] = (done, before[-1])
        done += before[-1]
    writer = f"{REWRITTEN}.{lake.id[:8]}.{os.getpid():x}.{secrets.token_hex(4)}"

    def metadata() -> dict[str, str]:
        header = footers.make_header(
            overlay=first.is_overlay,
            schema_id=first.header["schema"],
            writer=writer,
            sequence=0,
            rows=rows,
            columns={name: v.crc if isinstance(v, _WideColumn) else checksum(v) for name, v in values.items()},
        )
        return footers.encode({**header, "replaces": replaces}, packed)

    staged = segments.stage_files(lake.local / "tmp", writer, columns, values, metadata)
    try:
        held()
    except BaseException:
        staged.discard()
        raise
    id = staged.publish_new(lake.storage, FolderChooser(lake.storage), writer, overlay=first.is_overlay)
    held()
    moved = {source.id: id for source in sources}
    append(lake.storage, LogEntry(time=time.time(), reason="rewritten", moved=moved), after=position)
    return RewriteResult(id, tuple(source.id for source in sources), count)
