"""Segment files: an immutable Arrow IPC file of steps, and a blob file beside it for wide columns; checks of their
columns against the footer, as a whole and trajectory by trajectory.

`STEM.arrow` holds one uncompressed RecordBatch, so that a column is one range of the file; `STEM.ovl.arrow` likewise,
with the columns that an overlay changes. `STEM.blob.arrow` holds the wide (images) and ragged (texts) columns in
batches compressed by lz4. A batch has 32 rows, fewer if they are more than 256 KiB, more if they are less than 32 KiB.
A window is read by decoding the batches it touches: larger ones decode more rows than needed, smaller ones cost more
calls. Measured on game frames of 12 and 28 KiB (tests/benchmarks/frames.py): level 3 makes files half as large as level
1 and decodes up to 1.7 times as fast, at a third of the speed of writing (250 to 600 MB/s); zstd files are equal or
slightly smaller and decode at a half to a third of the speed.
"""

from __future__ import annotations

import errno
import functools
import itertools
import mmap
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import pyarrow as pa

from pipelines.errors import IntegrityError
from pipelines.files import atomic
from pipelines.lake import footer
from pipelines.lake.arrow import UNREADABLE, arrow_schema, map_file, to_arrow, to_numpy
from pipelines.lake.folders import FolderChooser, blob_key, segment_key
from pipelines.lake.schema import Column, Schema
from pipelines.lake.storage import Storage

_FETCHES = 4  # attempts, as the cache may evict a file before it is mapped
BATCH_ROWS, _LEAST_BYTES, MOST_BYTES = 32, 32 << 10, 256 << 10
LEVEL = 3
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of the process or the machine; the file may be sound
_ROWS_KEY = b"batch_rows"  # in the file's metadata


@dataclass
class BlobCache:
    """An LRU cache of decoded batches, `limit_bytes` over all files that share it. Several threads may use it."""

    limit_bytes: int = 16 << 20
    _held: OrderedDict[tuple[Path, str, int], np.ndarray] = field(default_factory=OrderedDict)
    _bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, key: tuple[Path, str, int], decode: Callable[[], np.ndarray]) -> np.ndarray:
        """Look up the batch of `key`, decoding it if it is not cached."""
        with self._lock:
            batch = self._held.get(key)
            if batch is not None:
                self._held.move_to_end(key)
                return batch
        batch = decode()
        with self._lock:
            if key not in self._held:  # another thread may have been quicker
                self._held[key] = batch
                self._bytes += batch.nbytes
            while self._bytes > self.limit_bytes and len(self._held) > 1:
                self._bytes -= self._held.popitem(last=False)[1].nbytes
        return batch


