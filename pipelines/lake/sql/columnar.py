"""Answers to a user's SQL as columns: a table of Arrow, or a file of Arrow or Parquet.

Rows leave the helper process in batches while the query runs. Therefore no row becomes a Python object, and a file may
be larger than the memory of either process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
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
    "parquet" a Parquet file. Returns the number of rows. UsageError as in `read_table`; OSError as the system gives it.
    """
    rows = 0
    writer: Any = None

    def begin(schema: pa.Schema) -> Callable[[pa.Table], None]:
        nonlocal rows, writer
        close()
        rows = 0
        file.seek(0)
        file.truncate()
        writer = (
            pq.ParquetWriter(file, schema, compression="zstd") if form == "parquet" else pa.ipc.new_file(file, schema)
        )
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
