"""Turning logs into segments: a writer's own in a thread, so that fsync never blocks acting, and those of dead writers.

A writer's logs are published one at a time, in order. A log that cannot be published stays first in the queue with its
lock held; its error is raised in the writer's next call, and publication is retried when the next log is submitted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import numpy as np

from pipelines.errors import AmagoError, StageFailed
from pipelines.events import Listener, Notice, silent
from pipelines.files.atomic import storage_error
from pipelines.lake import segment as segments
from pipelines.lake.arrow import storage_dtype
from pipelines.lake.folders import FolderChooser, segment_key
from pipelines.lake.schema import Column, Schema
from pipelines.lake.segment import UnsealedBatch
from pipelines.lake.storage import Storage
from pipelines.lake.wal import Log, LogContent, remove_unborn

LOG_FORMAT = 1
WAITING = 2  # queued logs, besides the one being published, at which submit blocks
Publish = Callable[[Log, Sequence[UnsealedBatch]], object]


class Sealer:
    """A queue of logs. `publish(log, items)` turns a log into a segment and drops it. Methods are for the writer's
    thread.
    """

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._line: deque[tuple[Log, Sequence[UnsealedBatch]]] = deque()
        self._moved = threading.Condition()  # held briefly
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopped = False
        self._process = os.getpid()

    def submit(self, log: Log, items: Sequence[UnsealedBatch]) -> None:
        """Queue `log` for publication; blocks while the queue is too long. Raises an earlier log's error."""
        self._line.append((log, items))
        self._run()
        with self._moved:
            self._moved.wait_for(lambda: self._error is not None or len(self._line) <= WAITING + 1)
        self.check()

    def check(self) -> None:
        """Raise the error of the last publication, if it failed."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def retry(self) -> None:
        """Retry a failed publication; its error is reported only if it occurs again."""
        self._error = None
        self._run()

    def finish(self) -> None:
        """Wait until all logs are published, or raise the error of the first that cannot be."""
        self._join()
        self.check()

    def abandon(self) -> None:
        """Release the logs that are not published, for salvage."""
        self._stopped = True
        self._join()
        while self._line:
            self._line.popleft()[0].close()
        self._error, self._stopped = None, False

    def _join(self) -> None:
        thread = self._thread
        if thread is not None and self._mine():
            thread.join()

    def _run(self) -> None:
        if not self._mine():
            raise StageFailed("a lake's writer belongs to the process that made it", hint="open one in each process")
        with self._moved:
            if self._thread is None and self._line:
                self._thread = threading.Thread(target=self._work, name="amago-sealer")
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._moved:
                if not self._line or self._error is not None or self._stopped:
                    self._thread = None
                    return
            try:
                self._publish(*self._line[0])
            except BaseException as error:
                self._error = error
            else:
                self._line.popleft()
            with self._moved:
                self._moved.notify_all()

    def _mine(self) -> bool:
        """Return False in a forked child, which has neither the thread nor the logs."""
        return os.getpid() == self._process


def publish_log(
    storage: Storage,
    folders: FolderChooser,
    log: Log,
    schema_id: str,
    columns: Sequence[Column],
    items: Sequence[UnsealedBatch],
) -> str:
    """Seal a log whose lock is held: stage, mark, rename, drop. Returns the segment's id; an OSError leaves the log."""
    published = next((id for id in log.marks if storage.exists(segment_key(id))), None)
    if published is not None:  # an earlier attempt failed after the rename
        log.drop()
        return published
    writer, _, number = log.path.stem.rpartition("-")
    sequence = int(number)
    staged = segments.stage(storage.local / "tmp", writer, schema_id, columns, items, sequence=sequence, overlay=False)
    try:
        segment = segments.new_segment(folders, writer, sequence, overlay=False)
        log.mark(segment)
        segments.publish(storage, staged, segment)
    except BaseException:
        staged.discard()
        for id in log.marks:
            segments.drop_orphan(storage, id)
        raise
    log.drop()
    return segment


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


def refuse_unsealed(storage: Storage) -> None:
    """Raise StageFailed if a log of a dead writer with trajectories is still to be sealed: the disk is full, or cannot
    be written, and the lake only seems to be empty."""
    for path in sorted((storage.local / "wal").glob("*.wal")):
        with contextlib.suppress(OSError):
            log = Log.claim(path)
            if log is None:
                continue
            has_records = bool(log.read().records)
            log.close()
            if has_records:
                free = shutil.disk_usage(path).free / 1e6
                raise StageFailed(
                    f"lake '{storage.url()}' has no segments yet: its log '{path}' could not be sealed",
                    hint=f"its disk has {free:,.1f} MB free: make room, or allow writing there, and repeat the command",
                )


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
