"""The wide (images) and ragged (texts) columns of a segment: an Arrow file of lz4 batches.

A batch holds 32 rows, fewer if they are more than 256 KiB, more if they are less than 32 KiB. A window is read by
decoding the batches it touches: larger ones decode more rows than needed, smaller ones cost more calls. Measured on
game frames of 12 and 28 KiB (tests/benchmarks/frames.py): level 3 makes files half as large as level 1 and decodes up
to 1.7 times as fast, at a third of the speed of writing (250 to 600 MB/s); zstd files are equal or slightly smaller and
decode at a half to a third of the speed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from pipelines.errors import IntegrityError
from pipelines.lake.arrow import UNREADABLE, arrow_schema, mapped, to_arrow, to_numpy
from pipelines.lake.schema import Column

BATCH_ROWS, _LEAST_BYTES, MOST_BYTES = 32, 32 << 10, 256 << 10
LEVEL = 3
_ROWS_KEY = b"batch_rows"  # in the file's metadata


def blob_path(main: Path) -> Path:
    """Return the path of the blob file beside a segment's main file."""
    return main.with_name(main.name.removesuffix(".arrow") + ".blob.arrow")


def write_blob(file: BinaryIO, columns: Sequence[Column], values: Mapping[str, np.ndarray]) -> None:
    """Write `columns` of `values` (rows, *shape)."""
    schema, options = (
        arrow_schema(columns),
        pa.ipc.IpcWriteOptions(compression=pa.Codec("lz4", compression_level=LEVEL)),
    )
    rows = len(values[columns[0].name])
    step_bytes = sum(c.step_bytes for c in columns)
    step = max(1, min(max(BATCH_ROWS, _LEAST_BYTES // step_bytes), MOST_BYTES // step_bytes))
    with pa.ipc.new_file(file, schema, options=options, metadata={_ROWS_KEY: str(step)}) as writer:
        for start in range(0, rows, step):
            arrays = [to_arrow(c, values[c.name][start : start + step]) for c in columns]
            writer.write_batch(pa.record_batch(arrays, schema=schema))


@dataclass
class BlobCache:
    """An LRU cache of decoded batches, `limit_bytes` over all files that share it."""

    limit_bytes: int = 16 << 20
    _held: OrderedDict[tuple[Path, str, int], np.ndarray] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def get(self, key: tuple[Path, str, int], decode: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the batch of `key`, decoding it if it is not cached."""
        batch = self._held.get(key)
        if batch is not None:
            self._held.move_to_end(key)
            return batch
        batch = self._held[key] = decode()
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
            file = pa.py_buffer(mapped(path, scattered=scattered))
            reader = _reader(file)
            self.batch_rows = int((reader.metadata or {})[_ROWS_KEY])
            same = reader.schema.equals(arrow_schema(columns))
            if not same or reader.num_record_batches != -(-rows // self.batch_rows):
                raise ValueError("it belongs to another segment")
            self._columns = {c.name: (c, _reader(file, i)) for i, c in enumerate(columns)}
        except (*UNREADABLE, ZeroDivisionError) as error:
            raise IntegrityError(f"segment '{path}' is damaged: {error}") from error

    def copy_rows(self, name: str, start: int, stop: int, out: np.ndarray) -> None:
        """Copy rows [start, stop) of a column into `out` (stop - start, *shape)."""
        column, reader = self._columns[name]
        step, get = self.batch_rows, self._cache.get
        for number in range(start // step, -(-stop // step)):
            first = number * step
            a, b = max(start, first), min(stop, first + step)
            batch = get((self.path, name, number), lambda: self._decode(column, reader, number))  # noqa: B023
            out[a - start : b - start] = batch[a - first : b - first]

    def _decode(self, column: Column, reader: pa.ipc.RecordBatchFileReader, number: int) -> np.ndarray:
        try:
            batch = reader.get_batch(number)
            if batch.num_rows != min(self.batch_rows, self.rows - number * self.batch_rows):
                raise ValueError(f"batch {number} has {batch.num_rows} rows")
            return to_numpy(column, batch.column(0))
        except UNREADABLE as error:
            raise IntegrityError(f"segment '{self.path}' is damaged: {error}") from error


def _reader(file: pa.Buffer, column: int | None = None) -> pa.ipc.RecordBatchFileReader:
    """Open a reader of one column or of all, single-threaded: handing a batch to a pool costs more than decoding it."""
    wanted = None if column is None else [column]
    return pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(use_threads=False, included_fields=wanted))
