"""Answers to a user's SQL as columns: a table of Arrow, or a file of Arrow, Parquet or CSV.

Rows leave the helper process in batches while the query runs. Therefore no row becomes a Python object, and a file may
be larger than the memory of either process.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from pipelines.errors import StorageError
from pipelines.events import Listener, silent
from pipelines.files.atomic import make_storage_error
from pipelines.lake.sql import catalog
from pipelines.lake.sql import query as sql
from pipelines.lake.sql.sandbox import QueryLimits

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

# A record batch or row group of a file ends at either. Readers work on one in each thread, and hold it in memory.
_GROUP_ROWS, _GROUP_BYTES = 122_880, 64 << 20


def read_table(lake: Lake, text: str, *, limits: QueryLimits, listener: Listener = silent) -> pa.Table:
    """Return the answer to one SELECT. UsageError as `catalog.query` raises it, for a type that readers of Arrow do not
    share, and for two columns of one name; LimitReached for a table larger than half of the memory limit.
    """
    groups: list[pa.Table] = []

    def begin(schema: pa.Schema) -> Callable[[pa.Table], None]:
        groups[:] = [schema.empty_table()]
        return groups.append

    _receive(lake, text, begin, limits, listener, most_bytes=limits.megabytes << 19)
    return pa.concat_tables(groups)


def write_file(
    lake: Lake, text: str, file: BinaryIO, form: str, *, limits: QueryLimits, listener: Listener = silent
) -> int:
    """Write the answer to one SELECT into an empty, seekable file: for the form "arrow" an Arrow IPC file, for
    "parquet" a Parquet file, for "csv" one of comma-separated values (`_CsvWriter`). Returns the number of rows.
    UsageError as in `read_table`; OSError as the system gives it.
    """
    rows = 0
    writer: Any = None

    def begin(schema: pa.Schema) -> Callable[[pa.Table], None]:
        nonlocal rows, writer
        close()
        rows = 0
        file.seek(0)
        file.truncate()
        if form == "csv":
            writer = _CsvWriter(file, schema)
        elif form == "parquet":
            writer = pq.ParquetWriter(file, schema, compression="zstd")
        else:
            writer = pa.ipc.new_file(file, schema)
        return write

    def write(group: pa.Table) -> None:
        nonlocal rows
        rows += group.num_rows
        writer.write_table(group)

    def close() -> None:
        if writer is not None:
            writer.close()

    try:
        _receive(lake, text, begin, limits, listener)
        close()
    except BaseException:
        with contextlib.suppress(OSError, pa.ArrowException):  # the file is not kept, and its disk may be full
            close()
        raise
    return rows


class _CsvWriter:
    """A writer of comma-separated values in UTF-8, by RFC 4180 but for lines, which end with a line feed. A text, empty
    or not, is quoted, and a missing value is not. Lists, maps and structures are strict JSON; bytes are hexadecimal.
    """

    def __init__(self, file: BinaryIO, schema: pa.Schema) -> None:
        self._writer = pyarrow.csv.CSVWriter(file, _make_flat(schema.empty_table()).schema)

    def write_table(self, table: pa.Table) -> None:
        self._writer.write_table(_make_flat(table))

    def close(self) -> None:
        self._writer.close()


def _make_flat(table: pa.Table) -> pa.Table:
    """Convert columns that CSV cannot hold to texts."""
    columns = []
    for column in table.columns:
        kind = column.type
        if pa.types.is_dictionary(kind):
            column = column.cast(kind.value_type)
        elif pa.types.is_nested(kind):
            values = column.to_pylist(maps_as_pydicts="lossy")
            texts = (None if value is None else json.dumps(_as_json(value), ensure_ascii=False) for value in values)
            column = pa.array(texts, pa.string())
        elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
            column = pa.array((None if value is None else value.hex() for value in column.to_pylist()), pa.string())
        columns.append(column)
    return pa.table(columns, names=table.column_names)


def _as_json(value: Any) -> Any:
    """Convert a value to types of JSON, which has no NaN."""
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    if isinstance(value, Mapping):
        return {str(key): _as_json(part) for key, part in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, str | bool | int) else str(value)


def _receive(
    lake: Lake,
    text: str,
    begin: Callable[[pa.Schema], Callable[[pa.Table], None]],
    limits: QueryLimits,
    listener: Listener,
    *,
    most_bytes: float = float("inf"),
) -> None:
    """Ask for an answer; pass its schema to `begin`, and its rows in groups to the function that `begin` returned.

    An index may prove to be damaged in the middle of an answer. Then the answer starts again, with its schema.
    """
    write: Callable[[pa.Table], None] | None = None
    batches: list[pa.RecordBatch] = []
    rows = size = total = 0

    def take(part: pa.Schema | pa.RecordBatch) -> None:
        nonlocal write, rows, size, total
        if isinstance(part, pa.Schema):
            write = begin(part)
            batches.clear()
            rows = size = total = 0
            return
        batches.append(part)
        rows, size, total = rows + part.num_rows, size + part.nbytes, total + part.nbytes
        if total > most_bytes:
            raise limits.out_of_memory()
        if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
            flush()

    def flush() -> None:
        nonlocal rows, size
        if batches:
            assert write is not None, "the schema comes first"
            write(pa.Table.from_batches(batches).combine_chunks())
            batches.clear()
            rows = size = 0

    try:
        catalog.ask(lake, sql.answer_in_batches, {"text": text}, limits, listener, take=take)
    except StorageError as error:
        raise make_storage_error(error, f"read lake '{lake.name}'") from error
    flush()
