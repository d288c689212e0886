"""Parquet and Arrow files, read a piece at a time."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.errors import InputMissing, IntegrityError
from pipelines.files.malformed import reason
from pipelines.formats.base import BATCH_BYTES, require_file
from pipelines.lake.arrow import UNREADABLE

_FEWEST_ROWS = 64
TRAJECTORIES = "trajectories.parquet"
"""In a folder that we exported, beside files `steps-*.parquet`: what is known of the trajectories."""


class ParquetFiles:
    """A reader of Parquet files."""

    def batches(self, path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of these columns, about `BATCH_BYTES` at a time."""
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            widest = max(file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups))
            rows = max(file.metadata.row_group(i).num_rows for i in range(file.num_row_groups))
            count = max(BATCH_BYTES * rows // max(widest, 1), _FEWEST_ROWS)
            yield from file.iter_batches(batch_size=count, columns=columns)

    def schema(self, path: Path) -> pa.Schema:
        """Read the columns of a file and its metadata. IntegrityError if it is damaged."""
        try:
            return pq.read_schema(path)
        except UNREADABLE as error:
            raise as_damage(path, error) from error

    def rows(self, path: Path) -> int:
        """Count the rows of a file. IntegrityError if it is damaged."""
        try:
            return int(pq.read_metadata(path).num_rows)
        except UNREADABLE as error:
            raise as_damage(path, error) from error


class ArrowFiles:
    """A reader of Arrow IPC files."""

    def batches(self, path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of these columns, about `BATCH_BYTES` at a time."""
        with pa.OSFile(str(path)) as source:
            reader = pa.ipc.open_file(source)
            for place in range(reader.num_record_batches):
                batch = reader.get_batch(place).select(columns)
                count = max(BATCH_BYTES * batch.num_rows // max(batch.nbytes, 1), _FEWEST_ROWS)
                yield from (batch.slice(at, count) for at in range(0, batch.num_rows, count))

    def schema(self, path: Path) -> pa.Schema:
        """Read the columns of a file and its metadata. IntegrityError if it is damaged."""
        try:
            with pa.memory_map(str(path)) as source:
                return pa.ipc.open_file(source).schema
        except UNREADABLE as error:
            raise as_damage(path, error) from error

    def rows(self, path: Path) -> int:
        """Count the rows of a file. IntegrityError if it is damaged."""
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            return sum(reader.get_batch(place).num_rows for place in range(reader.num_record_batches))


def as_damage(path: Path, error: BaseException) -> IntegrityError:
    """Make the error of a damaged file."""
    return IntegrityError(f"'{path}' is damaged, or of another format: {reason(error)}", hint="make or fetch it again")


def find_files(place: str, form: str) -> list[Path]:
    """List the files of a folder, or those that match a pattern. InputMissing if there are none."""
    path = Path(place)
    names = path.glob(f"*.{form}") if path.is_dir() else map(Path, glob.glob(place, recursive=True))
    found = sorted(one for one in names if not one.is_dir())
    exports = {one.parent for one in found if fnmatch(one.name, "steps-*.parquet")}
    found = [one for one in found if one.name != TRAJECTORIES or one.parent not in exports]
    if not found:
        raise InputMissing(f"no {form} file matches '{place}'", hint="quote the pattern, or check the path")
    return [require_file(one) for one in found]


def as_array(values: pa.Array) -> np.ndarray:
    """Convert an array of numbers, or of lists of equal length, to (n, ...).

    ValueError where a number is missing or lengths differ.
    """
    kind = values.type
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = as_array(values.flatten())
        if values.null_count or (len(values) and len(inner) % len(values)):
            raise ValueError("a list is missing, or of another length than the others")
        if not pa.types.is_fixed_size_list(kind) and len({len(item) for item in values}) > 1:
            raise ValueError("lists of different lengths")
        size = kind.list_size if pa.types.is_fixed_size_list(kind) else len(inner) // max(len(values), 1)
        return inner.reshape(len(values), size, *inner.shape[1:])
    if values.null_count:
        raise ValueError("a value is missing")
    return np.asarray(values.to_numpy(zero_copy_only=False))
