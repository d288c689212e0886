"""Writers: a trajectory goes to the log, where it is safe, and to memory, which is sealed as a segment when due, in a
thread, so that fsync never blocks acting. The next process that opens the lake seals the logs of dead writers.

Neither takes a lock that another writer could hold. Once `append` returns, kill -9 loses nothing: the next writer or
trainer that opens the lake seals the log of the dead one. A crash between publishing a segment and dropping its log
duplicates nothing: the log names the segment before it is published.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import shutil
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pipelines.errors import AmagoError, StageFailed
from pipelines.events import Listener, Notice, silent
from pipelines.files.atomic import explain_errors, make_storage_error
from pipelines.lake import segment as segments
from pipelines.lake.folders import QUARANTINE, FolderChooser, segment_key
from pipelines.lake.schema import REWARD, TERMINATED, TRUNCATED, Column, Schema
from pipelines.lake.segment import UnsealedBatch
from pipelines.lake.storage import Storage
from pipelines.lake.trajectory import Infos, Trajectories, TrajectoryInfo
from pipelines.lake.wal import Log, remove_unborn

_KINDS: dict[str, type] = {
    **dict.fromkeys(("env", "task", "source", "policy_id", "collector", "goal_text", "episode", "history"), str),
    **dict.fromkeys(("policy_version", "seed", "chunk", "first_step", "history_index"), int),
    **dict.fromkeys(("epsilon", "t_start", "t_end"), float),
    **dict.fromkeys(("success", "continues"), bool),
}
_NULLABLE = frozenset({"success", "history", "history_index"})


# A lake is followed if a trainer has looked at it in the last seconds. Its writers then seal more often, so that 95% of
# the episodes can be drawn within a second; maintenance has more segments to merge (about 4,800 an hour and writer).
_FOLLOWED = "followed"
_FOLLOWER_SECONDS = 30.0
_FOLLOWED_SEAL_SECONDS = 0.7


def mark_followed(storage: Storage) -> None:
    """Let the writers of this host know that somebody waits for their data, for half a minute. Without effect on a lake
    that is read-only or was removed."""
    with contextlib.suppress(OSError):
        (storage.local / "locks" / _FOLLOWED).touch()


def is_followed(storage: Storage) -> bool:
    """Return whether the lake was marked as followed recently."""
    try:
        return abs(time.time() - os.stat(storage.local / "locks" / _FOLLOWED).st_mtime) < _FOLLOWER_SECONDS
    except OSError:
        return False


def writer_label(name: str) -> str:
    """Format how the names of writers called `name` begin."""
    return re.sub(r"[^A-Za-z0-9_.]", "_", name)[:32]


class Writer:
    """A writer of whole trajectories of one schema. Counts `trajectories`, `steps` (actions) and `bytes` appended.

    A context manager; leaving it seals the rest. Not thread-safe.
    """

    def __init__(
        self,
        storage: Storage,
        schema: Schema,
        *,
        name: str | None = None,
        seal_bytes: int = 64 << 20,
        seal_seconds: float = 10.0,
    ) -> None:
        self._storage = storage
        self._folders = FolderChooser(storage)
        self.schema = schema
        self.columns = schema.columns
        self.name = f"{writer_label(name or 'w')}.{os.getpid():x}.{secrets.token_hex(4)}"
        self._seal_bytes, self._seal_seconds = seal_bytes, seal_seconds
        self._sealer = Sealer(self._publish)
        self._log: Log | None = None
        self._unsealed: list[UnsealedBatch] = []
        self._unsealed_bytes = 0
        self._opened = self._sealed = self._looked = 0.0
        self._followed = False
        self._sequence = 0
        self.trajectories = self.steps = self.bytes = 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        try:
            self.close()
        except Exception as sealing:
            self._abandon()  # everything is still in the log
            if error is None:
                raise
            error.add_note(f"and then: {sealing}; what was acknowledged is in its log")

    def append(self, columns: Mapping[str, np.ndarray], info: TrajectoryInfo) -> str:
        """Store a trajectory of T actions given as T + 1 rows a column; returns its uid (32 hex digits).

        ValueError if the columns are not those of the schema. StageFailed if the disk refuses it, or has refused a
        segment since the last call; what was acknowledged before stays safe.
        """
        return self.append_many(Trajectories(columns, [len(values) for values in columns.values()][:1], [info]))[0]

    def append_many(self, trajectories: Trajectories) -> list[str]:
        """Store several trajectories at once, at a fraction of the cost each. Either all are stored or none."""
        stored, rows = encode_columns(self.columns, trajectories.columns, trajectories.rows), trajectories.rows
        infos = Infos.of(trajectories.infos)
        if len(infos) != len(rows):
            raise ValueError(f"{len(infos)} trajectories are described, {len(rows)} given")
        # What is logged must be sealable: encode_field refuses what the footer cannot hold.
        shared = {name: encode_field(name, [value])[0] for name, value in vars(infos.shared).items()}
        each = {name: encode_field(name, values) for name, values in infos.each.items()}
        counts = np.array(rows)
        ends = np.cumsum(counts)
        spans = np.column_stack([ends - counts + 1, ends]).ravel()  # the reward in the first row belongs to no action
        each |= {
            "length": counts - 1,
            "return": np.add.reduceat(np.append(stored[REWARD], 0.0), spans, dtype=np.float64)[::2],
            "terminated": stored[TERMINATED][ends - 1] != 0,
            "truncated": stored[TRUNCATED][ends - 1] != 0,
        }
        self._sealer.check()
        owned = {name: np.array(values) for name, values in stored.items()}
        blobs, uids = self._split_bytes(owned, rows), _new_uids(len(rows))
        names = [uid.hex() for uid in uids]
        each["crc"] = np.array(list(map(zlib.crc32, blobs)), dtype=np.uint32)
        row = {name: value for name, value in shared.items() if name not in each}
        with explain_errors(f"append to lake '{self._storage.url()}'"):
            if self._log is None:
                self._log = self._open_log()
            self._log.append(row, {"uid": names, **each}, blobs)
        size = sum(values.nbytes for values in owned.values())
        self._unsealed.append(UnsealedBatch(uids, owned, row, each))
        self._unsealed_bytes += size
        self.trajectories += len(uids)
        self.steps += sum(rows) - len(uids)
        self.bytes += size
        if self._unsealed_bytes >= self._seal_bytes:
            self._cut()
        else:
            self.poll()
        return names

    @staticmethod
    def _split_bytes(owned: Mapping[str, np.ndarray], rows: Sequence[int]) -> list[bytes | memoryview]:
        """Return the bytes of each trajectory: its rows of the first column, then of the second, and so on."""
        if len(rows) == 1:
            return [b"".join([values.data for values in owned.values()])]
        counts = np.asarray(rows, dtype=np.int64)
        widths = [values.nbytes // len(values) for values in owned.values()]
        starts = np.concatenate([[0], np.cumsum(counts * sum(widths))])
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        out, begins = np.empty(starts[-1], dtype=np.uint8), starts[:-1]
        for values, width in zip(owned.values(), widths, strict=True):
            if not width:
                continue
            places = np.ndarray((len(out) - width + 1,), f"V{width}", out, strides=(1,))  # one per possible start
            places[np.repeat(begins, counts) + within * width] = values.reshape(len(values), -1).view(f"V{width}")[:, 0]
            begins = begins + counts * width
        return [out.data[start:stop] for start, stop in itertools.pairwise(starts.tolist())]

    def poll(self) -> None:
        """Start sealing if the oldest unsealed trajectory has waited long enough; if the lake is followed on this host,
        also every `_FOLLOWED_SEAL_SECONDS`."""
        self._sealer.check()
        if not self._unsealed:
            return
        now = time.monotonic()
        if now - self._looked >= _FOLLOWED_SEAL_SECONDS:
            self._looked, self._followed = now, is_followed(self._storage)
        # What is rarer than that is sealed as it comes, since the last segment is older.
        if now - self._opened >= self._seal_seconds or (
            self._followed and now - self._sealed >= _FOLLOWED_SEAL_SECONDS
        ):
            self._cut()

    def seal(self) -> None:
        """Publish everything appended, and wait for it. StageFailed leaves it in its logs."""
        self._sealer.retry()
        self._cut()
        self._sealer.finish()

    close = seal

    def _cut(self) -> None:
        """Hand the log over for publication; the next trajectory starts another."""
        if self._log is not None:
            log, items = self._log, self._unsealed
            self._log, self._unsealed, self._unsealed_bytes = None, [], 0
            self._sealed = time.monotonic()
            self._sealer.submit(log, items)

    def _publish(self, log: Log, items: Sequence[UnsealedBatch]) -> None:
        with explain_errors(f"write a segment into '{self._storage.url()}'"):
            publish_log(self._storage, self._folders, log, self.schema.id, self.columns, items)

    def _abandon(self) -> None:
        self._sealer.abandon()
        if self._log is not None:
            self._log.close()
            self._log, self._unsealed = None, []

    def _open_log(self) -> Log:
        name = f"{self.name}-{self._sequence:08d}"
        self._sequence += 1
        self._opened = time.monotonic()
        header = {"format": LOG_FORMAT, "schema": self.schema.id, "columns": [c.name for c in self.columns]}
        return Log.create(self._storage.local / "wal" / f"{name}.wal", header, tmp=self._storage.local / "tmp")


def encode_columns(
    columns: Sequence[Column], values: Mapping[str, np.ndarray], rows: Sequence[int]
) -> dict[str, np.ndarray]:
    """Return `values` in storage form and order. ValueError unless names, dtypes, shapes and numbers of rows fit.

    `rows`: of each of the consecutive trajectories in `values`.
    """
    if set(values) != {c.name for c in columns}:
        raise ValueError(f"columns {sorted(values)} given, {sorted(c.name for c in columns)} expected")
    if {len(v) for v in values.values()} != {sum(rows)} or min(rows) < 2:
        found = sorted({len(v) for v in values.values()})
        raise ValueError(f"a trajectory of T actions needs T + 1 >= 2 rows in every column, got {found} for {rows}")
    for column in columns:
        array = values[column.name]
        if array.shape[1:] != column.shape or not np.can_cast(array.dtype, column.stored_dtype, "same_kind"):
            raise ValueError(
                f"column '{column.name}' has {array.dtype} {array.shape[1:]} a step, "
                f"{column.dtype} {column.shape} expected"
            )
    return {c.name: c.as_stored(values[c.name]) for c in columns}


def encode_field(name: str, values: Sequence[Any] | np.ndarray) -> Sequence[Any] | np.ndarray:
    """Encode a field of several trajectories in the form that JSON preserves. ValueError for values of another type."""
    if isinstance(values, np.ndarray) and (values.dtype.str, values.ndim, _KINDS.get(name)) == ("<f8", 1, float):
        return values.copy()  # the segment's table is made from it later
    if name == "tags":
        if not all(isinstance(text, str) for tags in values if tags for pair in tags.items() for text in pair):
            raise ValueError(f"'tags' of a trajectory are {next(filter(None, values))!r}, texts expected")
        return [[list(pair) for pair in tags.items()] if tags else [] for tags in values]
    if name == "attempts":
        return [[_of_kind(bool, one, name) for one in value] if len(value) else [] for value in values]
    kind, kinds = _KINDS[name], set(map(type, values))
    if not kinds <= ({kind, type(None)} if name in _NULLABLE else {kind}):
        values = [value if value is None and name in _NULLABLE else _of_kind(kind, value, name) for value in values]
    known = [value for value in values if value is not None] if kind is int else []
    if known and (min(known) < -(2**63) or max(known) >= 2**63):
        raise ValueError(f"'{name}' of a trajectory is {max(known, key=abs)}, more than 64 bits")
    return values


def _of_kind(kind: type, value: Any, name: str) -> Any:
    """Convert a value, also of numpy, to `kind`."""
    plain = value.item() if isinstance(value, np.generic) or getattr(value, "shape", None) == () else value
    if not isinstance(plain, int | float if kind is float else kind):
        raise ValueError(f"'{name}' of a trajectory is {value!r}, {kind.__name__} expected")
    return kind(plain)


def _new_uids(count: int) -> list[bytes]:
    """Draw what `uuid4().bytes` would, with one system call for all."""
    drawn = np.frombuffer(os.urandom(16 * count), dtype=np.uint8).reshape(count, 16).copy()
    drawn[:, 6] = drawn[:, 6] & 0x0F | 0x40
    drawn[:, 8] = drawn[:, 8] & 0x3F | 0x80
    uids = drawn.tobytes()
    return [uids[start : start + 16] for start in range(0, len(uids), 16)]


LOG_FORMAT = 1
WAITING = 2  # queued logs, besides the one being published, at which submit blocks
Publish = Callable[[Log, Sequence[UnsealedBatch]], object]


class Sealer:
    """A queue of logs, which a thread publishes one at a time, in order. `publish(log, items)` turns a log into a
    segment and drops it.

    A log that cannot be published stays first in the queue with its lock held; its error is raised in the writer's next
    call, and publication is retried when the next log is submitted. Methods are for the writer's thread.
    """

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._queue: deque[tuple[Log, Sequence[UnsealedBatch]]] = deque()
        self._moved = threading.Condition()  # held briefly
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopped = False
        self._process = os.getpid()

    def submit(self, log: Log, items: Sequence[UnsealedBatch]) -> None:
        """Queue `log` for publication; blocks while the queue is too long. Raises an earlier log's error."""
        self._queue.append((log, items))
        self._run()
        with self._moved:
            self._moved.wait_for(lambda: self._error is not None or len(self._queue) <= WAITING + 1)
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
        while self._queue:
            self._queue.popleft()[0].close()
        self._error, self._stopped = None, False

    def _join(self) -> None:
        thread = self._thread
        if thread is not None and self._is_own_process():
            thread.join()

    def _run(self) -> None:
        if not self._is_own_process():
            raise StageFailed("a lake's writer belongs to the process that made it", hint="open one in each process")
        with self._moved:
            if self._thread is None and self._queue:
                self._thread = threading.Thread(target=self._work, name="amago-sealer")
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._moved:
                if not self._queue or self._error is not None or self._stopped:
                    self._thread = None
                    return
            try:
                self._publish(*self._queue[0])
            except BaseException as error:
                self._error = error
            else:
                self._queue.popleft()
            with self._moved:
                self._moved.notify_all()

    def _is_own_process(self) -> bool:
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
        segment = folders.name_segment(writer, sequence, overlay=False)
        log.mark(segment)
        staged.publish(storage, segment)
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
            listener(Notice(text=str(make_storage_error(error, f"salvage '{path}'")), level="warning"))
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
        kept = f"{QUARANTINE}/{log.path.name}"
        storage.write(kept, log.path.read_bytes())
        lost = "its header" if content.header is None else f"{content.damaged} of its records"
        text = (
            f"the log of a dead writer is damaged: {lost} cannot be read, and its trajectories are lost; "
            f"the log is kept as '{storage.url(kept)}'"
        )
        listener(Notice(text=text, level="warning"))
    if content.header is None or not content.records:
        log.drop()
        return 0
    log.truncate(content.valid)
    schema_id, names = content.header["schema"], content.header["columns"]
    known = {c.name: c for c in schema(schema_id).columns}
    columns = [known[name] for name in names]
    items = []
    for row, data in content.records:
        uid, rows, start, values = bytes.fromhex(row.pop("uid")), row["length"] + 1, 0, {}
        for column in columns:
            count = rows * int(np.prod(column.shape, dtype=np.int64))
            flat = np.frombuffer(data, column.stored_dtype, count, start)
            start += flat.nbytes
            values[column.name] = flat.reshape(rows, *column.shape)
        items.append(UnsealedBatch([uid], values, row))
    storage.create_folders()  # copying a lake loses empty folders
    publish_log(storage, FolderChooser(storage), log, schema_id, columns, items)
    return len(items)
