"""Writers: a trajectory goes to the log (then it is safe) and to memory; the memory becomes a segment when it
is due.

Neither is done under a lock that another writer could hold. When `append` returns, kill -9 loses nothing: the
next writer or trainer that opens the lake seals the log of the dead. A crash between publishing a segment and
dropping its log doubles nothing: the log names the segment before it is published.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipelines.config.atomic import explained
from pipelines.lake import segment as segments
from pipelines.lake.arrow import storage_dtype
from pipelines.lake.folders import Folders
from pipelines.lake.keys import segment_key
from pipelines.lake.schema import REWARD, TERMINATED, TRUNCATED, Column, Schema
from pipelines.lake.sealer import Sealer
from pipelines.lake.segment import Unsealed
from pipelines.lake.storage import Storage
from pipelines.lake.trajectory import Trajectories, TrajectoryInfo
from pipelines.lake.wal import Log

LOG_FORMAT = 1
_KINDS: dict[str, type] = {
    **dict.fromkeys(("env", "task", "source", "policy_id", "collector", "goal_text"), str),
    **dict.fromkeys(("policy_version", "seed"), int),
    **dict.fromkeys(("epsilon", "t_start", "t_end"), float),
    "success": bool,
}


class Writer:
    """Appends whole trajectories of one schema. Counts `trajectories`, `steps` (actions) and `bytes`
    appended.

    Use as a context manager; leaving it seals what is left. Not for use by several threads at once.
    """

    _overlay = False

    def __init__(
        self,
        storage: Storage,
        schema: Schema,
        *,
        name: str | None = None,
        seal_bytes: int = 64 << 20,
        seal_seconds: float = 10.0,
        columns: Sequence[Column] | None = None,
    ) -> None:
        self._storage = storage
        self._folders = Folders(storage)
        self.schema = schema
        self.columns = tuple(columns if columns is not None else schema.columns)
        label = re.sub(r"[^A-Za-z0-9_.]", "_", name or "w")[:32]
        self.name = f"{label}.{os.getpid():x}.{secrets.token_hex(4)}"
        self._seal_bytes, self._seal_seconds = seal_bytes, seal_seconds
        self._sealer = Sealer(self._publish)
        self._log: Log | None = None
        self._unsealed: list[Unsealed] = []
        self._unsealed_bytes = 0
        self._opened = 0.0
        self._sequence = 0
        self.trajectories = self.steps = self.bytes = 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        try:
            self.close()
        except Exception as sealing:
            self._abandon()  # the log still holds it all
            if error is None:
                raise
            error.add_note(f"and then: {sealing}; what was acknowledged is in its log")

    def append(self, columns: Mapping[str, np.ndarray], info: TrajectoryInfo) -> str:
        """Store a trajectory of T actions given as T + 1 rows a column; returns its uid (32 hex digits).

        ValueError when the columns are not those of the schema. StageFailed when the disk refuses this one, or has
        refused a segment since the last call; what was acknowledged before stays safe.
        """
        return self.append_many(Trajectories(columns, [len(values) for values in columns.values()][:1], [info]))[0]

    def append_many(self, trajectories: Trajectories) -> list[str]:
        """As `append`, for several at once: a fraction of the cost each. All are stored or none."""
        stored, rows = checked(self.columns, trajectories.columns, trajectories.rows), trajectories.rows
        described = [row_of(info) for info in trajectories.infos]
        return self._append(stored, rows, [a | b for a, b in zip(described, _summaries(stored, rows), strict=True)])

    def poll(self) -> None:
        """Begin to seal if the oldest unsealed trajectory has waited long enough."""
        self._sealer.check()
        if self._unsealed and time.monotonic() - self._opened >= self._seal_seconds:
            self._cut()

    def seal(self) -> None:
        """Publish all that was appended, and wait for it. StageFailed leaves it in its logs."""
        self._sealer.retry()
        self._cut()
        self._sealer.finish()

    def close(self) -> None:
        """Seal the rest."""
        self.seal()

    def _cut(self) -> None:
        """Hand the log over to be published; the next trajectory begins another."""
        if self._log is not None:
            log, items = self._log, self._unsealed
            self._log, self._unsealed, self._unsealed_bytes = None, [], 0
            self._sealer.submit(log, items)

    def _publish(self, log: Log, items: Sequence[Unsealed]) -> None:
        with explained(f"write a segment into '{self._storage.url()}'"):
            publish_log(self._storage, self._folders, log, self.schema.id, self.columns, items, overlay=self._overlay)

    def _abandon(self) -> None:
        self._sealer.abandon()
        if self._log is not None:
            self._log.close()
            self._log, self._unsealed = None, []

    def _append(
        self, stored: Mapping[str, np.ndarray], rows: Sequence[int], described: list[dict[str, Any]]
    ) -> list[str]:
        """Log trajectories laid one after another, of `rows` rows each, with all of their row but uid and crc."""
        self._sealer.check()
        owned = {name: np.array(values) for name, values in stored.items()}
        items, blobs, told, start = [], [], [], 0
        for uid, count, row in zip(_new_uids(len(described)), rows, described, strict=True):
            stop = start + count
            columns = {name: values[start:stop] for name, values in owned.items()}
            blobs.append(b"".join([values.data for values in columns.values()]))
            row["crc"], start = zlib.crc32(blobs[-1]), stop
            told.append({"uid": uid.hex(), **row})
            items.append(Unsealed(uid, columns, row))
        records = [(text, data, row["crc"]) for text, data, row in zip(_to_json(told), blobs, told, strict=True)]
        with explained(f"append to lake '{self._storage.url()}'"):
            if self._log is None:
                self._log = self._open_log()
            self._log.append(records)
        size = sum(values.nbytes for values in owned.values())
        self._unsealed += items
        self._unsealed_bytes += size
        self.trajectories += len(items)
        self.steps += sum(rows) - len(items)
        self.bytes += size
        if self._unsealed_bytes >= self._seal_bytes:
            self._cut()
        else:
            self.poll()
        return [item.uid.hex() for item in items]

    def _open_log(self) -> Log:
        name = f"{self.name}-{self._sequence:08d}"
        self._sequence += 1
        self._opened = time.monotonic()
        header = {
            "format": LOG_FORMAT,
            "schema": self.schema.id,
            "columns": [c.name for c in self.columns],
            "overlay": self._overlay,
        }
        return Log.create(self._storage.local / "wal" / f"{name}.wal", header, tmp=self._storage.local / "tmp")


def checked(columns: Sequence[Column], values: Mapping[str, np.ndarray], rows: Sequence[int]) -> dict[str, np.ndarray]:
    """`values` in storage form and order. ValueError unless names, dtypes, shapes and numbers of rows fit.

    `rows`: of each of the trajectories that lie one after another in `values`.
    """
    if set(values) != {c.name for c in columns}:
        raise ValueError(f"columns {sorted(values)} given, {sorted(c.name for c in columns)} expected")
    if {len(v) for v in values.values()} != {sum(rows)} or min(rows) < 2:
        found = sorted({len(v) for v in values.values()})
        raise ValueError(f"a trajectory of T actions needs T + 1 >= 2 rows in every column, got {found} for {rows}")
    for column in columns:
        array = values[column.name]
        if array.shape[1:] != column.shape or not np.can_cast(array.dtype, storage_dtype(column), "same_kind"):
            raise ValueError(
                f"column '{column.name}' has {array.dtype} {array.shape[1:]} a step, "
                f"{column.dtype} {column.shape} expected"
            )
    return {c.name: segments.as_stored(c, values[c.name]) for c in columns}


def row_of(info: TrajectoryInfo) -> dict[str, Any]:
    """What the footer's table says of a trajectory, as far as its writer knows it, in the form that JSON gives back.

    ValueError unless the footer can hold it: what is logged must be possible to seal.
    """
    row = dict(vars(info))
    row["tags"] = [list(pair) for pair in info.tags.items()]
    row["attempts"] = [_of_kind(bool, value, "attempts") for value in info.attempts]
    for name, kind in _KINDS.items():
        value = row[name]
        if type(value) is not kind and not (value is None and name == "success"):
            row[name] = _of_kind(kind, value, name)
    for name in ("policy_version", "seed"):
        if not -(2**63) <= row[name] < 2**63:
            raise ValueError(f"'{name}' of a trajectory is {row[name]}, more than 64 bits")
    if row["tags"] and not all(isinstance(text, str) for pair in row["tags"] for text in pair):
        raise ValueError(f"'tags' of a trajectory are {row['tags']!r}, texts expected")
    return row


def _of_kind(kind: type, value: Any, name: str) -> Any:
    """A value as `kind`, also from numpy's form of it."""
    plain = value.item() if isinstance(value, np.generic) or getattr(value, "shape", None) == () else value
    if not isinstance(plain, int | float if kind is float else kind):
        raise ValueError(f"'{name}' of a trajectory is {value!r}, {kind.__name__} expected")
    return kind(plain)


