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
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any
from uuid import uuid4

import numpy as np

from pipelines.config.atomic import explained
from pipelines.lake import segment as segments
from pipelines.lake.arrow import storage_dtype
from pipelines.lake.keys import segment_key
from pipelines.lake.schema import REWARD, TERMINATED, TRUNCATED, Column, Schema
from pipelines.lake.segment import Unsealed
from pipelines.lake.storage import Storage
from pipelines.lake.trajectory import TrajectoryInfo
from pipelines.lake.wal import Log

LOG_FORMAT = 1
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("env", "task", "source", "policy_id", "collector", "goal_text"), str),
    **dict.fromkeys(("policy_version", "seed"), int),
    **dict.fromkeys(("epsilon", "t_start", "t_end"), int | float),
    "success": bool | None,
    "attempts": list,
    "tags": list,
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
        self.schema = schema
        self.columns = tuple(columns if columns is not None else schema.columns)
        label = re.sub(r"[^A-Za-z0-9_.]", "_", name or "w")[:32]
        self.name = f"{label}.{os.getpid():x}.{secrets.token_hex(4)}"
        self._seal_bytes, self._seal_seconds = seal_bytes, seal_seconds
        self._log: Log | None = None
        self._unsealed: list[Unsealed] = []
        self._unsealed_bytes = 0
        self._opened = 0.0
        self._sequence = 0
        self.trajectories = self.steps = self.bytes = 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self.close()
        except Exception:
            self._abandon()  # the log still holds it all
            if kind is None:  # else the first error is the one to show
                raise

    def append(self, columns: Mapping[str, np.ndarray], info: TrajectoryInfo) -> str:
        """Store a trajectory of T actions given as T + 1 rows a column; returns its uid (32 hex digits).

        ValueError when the columns are not those of the schema. StageFailed when the disk refuses; what was
        acknowledged before stays safe.
        """
        stored = checked(self.columns, columns)
        row = asdict(info) | {"tags": list(info.tags.items())} | _summary(stored)
        return self._append(stored, row)

    def poll(self) -> None:
        """Seal if the oldest unsealed trajectory has waited long enough."""
        if self._unsealed and time.monotonic() - self._opened >= self._seal_seconds:
            self.seal()

    def seal(self) -> None:
        """Publish what was appended since the last time as one segment. StageFailed leaves it in the log."""
        if self._log is None:
            return
        with explained(f"write a segment into '{self._storage.url()}'"):
            publish_log(self._storage, self._log, self.schema.id, self.columns, self._unsealed, overlay=self._overlay)
        self._log, self._unsealed, self._unsealed_bytes = None, [], 0

    def close(self) -> None:
        """Seal the rest."""
        self.seal()

    def _abandon(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log, self._unsealed = None, []

    def _append(self, stored: dict[str, np.ndarray], row: dict[str, Any]) -> str:
        uid, crc = uuid4(), 0
        for values in stored.values():
            crc = segments.checksum(values, crc)
        text = json.dumps({"uid": uid.hex, **row, "crc": crc}, default=_plain)
        row = json.loads(text)  # what salvage would read: one form, however it comes to the segment
        check_row(row)
        with explained(f"append to lake '{self._storage.url()}'"):
            if self._log is None:
                self._log = self._open_log()
            self._log.append(text.encode(), list(stored.values()))
        owned = {name: np.array(values) for name, values in stored.items()}
        self._unsealed.append(Unsealed(uid.bytes, owned, row))
        size = sum(values.nbytes for values in owned.values())
        self._unsealed_bytes += size
        self.trajectories, self.steps, self.bytes = (
            self.trajectories + 1,
            self.steps + row["length"],
            self.bytes + size,
        )
        if self._unsealed_bytes >= self._seal_bytes:
            self.seal()
        else:
            self.poll()
        return uid.hex

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


def checked(columns: Sequence[Column], values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`values` in storage form and order. ValueError unless names, dtypes, shapes and numbers of rows fit."""
    if set(values) != {c.name for c in columns}:
        raise ValueError(f"columns {sorted(values)} given, {sorted(c.name for c in columns)} expected")
    rows = {len(v) for v in values.values()}
    if len(rows) != 1 or min(rows) < 2:
        raise ValueError(f"a trajectory of T actions needs T + 1 >= 2 rows in every column, got {sorted(rows)}")
    for column in columns:
        array = values[column.name]
        if array.shape[1:] != column.shape or not np.can_cast(array.dtype, storage_dtype(column), "same_kind"):
            raise ValueError(
                f"column '{column.name}' has {array.dtype} {array.shape[1:]} a step, "
                f"{column.dtype} {column.shape} expected"
            )
    return {c.name: segments.as_stored(c, values[c.name]) for c in columns}


def check_row(row: Mapping[str, Any]) -> None:
    """ValueError unless the footer can hold the row: what is logged must be possible to seal."""
    for name, kind in _KINDS.items():
        value = row[name]
        if not isinstance(value, kind) or (isinstance(value, int) and not -(2**63) <= value < 2**63):
            raise ValueError(f"'{name}' of a trajectory is {value!r}, {kind} expected")
    if not all(isinstance(text, str) for pair in row["tags"] for text in pair):
        raise ValueError(f"'tags' of a trajectory are {row['tags']!r}, texts expected")
    if not all(isinstance(value, bool) for value in row["attempts"]):
        raise ValueError(f"'attempts' of a trajectory are {row['attempts']!r}, booleans expected")


def _plain(value: Any) -> Any:
    """numpy scalars and arrays as JSON has them."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise ValueError(f"a trajectory's row cannot hold {value!r}")


def _summary(stored: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {
        "length": len(stored[REWARD]) - 1,
        "return": float(stored[REWARD][1:].sum(dtype=np.float64)),
        "terminated": bool(stored[TERMINATED][-1]),
        "truncated": bool(stored[TRUNCATED][-1]),
    }


def publish_log(
    storage: Storage,
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
        segment, _ = segments.new_segment(writer, int(sequence), overlay=overlay)
        log.mark(segment)
        segments.publish(storage, staged, segment)
    except BaseException:
        staged.discard()
        for id in log.marks:
            segments.drop_orphan(storage, id)
        raise
    log.drop()
    return segment
