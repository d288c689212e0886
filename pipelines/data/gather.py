"""Copying windows out of mapped segments.

The windows of a batch are ordered by segment, those of an overlay by their base within it. A window is a block of
memory in each column, whatever file it is in, and one call copies those of all windows: a call for each file would cost
more than the copy. A window across several episodes is as many blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pipelines.config.host import count_cores
from pipelines.data.batch import Batch, Buffers
from pipelines.data.histories import Parts
from pipelines.data.readahead import SMALL_FILE, Readahead, prepare, prepare_file
from pipelines.data.relabel_on_the_fly import DrawnVersions
from pipelines.data.view import View, base_rows, bases, first_steps
from pipelines.errors import IntegrityError
from pipelines.files.atomic import make_storage_error
from pipelines.files.descriptors import reserve_descriptors
from pipelines.files.memory import copy_rows, find_usual
from pipelines.lake.folders import blob_key, segment_key
from pipelines.lake.schema import RESET, TERMINATED, TRUNCATED
from pipelines.lake.segment import BlobCache, OpenSegments, SegmentFile
from pipelines.lake.storage import LocalStorage

SHARED_BYTES = 4 << 20  # decoded by two threads; of less, one is done before the other has begun
OPEN_FILES = 16_384  # kept mapped, if the process may have twice as many files open

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class LentRows:
    """Rows that precede windows (B,): the last `count` ones before the end of the trajectory in row `before` of the
    view's table (-1: none). `warm_up` as in `Batch`."""

    before: np.ndarray
    count: np.ndarray
    warm_up: np.ndarray


@dataclass(frozen=True)
class _Rows:
    """Rows to copy of each of some trajectories, (P,) int64: `count` ones from `start` on, to the rows from `target` on
    of a batch, whose windows follow each other."""

    start: np.ndarray
    count: np.ndarray
    target: np.ndarray

    def at(self, chosen: np.ndarray) -> _Rows:
        return _Rows(self.start[chosen], self.count[chosen], self.target[chosen])


@dataclass(frozen=True)
class _Origins:
    """Where trajectories lie, (P,) int64: the number of their segment, and their first row in its file; of overlays
    also those of their bases, of others the same. Rows of the view's table would cost ten times as much to select."""

    segment: np.ndarray
    row0: np.ndarray
    base: np.ndarray
    base_row0: np.ndarray

    @classmethod
    def of(cls, table: np.ndarray, chosen: np.ndarray | slice = slice(None)) -> _Origins:
        fields = table["segment"], table["row0"], bases(table), base_rows(table)
        return cls(*(field[chosen].astype(np.int64) for field in fields))

    def at(self, chosen: np.ndarray) -> _Origins:
        return _Origins(self.segment[chosen], self.row0[chosen], self.base[chosen], self.base_row0[chosen])


class _FileRange(NamedTuple):
    """Rows of the file of segment `number`: `length` ones from `begin` on, to those of a batch from `target` on."""

    number: int
    file: SegmentFile
    begin: int
    length: int
    target: int


class SegmentLost(Exception):
    """Segment `number` of the view's live set can no longer be read."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


class _Places:
    """The addresses of the plain columns of open files, by the numbers of their segments: asking every file of a
    batch for it would cost as much as copying the batch.

    Arrays over segments: `is_known`, `rows`, `addresses` (S, C), 0 where a file lacks a column. They are valid as long
    as no file is closed: see `OpenSegments.num_closed`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.clear(0, 0)

    def clear(self, num_segments: int, num_closed: int) -> None:
        self.num_closed = num_closed
        self.is_known = np.zeros(num_segments, dtype=bool)
        self.rows = np.zeros(num_segments, dtype=np.int64)
        self.addresses = np.zeros((num_segments, len(self.names)), dtype=np.int64)

    def add(self, numbers: Sequence[int], rows: np.ndarray, addresses: np.ndarray) -> None:
        self.is_known[numbers], self.rows[numbers], self.addresses[numbers] = True, rows, addresses


