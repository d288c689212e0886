"""Salvage: turning the logs of dead writers into segments, exactly once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import numpy as np

from pipelines.errors import AmagoError
from pipelines.events import Listener, Notice, silent
from pipelines.files.atomic import storage_error
from pipelines.lake import segment as segments
from pipelines.lake.arrow import storage_dtype
from pipelines.lake.folders import FolderChooser, segment_key
from pipelines.lake.schema import Column, Schema
from pipelines.lake.segment import UnsealedBatch
from pipelines.lake.storage import Storage
from pipelines.lake.wal import Log, LogContent, remove_unborn
from pipelines.lake.writer import LOG_FORMAT, publish_log


def salvage(storage: Storage, schema: Callable[[str], Schema], *, listener: Listener = silent) -> int:
    """Seal the logs of dead writers; returns the number of trajectories saved. Safe at any time, in any process.

    `schema` returns the Schema of an id. A log that cannot be sealed now (a full or read-only disk, a newer format) is
    kept, with a Notice. A log with damaged records is copied to `quarantine/` and the rest of it is sealed.
    """
    saved = 0
    for path in sorted((storage.local / "wal").glob("*.wal")):
        log = None
        try:
            log = Log.claim(path)
            if log is not None:
                saved += _salvage_one(storage, log, schema, listener)
        except OSError as error:
            listener(Notice(text=str(storage_error(error, f"salvage '{path}'")), level="warning"))
        except AmagoError as error:
            listener(Notice(text=f"cannot salvage '{path}': {error}", level="warning"))
        finally:
            if log is not None:
                log.close()
    with contextlib.suppress(OSError):  # a read-only disk: they are harmless
        remove_unborn(storage.local / "tmp")
    return saved


def _salvage_one(storage: Storage, log: Log, schema: Callable[[str], Schema], listener: Listener) -> int:
    writer, content = log.path.stem.rpartition("-")[0], log.read()
    if content.newer or (content.header and int(content.header["format"]) > LOG_FORMAT):
        raise AmagoError("it was written by a newer version", hint="upgrade amago")
    if content.foreign:
        raise AmagoError("it is not the log of a writer", hint="move it elsewhere")
    for leftover in (storage.local / "tmp").glob(f"{writer}.*.tmp"):
        leftover.unlink(missing_ok=True)
    for segment in content.marks:
        segments.drop_orphan(storage, segment)
    published = any(storage.exists(segment_key(segment)) for segment in content.marks)
    if published or not (content.records or content.damaged):
        log.drop()
        return 0
    if content.damaged:
        _quarantine(storage, log, content, listener)
    if content.header is None or not content.records:
        log.drop()
        return 0
    log.truncate(content.valid)
    schema_id, names = content.header["schema"], content.header["columns"]
    known = {c.name: c for c in schema(schema_id).columns}
    columns = [known[name] for name in names]
    items = [_unsealed(columns, row, data) for row, data in content.records]
    storage.create_folders()  # copying a lake loses empty folders
    publish_log(storage, FolderChooser(storage), log, schema_id, columns, items)
    return len(items)


def _quarantine(storage: Storage, log: Log, content: LogContent, listener: Listener) -> None:
    kept = f"quarantine/{log.path.name}"
    storage.write(kept, log.path.read_bytes())
    lost = "its header" if content.header is None else f"{content.damaged} of its records"
    text = (
        f"the log of a dead writer is damaged: {lost} cannot be read, and its trajectories are lost; "
        f"the log is kept as '{storage.url(kept)}'"
    )
    listener(Notice(text=text, level="warning"))


def _unsealed(columns: Sequence[Column], row: dict[str, Any], data: memoryview) -> UnsealedBatch:
    uid, rows, start, values = UUID(row.pop("uid")), row["length"] + 1, 0, {}
    for column in columns:
        count = rows * int(np.prod(column.shape, dtype=np.int64))
        flat = np.frombuffer(data, storage_dtype(column), count, start)
        start += flat.nbytes
        values[column.name] = flat.reshape(rows, *column.shape)
    return UnsealedBatch([uid.bytes], values, row)