class BlobFile:
    """The blob file of a segment of `rows` rows, which are decoded `batch_rows` at a time. IntegrityError if it is
    missing, damaged or belongs to another segment.
    """

    def __init__(
        self, path: Path, columns: Sequence[Column], rows: int, *, scattered: bool, cache: BlobCache | None
    ) -> None:
        self.path, self.rows = path, rows
        self._cache = cache if cache is not None else BlobCache()
        try:
            self.map = map_file(path, scattered=scattered)
            reader = self._open_reader(None)
            self.batch_rows = int((reader.metadata or {})[_ROWS_KEY])
            same = reader.schema.equals(arrow_schema(columns))
            if not same or reader.num_record_batches != -(-rows // self.batch_rows):
                raise ValueError("it belongs to another segment")
            self._columns = {column.name: (place, column) for place, column in enumerate(columns)}
            self._readers: dict[tuple[int, int], pa.ipc.RecordBatchFileReader] = {}
        except (*UNREADABLE, ZeroDivisionError) as error:
            raise _as_damage(error, path) from error

    def copy_rows(self, name: str, start: int, stop: int, out: np.ndarray) -> None:
        """Copy rows [start, stop) of a column into `out` (stop - start, *shape)."""
        step, get = self.batch_rows, self._cache.get
        for number in range(start // step, -(-stop // step)):
            first = number * step
            a, b = max(start, first), min(stop, first + step)
            batch = get((self.path, name, number), lambda: self._decode(name, number))  # noqa: B023
            out[a - start : b - start] = batch[a - first : b - first]

    def _decode(self, name: str, number: int) -> np.ndarray:
        place, column = self._columns[name]
        own = threading.get_ident(), place  # a reader may not be shared by threads
        try:
            reader = self._readers.get(own)
            if reader is None:
                reader = self._readers[own] = self._open_reader([place])
            batch = reader.get_batch(number)
            if batch.num_rows != min(self.batch_rows, self.rows - number * self.batch_rows):
                raise ValueError(f"batch {number} has {batch.num_rows} rows")
            return to_numpy(column, batch.column(0))
        except UNREADABLE as error:
            raise IntegrityError(f"segment '{self.path}' is damaged: {error}") from error

    @staticmethod
    def write(file: BinaryIO, columns: Sequence[Column], values: Mapping[str, np.ndarray]) -> None:
        """Write `columns` of `values` (rows, *shape) as the content of a blob file."""
        schema = arrow_schema(columns)
        options = pa.ipc.IpcWriteOptions(compression=pa.Codec("lz4", compression_level=LEVEL))
        rows = len(values[columns[0].name])
        step_bytes = sum(c.step_bytes for c in columns)
        step = max(1, min(max(BATCH_ROWS, _LEAST_BYTES // step_bytes), MOST_BYTES // step_bytes))
        with pa.ipc.new_file(file, schema, options=options, metadata={_ROWS_KEY: str(step)}) as writer:
            for start in range(0, rows, step):
                arrays = [to_arrow(c, values[c.name][start : start + step]) for c in columns]
                writer.write_batch(pa.record_batch(arrays, schema=schema))

    def _open_reader(self, columns: list[int] | None) -> pa.ipc.RecordBatchFileReader:
        """Open a reader of some columns or of all."""
        # One thread: handing a batch to a pool costs more than decoding it.
        options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=columns)
        return pa.ipc.open_file(pa.py_buffer(self.map), options=options)


@dataclass
class UnsealedBatch:
    """Trajectories before they are sealed: their uids, their columns one after another, `row`, the fields of the
    footer's table that they share, and `each`, columns of the fields that they do not share.
    """

    uids: Sequence[bytes]
    columns: Mapping[str, np.ndarray]
    row: dict[str, Any]
    each: Mapping[str, Sequence[Any] | np.ndarray] = field(default_factory=dict)

    def column(self, name: str) -> Sequence[Any] | np.ndarray:
        """Return the values of a field of the footer's table, None where unknown."""
        return self.each[name] if name in self.each else [self.row.get(name)] * len(self.uids)


@dataclass(frozen=True)
class StagedFiles:
    """Files of a segment, written and synced under temporary names."""

    main: Path
    blob: Path | None

    def discard(self) -> None:
        for path in (self.main, self.blob):
            if path is not None:
                path.unlink(missing_ok=True)

    def publish(self, storage: Storage, id: str) -> None:
        """Publish the files as segment `id`, the blob first: a segment that is listed is complete."""
        if self.blob is not None:
            storage.publish(self.blob, blob_key(id))
        storage.publish(self.main, segment_key(id))

    def publish_new(self, storage: Storage, folders: FolderChooser, writer: str, *, overlay: bool) -> str:
        """Publish the files as the only segment of `writer`; return its id. After an error nothing of them is left."""
        id = ""
        try:
            id = folders.name_segment(writer, 0, overlay=overlay)
            self.publish(storage, id)
        except BaseException:
            self.discard()
            if id:
                drop_orphan(storage, id)
            raise
        return id


def stage(
    tmp: Path, writer: str, schema_id: str, columns: Sequence[Column], items: Sequence[UnsealedBatch],
    *, sequence: int, overlay: bool,
) -> StagedFiles:  # fmt: skip
    """Write the files of a writer's segment number `sequence` into `tmp`. An OSError leaves nothing behind."""
    encoders: dict[str, Callable[[Any], Any]] = {
        "base_uid": lambda base: bytes.fromhex(base) if base else None,
        "tags": lambda tags: [(key, value) for key, value in tags] if tags else tags,
    }
    fields: dict[str, Sequence[Any] | np.ndarray | pa.Array] = {}
    item_of = pa.array(np.repeat(np.arange(len(items)), [len(item.uids) for item in items]))
    own = {name for item in items for name in item.each}
    for name, kind in zip(footer.TRAJECTORIES.names, footer.TRAJECTORIES.types, strict=True):
        if name not in own:  # shared by the trajectories of each item: converted once an item
            shared: Iterable[Any] = [item.row.get(name) for item in items]
            fields[name] = pa.array(map(encoders[name], shared) if name in encoders else shared, kind).take(item_of)
            continue
        parts = [item.column(name) for item in items]
        if all(isinstance(part, np.ndarray) for part in parts):
            fields[name] = np.concatenate(parts)
        else:
            joined = itertools.chain.from_iterable(parts)
            fields[name] = list(map(encoders[name], joined) if name in encoders else joined)
    ends = np.cumsum(np.asarray(fields["length"]) + 1)
    uids = b"".join(itertools.chain.from_iterable(item.uids for item in items))
    fields["uid"] = pa.Array.from_buffers(pa.binary(16), len(ends), [None, pa.py_buffer(uids)])
    fields["row0"] = np.append(0, ends[:-1])
    values = {c.name: np.concatenate([item.columns[c.name] for item in items]) for c in columns}
    header = footer.make_header(
        overlay=overlay,
        schema_id=schema_id,
        writer=writer,
        sequence=sequence,
        rows=int(ends[-1]),
        columns={name: checksum(array) for name, array in values.items()},
    )
    table = pa.Table.from_pydict(fields, schema=footer.TRAJECTORIES)
    return stage_files(tmp, writer, columns, values, lambda: footer.encode(header, table))


def stage_files(
    tmp: Path, writer: str, columns: Sequence[Column], values: Mapping[str, Any], metadata: Callable[[], dict[str, str]]
) -> StagedFiles:
    """Write `values` (rows, *shape) of every column in storage form; an OSError leaves nothing behind.

    The values of a wide column may be any object with a length and slices of rows. `metadata` is called after they are
    written.
    """
    plain = [c for c in columns if not c.is_blob]
    wide = [c for c in columns if c.is_blob]
    blob = atomic.stage(tmp, writer, lambda file: BlobFile.write(file, wide, values)) if wide else None
    try:
        batch = pa.record_batch([to_arrow(c, values[c.name]) for c in plain], schema=arrow_schema(plain))

        def write_main(file: BinaryIO) -> None:
            with pa.ipc.new_file(file, batch.schema, metadata=metadata()) as main:
                main.write_batch(batch)

        main = atomic.stage(tmp, writer, write_main)
    except BaseException:
        if blob is not None:
            blob.unlink(missing_ok=True)
        raise
    return StagedFiles(main, blob)


def drop_orphan(storage: Storage, id: str) -> None:
    """Remove the blob of a segment whose main file was never published; called by the log's owner."""
    if not storage.exists(segment_key(id)):
        storage.remove(blob_key(id))


def open_segment(
    storage: Storage,
    id: str,
    schema_columns: Sequence[Column],
    *,
    scattered: bool = False,
    cache: BlobCache | None = None,
    check: Callable[[SegmentFile], None] | None = None,
) -> SegmentFile:
    """Fetch a segment if it is remote, and map it; see `SegmentFile`.

    A local copy that was evicted meanwhile or is damaged is fetched again; `check` may find damage too.
    """
    keys = (segment_key(id), blob_key(id))
    for attempt in range(_FETCHES):
        path = storage.fetch(keys[0])
        try:
            wide = functools.partial(storage.fetch, keys[1])
            file = SegmentFile(path, schema_columns, scattered=scattered, cache=cache, wide=wide)
            if check is not None:
                check(file)
            return file
        except FileNotFoundError:
            if attempt == _FETCHES - 1:
                raise
        except IntegrityError:
            if attempt or not any([storage.forget(key) for key in keys]):  # noqa: C419 - every one is forgotten
                raise
    raise AssertionError


def checksum(values: np.ndarray, crc: int = 0) -> int:
    """Return the CRC32 of the bytes of a C-contiguous array, continued from `crc`."""
    return zlib.crc32(values.reshape(-1).view(np.uint8).data, crc)


def _as_damage(error: Exception, path: Path) -> Exception:
    """Convert an error of reading a segment to an IntegrityError, unless the process lacks descriptors or memory: a
    segment that is called damaged is no longer drawn from."""
    if isinstance(error, OSError) and error.errno in EXHAUSTED:
        return error
    return IntegrityError(f"segment '{path}' is damaged: {error}")


@dataclass(frozen=True, slots=True)
class _Layout:
    """The offsets of an opened segment's columns in its file, which has `size` bytes."""

    size: int
    rows: int
    places: tuple[tuple[Column, int], ...]


class SegmentFile:
    """A mapped segment. `columns` are read-only views of the file (rows, *shape), without wide columns.

    `scattered`: short ranges anywhere will be read. `cache`: holds decoded wide rows. `wide` returns the path of the
    blob file (None: beside the segment). FileNotFoundError if it is gone, IntegrityError if it differs from its footer.
    """

    def __init__(
        self,
        path: Path,
        schema_columns: Sequence[Column],
        *,
        scattered: bool = False,
        cache: BlobCache | None = None,
        wide: Callable[[], Path] | None = None,
    ) -> None:
        self.path, self.schema_columns = path, schema_columns
        self._blob: BlobFile | None = None
        try:
            self._map = map_file(path, scattered=scattered)
            self.bytes = np.frombuffer(self._map, dtype=np.uint8)
            reader = pa.ipc.open_file(pa.py_buffer(self.bytes))
            self.footer = footer.decode(dict(reader.metadata), str(path))
            self.rows = int(self.footer.header["rows"])
            stored = [c for c in schema_columns if c.name in self.footer.columns]
            plain, blobs = [c for c in stored if not c.is_blob], [c for c in stored if c.is_blob]
            batch = reader.get_batch(0)
            if not reader.schema.equals(arrow_schema(plain)) or (plain and batch.num_rows != self.rows):
                raise ValueError("its columns are not those of its schema")
            self.columns = {c.name: to_numpy(c, batch.column(i)) for i, c in enumerate(plain)}
        except FileNotFoundError:
            raise
        except UNREADABLE as error:
            raise _as_damage(error, path) from error
        if blobs:
            try:
                beside = path.with_suffix(".blob.arrow") if wide is None else wide()
            except FileNotFoundError as error:
                raise IntegrityError(f"segment '{path}' is damaged: its wide columns are gone") from error
            self._blob = BlobFile(beside, blobs, self.rows, scattered=scattered, cache=cache)

    @classmethod
    def remap(cls, path: Path, schema_columns: Sequence[Column], layout: _Layout, *, scattered: bool) -> SegmentFile:
        """Map a segment again whose `layout` is known, since its files never change. This takes a tenth of the time of
        opening it. IntegrityError if the file has another size.
        """
        file = cls.__new__(cls)
        file.path, file.schema_columns, file.rows, file._blob = path, schema_columns, layout.rows, None
        try:
            file._map = map_file(path, scattered=scattered)
            file.bytes = np.frombuffer(file._map, dtype=np.uint8)
        except ValueError as error:  # it is empty
            raise IntegrityError(f"segment '{path}' is damaged: {error}") from error
        if len(file.bytes) != layout.size:
            raise IntegrityError(f"segment '{path}' is damaged: it has {len(file.bytes)} bytes, not {layout.size}")
        file.columns = {
            column.name: np.ndarray((layout.rows, *column.shape), column.dtype, file.bytes, place)
            for column, place in layout.places
        }
        return file

    def find_layout(self) -> _Layout | None:
        """Find where the columns lie, for `remap`; None if there are wide columns, whose batches must be decoded."""
        if self._blob is not None:
            return None
        begin, by_name = self.bytes.ctypes.data, {column.name: column for column in self.schema_columns}
        places = tuple((by_name[name], values.ctypes.data - begin) for name, values in self.columns.items())
        return _Layout(len(self.bytes), self.rows, places)

    @functools.cached_property
    def addresses(self) -> dict[str, int]:
        """Addresses of the columns in memory, whose rows follow each other. IntegrityError if one is not in the map."""
        begin, found = self.bytes.ctypes.data, {}
        for name, values in self.columns.items():
            place = values.ctypes.data - begin
            if not (values.flags.c_contiguous and 0 <= place <= len(self.bytes) - values.nbytes):
                raise IntegrityError(f"segment '{self.path}' is damaged: its column '{name}' is not in the file")
            found[name] = begin + place
        return found

    @functools.cached_property
    def footer(self) -> footer.Footer:
        """The footer. A file that was mapped again decodes it when it is asked for."""
        with pa.ipc.open_file(pa.py_buffer(self.bytes)) as reader:
            return footer.decode(dict(reader.metadata), str(self.path))

    @property
    def batch_rows(self) -> int:
        """Rows of wide columns that are decoded at a time; reading from a multiple of it costs least."""
        return self._blob.batch_rows if self._blob is not None else self.rows

    def copy_rows(self, name: str, start: int, stop: int, out: np.ndarray) -> None:
        """Copy rows [start, stop) of a column of either kind into `out` (stop - start, *shape)."""
        if name in self.columns:
            out[...] = self.columns[name][start:stop]
        else:
            assert self._blob is not None
            self._blob.copy_rows(name, start, stop, out)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read a copy of rows [start, stop) of a column."""
        column = next(c for c in self.schema_columns if c.name == name)
        out = np.empty((stop - start, *column.shape), dtype=column.dtype)
        self.copy_rows(name, start, stop, out)
        return out

    def release_pages(self) -> None:
        """Give back the memory of what was read; it is mapped again when it is read again."""
        for memory in (self._map, *([self._blob.map] if self._blob is not None else [])):
            memory.madvise(mmap.MADV_DONTNEED)

    def require_cover(self) -> None:
        """Raise IntegrityError unless the trajectories of the footer are contiguous and fill the file."""
        table = self.footer.trajectories
        rows = table["length"].to_numpy() + 1
        if rows.sum() != self.rows or np.any(table["row0"].to_numpy() != np.cumsum(rows) - rows):
            raise IntegrityError(f"segment '{self.path}' is damaged: its trajectories do not cover its rows")

    def require_sound(self) -> None:
        """Raise IntegrityError unless every column has the footer's checksum. Reads the whole segment."""
        if wrong := self.list_damaged_columns():
            raise IntegrityError(
                f"segment '{self.path}' is damaged: wrong checksum in {', '.join(wrong)}",
                hint="amago lake verify LAKE --repair sets the damage aside",
            )

    def list_damaged_columns(self) -> list[str]:
        """Return the columns whose checksum differs from the footer's, or that cannot be read."""
        expected = self.footer.header["columns"]
        return [name for name in expected if self.compute_checksum(name) != expected[name]]

    def compute_checksum(self, name: str) -> int | None:
        """Compute the CRC of a column; None if it cannot be read."""
        return self._compute_crc([name], 0, self.rows)

    def check_trajectories(self, keep: np.ndarray | None = None) -> np.ndarray:
        """Return (n,) bool: which trajectories have the bytes with which they were written, among those of the mask
        `keep` (None: all).
        """
        table = self.footer.trajectories
        found = np.ones(table.num_rows, dtype=bool) if keep is None else keep.copy()
        row0, rows, crcs = (table[name].to_pylist() for name in ("row0", "length", "crc"))
        for i in np.flatnonzero(found).tolist():
            found[i] = self._compute_crc(self.footer.columns, row0[i], row0[i] + rows[i] + 1) == crcs[i]
        return found

    def _compute_crc(self, names: Iterable[str], start: int, stop: int) -> int | None:
        """Return the CRC of rows [start, stop) over columns in order; None if they cannot be read. Wide columns are
        decoded a batch at a time.
        """
        crc = 0
        try:
            for name in names:
                if name in self._plain_bytes:
                    data, size = self._plain_bytes[name]
                    crc = zlib.crc32(data[start * size : stop * size], crc)
                    continue
                column = next(c for c in self.schema_columns if c.name == name)
                edges = [start, *range(start - start % self.batch_rows + self.batch_rows, stop, self.batch_rows), stop]
                for a, b in itertools.pairwise(edges):
                    crc = checksum(column.as_stored(self.read_rows(name, a, b)), crc)
        except IntegrityError:
            return None
        return crc

    @functools.cached_property
    def _plain_bytes(self) -> dict[str, tuple[memoryview, int]]:
        """The bytes of each plain column, and the size of a row."""
        sizes = {column.name: column.step_bytes for column in self.schema_columns}
        return {name: (values.reshape(-1).view(np.uint8).data, sizes[name]) for name, values in self.columns.items()}


class _HasSegments(Protocol):
    """What an open lake has."""

    storage: Storage

    def schema(self, schema_id: str) -> Schema: ...


class OpenSegments(OrderedDict[str, SegmentFile]):
    """The segment files opened last, by id: `limit` at most, or as many as the process may have open. `check` is called
    when a file is first opened; `rows` returns how many rows it must have, if a manifest says so. Files that were
    closed are mapped again by their layouts, of some 200 bytes each. `num_closed` counts closings: addresses in a file
    are valid until it has grown.
    """

    def __init__(
        self,
        lake: _HasSegments,
        *,
        limit: int = 64,
        scattered: bool = False,
        cache: BlobCache | None = None,
        check: Callable[[SegmentFile], None] | None = None,
        rows: Callable[[str], int | None] = lambda id: None,
    ) -> None:
        super().__init__()
        self._lake, self.limit, self._scattered, self._cache = lake, limit, scattered, cache
        self._check, self._expected_rows = check, rows
        self._sound: set[str] = set()
        self._layouts: dict[str, _Layout] = {}
        self.num_closed = 0

    def open(self, id: str, schema_id: str) -> SegmentFile:
        """Return a segment's file. FileNotFoundError if it is gone, IntegrityError if it is damaged."""
        if id not in self:
            while True:
                try:
                    self[id] = self._map(id, self._lake.schema(schema_id).columns)
                    break
                except OSError as error:
                    if error.errno not in EXHAUSTED or not self:
                        raise
                    self.limit = max(len(self) // 2, 1)
                    self._close_oldest(len(self) // 2)  # all in the end, if others still refer to them
            self._close_oldest(self.limit)
        self.move_to_end(id)
        return self[id]

    def _map(self, id: str, columns: Sequence[Column]) -> SegmentFile:
        layout = self._layouts.get(id)
        if layout is not None:
            try:
                path = self._lake.storage.fetch(segment_key(id))
                return SegmentFile.remap(path, columns, layout, scattered=self._scattered)
            except (FileNotFoundError, IntegrityError):  # of a local copy, perhaps: opening it fetches another
                del self._layouts[id]
        check = self._check if id not in self._sound else None
        file = open_segment(self._lake.storage, id, columns, scattered=self._scattered, cache=self._cache, check=check)
        if self._expected_rows(id) not in (None, file.rows):
            raise IntegrityError(
                f"segment '{file.path}' has {file.rows} rows, which is not what a manifest says",
                hint="remove the folder manifests/ of the lake: it is written again",
            )
        if check is not None:
            self._sound.add(id)
        return file

    def _close_oldest(self, most: int) -> None:
        while len(self) > most:
            id = next(iter(self))
            if id not in self._layouts and (layout := self[id].find_layout()) is not None:
                self._layouts[id] = layout
            self.close(id)

    def close(self, id: str) -> None:
        """Forget a file, if it is open; its memory is unmapped once nothing refers to it."""
        self.num_closed += self.pop(id, None) is not None


def stored_bytes(storage: Storage, id: str) -> int:
    """Return the size of a segment in its storage, the blob file included; 0 if it is gone."""
    sizes = []
    for key in (segment_key(id), blob_key(id)):
        try:
            sizes.append(storage.size(key))
        except FileNotFoundError:
            sizes.append(0)
    return sum(sizes)