class Gatherer:
    """Reader of windows of `rows` rows of a view, which keeps the files that it read last mapped."""

    def __init__(self, view: View, rows: int) -> None:
        self._view, self._rows = view, rows
        self._moves = view.moves
        self._wide = {column.name for column in view.schema.columns if column.is_blob}
        self._buffers = Buffers(view.schema.columns, rows)
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="decode") if self._wide and count_cores() > 1 else None
        self._readahead = Readahead()
        self._files = OpenSegments(
            view.lake,
            limit=reserve_descriptors(OPEN_FILES),
            scattered=True,
            cache=BlobCache(),
            check=SegmentFile.require_sound if view.verify else None,
            rows=lambda id: view.live.listed_rows.get(id),
        )
        self._places = _Places([column.name for column in view.schema.columns if not column.is_blob])
        self._is_elsewhere = not isinstance(view.lake.storage, LocalStorage)

    def gather(
        self,
        chosen: np.ndarray,
        start: np.ndarray,
        stop: np.ndarray,
        out: Columns | None = None,
        drawn: DrawnVersions | None = None,
        lent: LentRows | None = None,
    ) -> Batch:
        """Read windows of steps [start, stop) of the trajectories `chosen` (rows of the view's table), or of their
        versions where `drawn` has one, into `out` or into own buffers; those to which rows are `lent` after these."""
        if self._moves != self._view.moves:
            self._close_moved()
        table = self._view.table[chosen]
        if drawn is not None:
            table = drawn.located(table)
        order = np.lexsort((table["row0"] + start.astype(np.uint64), bases(table), table["segment"]))
        table, start, stop = table[order], start[order], stop[order]
        lengths = stop - start + 1
        out = self._buffers.take(len(order)) if out is None else out
        origins = _Origins.of(table)
        if self._is_elsewhere:
            self._fetch(origins)
        self._readahead.begin()
        if self._readahead.wanted:
            self._name_ranges(table, start, list(out))
        every = np.full(len(order), self._rows)
        self._copy(origins, _Rows(start, every, np.arange(len(order)) * self._rows), _flatten(out))
        self._readahead.end()
        if drawn is not None:
            drawn.write_into(start, order, out)
        begin, warm_up = start + first_steps(table), None
        if lent is not None:
            count, before, warm_up = lent.count[order], lent.before[order], lent.warm_up[order]
            for i in np.flatnonzero(count).tolist():
                self._prepend(
                    int(before[i]), int(count[i]), int(lengths[i]), {n: buffer[i] for n, buffer in out.items()}
                )
            lengths, begin = lengths + count, begin - count
        for i in np.flatnonzero(lengths < self._rows).tolist():
            for buffer in out.values():
                buffer[i, lengths[i] :] = 0
        return Batch(
            columns={name: buffer[:] for name, buffer in out.items()},
            lengths=lengths,
            start=begin,
            trajectory=np.asarray(chosen)[order],
            warm_up=warm_up,
        )

    def gather_parts(self, parts: Parts, size: int, out: Columns | None = None, *, goes_on: bool = False) -> Batch:
        """Read windows (size,) that consist of `parts` of several trajectories, into `out` or into own buffers.
        `goes_on`: where an episode ends, it is only reset."""
        if self._moves != self._view.moves:
            self._close_moved()
        origins, rows = _Origins.of(self._view.table, parts.row), self._rows
        out = self._buffers.take(size) if out is None else out
        if self._is_elsewhere:
            self._fetch(origins)
        is_first, is_last = parts.is_first, parts.is_last
        # A part shows the observations before its steps and what the steps led to; the window's last one also the
        # observation after them, the first one also what led to its own first row.
        seen = _Rows(parts.start, parts.steps + is_last, parts.window * rows + parts.place)
        led = _Rows(
            parts.start + 1 - is_first, parts.steps + is_first, parts.window * rows + parts.place + 1 - is_first
        )
        lengths = np.zeros(size, dtype=np.int64)
        lengths[parts.window[is_last]] = (parts.place + parts.steps)[is_last] + 1
        short = np.flatnonzero(lengths < rows)
        for buffer in out.values():
            buffer[short] = 0
        flat, order = _flatten(out), np.lexsort((origins.row0 + parts.start, origins.segment))
        observed = [column.name for column in self._view.schema.columns if column.role in ("observation", "label")]
        origins, window_length = origins.at(order), lengths[parts.window[order]]
        ends = is_first[order].astype(np.int8) - is_last[order]
        for names, wanted in ((observed, seen), ([name for name in flat if name not in observed], led)):
            columns, ranges = {name: flat[name] for name in names}, wanted.at(order)
            if self._wide:  # whose rows cost more than a copy
                self._copy(origins, ranges, columns)
                continue
            (wide, widened), rest = _widen_ends(origins, ranges, ends, window_length)
            self._copy(origins.at(wide), widened, columns)
            self._copy(origins.at(rest), ranges.at(rest), columns)
        return Batch(
            columns={name: buffer[:] for name, buffer in out.items()},
            lengths=lengths,
            # A window that begins within an episode is not at its start: time 0 has no action.
            start=np.minimum(parts.start[is_first], 1),
            trajectory=parts.row[is_first],
            cut_off=self._mark_joins(parts, out, goes_on=goes_on),
        )

    def _mark_joins(self, parts: Parts, out: Columns, *, goes_on: bool) -> np.ndarray | None:
        """Set the flags of rows in which parts meet; return the steps (B, L) bool after which an episode was truncated,
        or None if there are none."""
        later = ~parts.is_first
        window, row = parts.window[later], parts.place[later]
        out[TRUNCATED][window, row] = 0
        joins = parts.joins[later]
        window, row = window[joins], row[joins]
        out[RESET][window, row] = 1
        if goes_on:
            out[TERMINATED][window, row] = 0
            return None
        unknown = out[TERMINATED][window, row] == 0
        if not unknown.any():
            return None
        cut_off = np.zeros((len(out[RESET]), self._rows - 1), dtype=bool)
        cut_off[window[unknown], row[unknown] - 1] = True
        return cut_off

    def _prepend(self, row: int, count: int, rows: int, window: Columns) -> None:
        """Move the `rows` rows of a window to the right, and put the last `count` before the end of trajectory `row` in
        front of them."""
        entry = self._view.table[row]
        segment, length = self._view.segments[int(entry["segment"])], int(entry["length"])
        for name, values in window.items():
            own = name in segment.columns
            number, row0 = (segment.number, entry["row0"]) if own else (int(entry["base"]), entry["base_row0"])
            stop = int(row0) + length
            values[count : count + rows] = values[:rows].copy()
            try:
                values[:count] = self._file(number).read_rows(name, stop - count, stop)
            except (IntegrityError, FileNotFoundError) as error:
                raise self._lost(number, error) from error

    def whole(self, chosen: np.ndarray, names: Sequence[str]) -> tuple[Columns, np.ndarray]:
        """Read columns of the originals `chosen` (rows of the view's table), concatenated, and the number of rows of
        each."""
        table = self._view.table[chosen]
        rows = table["length"].astype(np.int64) + 1
        columns: dict[str, list[np.ndarray]] = {name: [] for name in names}
        for number, start, count in zip(table["segment"].tolist(), table["row0"].tolist(), rows.tolist(), strict=True):
            file = self._file(number)
            for name in names:
                values = file.columns.get(name)
                try:
                    part = (
                        file.read_rows(name, start, start + count) if values is None else values[start : start + count]
                    )
                except (IntegrityError, FileNotFoundError) as error:
                    raise self._lost(number, error) from error
                columns[name].append(part)
        return {name: np.concatenate(parts) for name, parts in columns.items()}, rows

    def _fetch(self, origins: _Origins) -> None:
        """Fetch the files of these trajectories that are not open yet to this host, several at a time."""
        segments = self._view.segments
        numbers = np.union1d(origins.segment, origins.base).tolist()
        ids = dict.fromkeys(segments[number].file for number in numbers if segments[number].file not in self._files)
        keys = (
            (segment_key, blob_key) if any(column.is_blob for column in self._view.schema.columns) else (segment_key,)
        )
        self._view.lake.storage.prefetch(key(id) for id in ids for key in keys)

    def _by_file(self, segments: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield ranges of windows whose segments (in order) are in one file."""
        edges = np.flatnonzero(np.diff(self._view.file_of[segments], prepend=-1, append=-1))
        return zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)

    def _copy(self, origins: _Origins, rows: _Rows, out: Columns) -> None:
        """Copy rows of trajectories into the flat columns `out`, each from the file that has it: an overlay's own
        columns, or those of its base."""
        own = replace(rows, start=origins.row0 + rows.start)
        is_overlay = origins.base != origins.segment
        if not is_overlay.any():
            self._copy_columns(origins.segment, own, out)
            return
        base = replace(rows, start=origins.base_row0 + rows.start)
        plain, overlaid = np.flatnonzero(~is_overlay), np.flatnonzero(is_overlay)
        self._copy_columns(origins.segment[plain], own.at(plain), out)
        segments = self._view.segments
        numbers, number_of = np.unique(origins.segment[overlaid], return_inverse=True)
        columns = [segments[number].columns for number in numbers.tolist()]
        for changed in dict.fromkeys(map(frozenset, columns)):
            at = overlaid[np.array([frozenset(each) == changed for each in columns])[number_of]]
            self._copy_columns(origins.segment[at], own.at(at), {name: out[name] for name in out if name in changed})
            self._copy_columns(origins.base[at], base.at(at), {name: out[name] for name in out if name not in changed})

    def _copy_columns(self, numbers: np.ndarray, rows: _Rows, out: Columns) -> None:
        """Copy `rows` of the files of segments `numbers` (P,), counted from the beginnings of the files. Those beyond
        the end of a file are left out."""
        places = self._places
        if places.num_closed != self._files.num_closed or len(places.rows) != len(self._view.segments):
            places.clear(len(self._view.segments), self._files.num_closed)
        if out and places.is_known[numbers].all():
            self._copy_rows(places.rows[numbers], places.addresses[numbers], self._file, numbers, rows, out)
            return
        distinct, file_of = np.unique(numbers, return_inverse=True)
        begin = 0
        while out and begin < len(distinct):
            most = self._files.limit  # fewer, once the process has too many files open
            wanted = distinct[begin : begin + most].tolist()
            try:  # not `_file`, which costs as much as the copy
                files = [self._files.open(self._view.segments[i].file, self._view.schema.id) for i in wanted]
            except (OSError, IntegrityError) as error:
                is_lost = isinstance(error, IntegrityError | FileNotFoundError)
                if not is_lost and len(wanted) > 1:
                    self._files.limit = max(min(self._files.limit, len(wanted) // 2), 1)
                    continue
                files = [self._file(number) for number in wanted]  # says which it is
            num_rows, addresses = np.array([file.rows for file in files]), self._find_addresses(wanted, files)
            if places.num_closed == self._files.num_closed:
                places.add(wanted, num_rows, addresses)
            here = np.flatnonzero((file_of >= begin) & (file_of < begin + len(wanted)))
            each = file_of[here] - begin
            opened = dict(zip(wanted, files, strict=True)).__getitem__  # these may have been closed for one another
            self._copy_rows(num_rows[each], addresses[each], opened, numbers[here], rows.at(here), out)
            begin += len(wanted)

    def _find_addresses(self, numbers: list[int], files: list[SegmentFile]) -> np.ndarray:
        """Find the plain columns of files (F, C) int64 in memory, 0 where a file lacks one. SegmentLost if a column is
        not in its file."""
        found = []
        for number, file in zip(numbers, files, strict=True):
            try:
                found.append([file.addresses.get(name, 0) for name in self._places.names])
            except IntegrityError as error:
                raise self._lost(number, error) from error
        return np.array(found, dtype=np.int64).reshape(len(files), len(self._places.names))

    def _copy_rows(
        self, num_rows: np.ndarray, addresses: np.ndarray, opened: Callable[[int], SegmentFile], numbers: np.ndarray,
        rows: _Rows, out: Columns,
    ) -> None:  # fmt: skip
        """Copy `rows` (P,) from the files of segments `numbers` (P,), which `opened` returns; these have `num_rows`
        (P,) and columns at the `addresses` (P, C)."""
        wrong = np.flatnonzero((rows.start < 0) | (rows.start >= num_rows))
        if len(wrong):  # addresses must not follow from what a damaged file says
            number = int(numbers[wrong[0]])
            raise self._make_damage_error(number, opened(number), "rows lie outside it")
        count = np.minimum(rows.count, num_rows - rows.start)
        columns = [column for column, name in enumerate(self._places.names) if name in out]
        names, found = [self._places.names[column] for column in columns], addresses[:, columns]
        if not found.all():
            range_, column = np.argwhere(found == 0)[0].tolist()
            number = int(numbers[range_])
            raise self._make_damage_error(number, opened(number), f"it lacks the column '{names[column]}'")
        copy_rows(found, rows.start, count, [out[name] for name in names], rows.target)
        if wide := self._wide & out.keys():
            listed = numbers.tolist()
            where = map(opened, listed), rows.start.tolist(), count.tolist(), rows.target.tolist()
            self._decode(list(map(_FileRange, listed, *where)), {name: out[name] for name in wide})

    def _decode(self, ranges: Sequence[_FileRange], out: Columns) -> None:
        """Copy compressed columns. Where they are large, a second thread decodes half of them."""
        rows = sum(each.length for each in ranges)
        row_bytes = sum(values.nbytes // max(len(values), 1) for values in out.values())
        helped, half = None, 0
        if self._helper is not None and rows * row_bytes > SHARED_BYTES:
            half = len(ranges) // 2
            helped = self._helper.submit(_decode_ranges, ranges[:half], out)
        failures = [_decode_ranges(ranges[half:], out)]
        if helped is not None:
            failures.append(helped.result())
        for number, error in filter(None, failures):
            raise self._lost(number, error) from error

    def _make_damage_error(self, number: int, file: SegmentFile, what: str) -> SegmentLost:
        return self._lost(number, IntegrityError(f"segment '{file.path}' is damaged: {what}"))

    def _name_ranges(self, table: np.ndarray, start: np.ndarray, names: list[str]) -> None:
        """Announce to the operating system what will be copied."""
        places = [("segment", "row0"), ("base", "base_row0")] if (bases(table) != table["segment"]).any() else []
        for segments, row0 in places or [("segment", "row0")]:
            rows = table[row0].astype(np.int64) + start
            for a, b in self._by_file(table[segments]):
                file = self._file(int(table[segments][a]))
                if len(file.bytes) <= SMALL_FILE:
                    prepare_file(file.bytes)
                    continue
                for name in names:
                    if name in file.columns:
                        prepare(file.columns[name], rows[a:b], self._rows)

    def _file(self, number: int) -> SegmentFile:
        id = self._view.segments[number].file
        try:
            return self._files.open(id, self._view.schema.id)
        except (IntegrityError, FileNotFoundError) as error:
            raise self._lost(number, error) from error
        except OSError as error:
            raise make_storage_error(error, f"read segment '{id}' of lake '{self._view.lake.name}'") from error

    def _lost(self, number: int, error: Exception) -> SegmentLost:
        self._files.close(self._view.segments[number].file)
        return SegmentLost(number, str(error))

    def _close_moved(self) -> None:
        """Close files that no longer hold any trajectory of the view: they may have been removed."""
        self._places.clear(0, self._files.num_closed)  # another file may hold a segment now
        lying = {segment.file for segment in self._view.segments}
        for id in self._files.keys() - lying:
            self._files.close(id)
        self._moves = self._view.moves


def _widen_ends(
    origins: _Origins, rows: _Rows, ends: np.ndarray, length: np.ndarray
) -> tuple[tuple[np.ndarray, _Rows], np.ndarray]:
    """Widen the rows of the first and the last parts of windows to as many as most parts have: which parts (indices),
    and the wider rows; and the other parts, which are to be copied after them, over what is too much.

    Equally long episodes are then a block each, whatever is seen of the first and the last one of a window. `ends`
    (P,): 1 of a first part, -1 of a last one, 0 of others and of windows of one part; `length` (P,): of their windows.
    """
    usual = find_usual(rows.count)
    back = np.where(ends < 0, usual - rows.count, 0)
    first_row = np.minimum(origins.row0, origins.base_row0)
    # Two wide ends must not meet. Rows before those of a file are not its own; those after its end are left out.
    is_wide = (ends != 0) & (rows.count < usual) & (length >= 2 * usual) & (first_row + rows.start >= back)
    some = rows.at(is_wide)
    back = back[is_wide]
    widened = _Rows(some.start - back, np.full_like(some.count, usual), some.target - back)
    return (np.flatnonzero(is_wide), widened), np.flatnonzero(~is_wide)


def _decode_ranges(ranges: Sequence[_FileRange], out: Columns) -> tuple[int, Exception] | None:
    """Copy compressed columns; return the first segment that cannot be read, with the reason."""
    for number, file, begin, length, target in ranges:
        try:
            for name, values in out.items():
                file.copy_rows(name, begin, begin + length, values[target : target + length])
        except (IntegrityError, FileNotFoundError) as error:
            return number, error
    return None


def _flatten(out: Columns) -> Columns:
    """View columns (B, L, ...) as (B * L, ...)."""
    assert all(values.flags.c_contiguous for values in out.values())  # otherwise they would be copied
    return {name: values.reshape(-1, *values.shape[2:]) for name, values in out.items()}
