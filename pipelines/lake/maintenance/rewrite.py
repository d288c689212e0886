"""Rewriting several segments as one: live trajectories only, in order, every row unchanged.

The footer of the new segment lists those it replaces, and those that they had replaced. It counts once an entry of the
log says so, which hides those in the same step. A crash before that leaves files that count for nothing; the next
maintainer deletes them.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pipelines.errors import IntegrityError
from pipelines.events import Listener, Notice, silent
from pipelines.files.atomic import explained
from pipelines.lake import footer as footers
from pipelines.lake import segment as segments
from pipelines.lake.blob import BlobCache
from pipelines.lake.folders import REWRITTEN, FolderChooser
from pipelines.lake.footer import Footer
from pipelines.lake.log import Held, LogEntry, append, last_number
from pipelines.lake.schema import Column
from pipelines.lake.segment import SegmentFile, as_stored, checksum, open_segment

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

_CACHE_BYTES = 8 << 20  # of decoded wide rows, for each file that is being read


@dataclass(frozen=True)
class SegmentPart:
    """A segment to rewrite, and which of its trajectories: `keep` (n,) bool."""

    id: str
    keep: np.ndarray


@dataclass(frozen=True)
class _SoundPart:
    """A part that was read and verified; `spans` are the rows [start, stop) to keep, neighbours joined."""

    id: str
    keep: np.ndarray
    footer: Footer
    file: SegmentFile
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RewriteResult:
    """A new segment, and the ids of those that were merged into it."""

    id: str
    replaced: tuple[str, ...]
    trajectories: int


def rewrite(
    lake: Lake, parts: Sequence[SegmentPart], held: Held, *, listener: Listener = silent
) -> RewriteResult | None:
    """Write one segment from `parts`, which have the same schema, kind and columns, under the lease `held`.

    A part with a wrong checksum among what it keeps is left unchanged, with a Notice; None if nothing is left to do.
    The plain columns of the result are held in memory. StageFailed if the disk fails.
    """
    with explained(f"rewrite segments of '{lake.name}'"):
        held()
        lake.storage.create_folders()  # copying a lake loses empty folders
        position = last_number(lake.storage)
        sources = []
        for part in parts:  # each a download, in an object store
            held()
            if (source := _open(lake, part, listener)) is not None:
                sources.append(source)
        if not sources or (len(sources) == 1 and len(parts) > 1 and sources[0].keep.all()):
            return None
        return _write(lake, sources, held, position)


def _open(lake: Lake, part: SegmentPart, listener: Listener) -> _SoundPart | None:
    try:
        schema_id = footers.read_footer(lake.storage, part.id).header["schema"]
        cache = BlobCache(limit_bytes=_CACHE_BYTES)
        file = open_segment(lake.storage, part.id, lake.schema(schema_id).columns, cache=cache)
        segments.require_cover(file)
        if not np.array_equal(segments.sound(file, part.keep), part.keep):
            raise IntegrityError(f"segment '{file.path}' is damaged: a trajectory has a wrong checksum")
    except IntegrityError as error:
        text = f"{error}; it is left unchanged, see: amago lake verify {lake.name}"
        listener(Notice(text=text, level="warning"))
        return None
    stops = np.cumsum(file.footer.trajectories["length"].to_numpy() + 1)[part.keep]
    starts = stops - file.footer.trajectories["length"].to_numpy()[part.keep] - 1
    return _SoundPart(
        part.id, part.keep, file.footer, file, tuple(_joined(zip(starts.tolist(), stops.tolist(), strict=True)))
    )


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


class _Wide:
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
        values = as_stored(self._column, np.concatenate(pieces) if len(pieces) > 1 else pieces[0])
        self.crc = checksum(values, self.crc)
        return values


def _write(lake: Lake, sources: Sequence[_SoundPart], held: Held, position: int) -> RewriteResult:
    first = sources[0].footer
    rows = sum(stop - start for source in sources for start, stop in source.spans)
    columns = [column for column in sources[0].file.schema_columns if column.name in first.columns]
    values: dict[str, Any] = {
        column.name: _Wide(column, sources, rows) if column.is_blob else _gathered(column, sources, rows)
        for column in columns
    }
    table = _table(sources)
    header = {
        "format": footers.FORMAT,
        "kind": first.header["kind"],
        "schema": first.header["schema"],
        "sequence": 0,
        "t_commit": time.time(),
        "rows": rows,
        "replaces": _replaces(sources),
    }
    writer = f"{REWRITTEN}.{lake.id[:8]}.{os.getpid():x}.{secrets.token_hex(4)}"

    def metadata() -> dict[str, str]:
        crcs = {name: v.crc if isinstance(v, _Wide) else checksum(v) for name, v in values.items()}
        return footers.metadata({**header, "writer": writer, "columns": crcs}, table)

    staged, id = segments.stage_files(lake.local / "tmp", writer, columns, values, metadata), ""
    try:
        held()
        id = segments.new_segment(FolderChooser(lake.storage), writer, 0, overlay=first.is_overlay)
        segments.publish(lake.storage, staged, id)
    except BaseException:
        staged.discard()
        if id:
            segments.drop_orphan(lake.storage, id)
        raise
    held()
    moved = {source.id: id for source in sources}
    append(lake.storage, LogEntry(time=time.time(), reason="rewritten", moved=moved), after=position)
    return RewriteResult(id, tuple(source.id for source in sources), table.num_rows)


def _gathered(column: Column, sources: Sequence[_SoundPart], rows: int) -> np.ndarray:
    out, filled = np.empty((rows, *column.shape), dtype=column.dtype), 0
    for source in sources:
        for start, stop in source.spans:
            out[filled : filled + stop - start] = source.file.columns[column.name][start:stop]
            filled += stop - start
    return as_stored(column, out)


def _table(sources: Sequence[_SoundPart]) -> pa.Table:
    """Return the kept trajectories with their new positions."""
    tables = [source.footer.trajectories.filter(pa.array(source.keep)) for source in sources]
    table = pa.concat_tables(tables)
    rows = table["length"].to_numpy() + 1
    place = footers.TRAJECTORIES.get_field_index("row0")
    return table.set_column(place, footers.TRAJECTORIES.field(place), pa.array(np.cumsum(rows) - rows))


def _replaces(sources: Sequence[_SoundPart]) -> Mapping[str, tuple[int, int]]:
    """Return the index of the first trajectory and their number for each replaced segment, indirect ones included."""
    replaces, done = {}, 0
    for source in sources:
        before = np.concatenate([[0], np.cumsum(source.keep)]).tolist()
        for old in source.footer.replaces:
            first, count = source.footer.part(old)
            replaces[old] = (done + before[first], before[first + count] - before[first])
        replaces[source.id] = (done, before[-1])
        done += before[-1]
    return replaces