def _new_uids(count: int) -> list[bytes]:
    """As `uuid4().bytes`, with one question to the system for all of them."""
    drawn = np.frombuffer(os.urandom(16 * count), dtype=np.uint8).reshape(count, 16).copy()
    drawn[:, 6] = drawn[:, 6] & 0x0F | 0x40
    drawn[:, 8] = drawn[:, 8] & 0x3F | 0x80
    return [uid.tobytes() for uid in drawn]


_BETWEEN = '}, {"uid": '  # inside a text the quotes would be escaped


def _to_json(rows: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Each row, whose first key is "uid"; encoded together, which costs half."""
    pieces = json.dumps(rows)[len('[{"uid": ') : -len("}]")].split(_BETWEEN)
    return [f'{{"uid": {piece}}}'.encode() for piece in pieces]


def _summaries(stored: Mapping[str, np.ndarray], rows: Sequence[int]) -> Iterator[dict[str, Any]]:
    """What follows from the columns of each trajectory."""
    ends = np.cumsum(rows)
    spans = np.column_stack([ends - rows + 1, ends]).ravel()  # what lies in a first row led to nothing
    returns = np.add.reduceat(np.append(stored[REWARD], 0.0), spans, dtype=np.float64)[::2]
    terminated, truncated = stored[TERMINATED][ends - 1] != 0, stored[TRUNCATED][ends - 1] != 0
    summed = zip(rows, returns.tolist(), terminated.tolist(), truncated.tolist(), strict=True)
    for count, value, over, cut in summed:
        yield {"length": count - 1, "return": value, "terminated": over, "truncated": cut}


def publish_log(
    storage: Storage,
    folders: Folders,
    log: Log,
    schema_id: str,
    columns: Sequence[Column],
    items: Sequence[Unsealed],
    *,
    overlay: bool,
) -> str:
    """Seal a log whose lock is held: stage, mark, rename, drop. Returns the segment's id; OSError leaves the
    log.
    """
    published = next((id for id in log.marks if storage.exists(segment_key(id))), None)
    if published is not None:  # an earlier attempt failed after the rename
        log.drop()
        return published
    writer, _, sequence = log.path.stem.rpartition("-")
    staged = segments.stage(storage.local / "tmp", writer, schema_id, columns, items, overlay=overlay)
    try:
        segment = segments.new_segment(folders, writer, int(sequence), overlay=overlay)
        log.mark(segment)
        segments.publish(storage, staged, segment)
    except BaseException:
        staged.discard()
        for id in log.marks:
            segments.drop_orphan(storage, id)
        raise
    log.drop()
    return segment
