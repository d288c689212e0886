"""The wide columns of a segment (images): an Arrow file of lz4 batches of 32 rows."""

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

BLOB_ROWS = 32
Decoded = Mapping[str, np.ndarray]


def blob_path(main: Path) -> Path:
    """The blob file beside a segment's main file."""
    return main.with_name(main.name.removesuffix(".arrow") + ".blob.arrow")


def write_blob(file: BinaryIO, columns: Sequence[Column], values: Mapping[str, np.ndarray]) -> None:
    """Write `columns` of `values` (rows, *shape)."""
    schema, options = arrow_schema(columns), pa.ipc.IpcWriteOptions(compression="lz4")
    rows = len(values[columns[0].name])
    with pa.ipc.new_file(file, schema, options=options) as writer:
        for start in range(0, rows, BLOB_ROWS):
            arrays = [to_arrow(c, values[c.name][start : start + BLOB_ROWS]) for c in columns]
            writer.write_batch(pa.record_batch(arrays, schema=schema))


@dataclass
class BlobCache:
    """The batches decoded last, `limit_bytes` of them over all files that share the cache."""

    limit_bytes: int = 64 << 20
    _held: OrderedDict[tuple[Path, int], Decoded] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def get(self, key: tuple[Path, int], decode: Callable[[], Decoded]) -> Decoded:
        """The batch of `key`, decoded now if it is not held."""
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        batch = self._held[key] = decode()
        self._bytes += _size(batch)
        while self._bytes > self.limit_bytes and len(self._held) > 1:
            self._bytes -= _size(self._held.popitem(last=False)[1])
        return batch


def _size(batch: Decoded) -> int:
    return sum(values.nbytes for values in batch.values())


class BlobFile:
    """The blob file of a segment of `rows` rows. IntegrityError if it is missing, damaged or another's."""

    def __init__(
        self, path: Path, columns: Sequence[Column], rows: int, *, scattered: bool, cache: BlobCache | None
    ) -> None:
        self.path, self.columns, self.rows = path, columns, rows
        self._cache = cache if cache is not None else BlobCache()
        try:
            self._reader = pa.ipc.open_file(pa.py_buffer(mapped(path, scattered=scattered)))
            same = self._reader.schema.equals(arrow_schema(columns))
            if not same or self._reader.num_record_batches != -(-rows // BLOB_ROWS):
                raise ValueError("it belongs to another segment")
        except UNREADABLE as error:
            raise IntegrityError(f"segment '{path}' is damaged: {error}") from error

    def copy_rows(self, name: str, start: int, stop: int, out: np.ndarray) -> None:
        """Copy rows [start, stop) of a column into `out` (stop - start, *shape)."""
        for number in range(start // BLOB_ROWS, -(-stop // BLOB_ROWS)):
            first = number * BLOB_ROWS
            a, b = max(start, first), min(stop, first + BLOB_ROWS)
            out[a - start : b - start] = self._batch(number)[name][a - first : b - first]

    def _batch(self, number: int) -> Decoded:
        return self._cache.get((self.path, number), lambda: self._decode(number))

    def _decode(self, number: int) -> Decoded:
        try:
            batch = self._reader.get_batch(number)
            if batch.num_rows != min(BLOB_ROWS, self.rows - number * BLOB_ROWS):
                raise ValueError(f"batch {number} has {batch.num_rows} rows")
            return {c.name: to_numpy(c, batch.column(i)) for i, c in enumerate(self.columns)}
        except UNREADABLE as error:
            raise IntegrityError(f"segment '{self.path}' is damaged: {error}") from error
