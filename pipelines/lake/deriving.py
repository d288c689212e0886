"""Writing many derived trajectories at a time: whole overlay segments, without a log.

What a relabeler derived can be derived again, so nothing is logged; instead each derived trajectory has a uid that
follows from its base, the method and the number of the copy, and is in a lake once, however often it is written.
Segments are staged and get their names together, at the end: what goes wrong on the way leaves the lake as it was. When
staged files take `held_bytes`, they get their names earlier.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pipelines.errors import InputMissing, Interrupted
from pipelines.files.atomic import explained
from pipelines.lake import footer as footers
from pipelines.lake import segment as segments
from pipelines.lake.derived import Derived
from pipelines.lake.folders import Folders
from pipelines.lake.footer import TRAJECTORIES
from pipelines.lake.schema import REWARD, TERMINATED, TRUNCATED, Schema
from pipelines.lake.segment import Staged, as_stored, checksum
from pipelines.lake.wal import Log
from pipelines.lake.writer import LOG_FORMAT

if TYPE_CHECKING:
    from pipelines.lake.store import Lake


def uids_of(base: np.ndarray, method: str, copies: np.ndarray | int) -> np.ndarray:
    """(n,) "S16": uids of the versions `copies` by `method` of the trajectories `base` ("S16")."""
    start = hashlib.blake2b(method.encode(), digest_size=16)
    raw = np.ascontiguousarray(base).tobytes()
    found = bytearray(len(raw))
    for place, copy in enumerate(np.broadcast_to(copies, base.shape).tolist()):
        each = start.copy()
        each.update(raw[16 * place : 16 * place + 16] + copy.to_bytes(8, "little"))
        found[16 * place : 16 * place + 16] = each.digest()
    uids = np.frombuffer(found, dtype=np.uint8).reshape(-1, 16)
    uids[:, 6] = (uids[:, 6] & 0x0F) | 0x80  # a UUID of version 8: made by a rule of one's own
    uids[:, 8] = (uids[:, 8] & 0x3F) | 0x80
    return np.frombuffer(found, dtype="S16")


class DerivedWriter:
    """Writes what changes `columns` of trajectories. Counts `trajectories`, `steps` and `bytes` (of columns) written.

    Use as a context manager: leaving it gives what was written its place in the lake, also when it was interrupted;
    after an error it does not.
    """

    def __init__(
        self,
        lake: Lake,
        schema: Schema,
        columns: Sequence[str],
        *,
        name: str,
        seal_bytes: int = 64 << 20,
        held_bytes: int = 1 << 30,
    ) -> None:
        unknown = set(columns) - {c.name for c in schema.columns}
        if unknown or not columns:
            raise InputMissing(
                f"lake '{lake.name}' has no columns {sorted(unknown)} to change",
                hint=f"it has {', '.join(c.name for c in schema.columns)}",
            )
        self.columns = tuple(c for c in schema.columns if c.name in columns)
        self.trajectories = self.steps = self.bytes = 0
        self._storage, self._schema_id = lake.storage, schema.id
        self._folders = Folders(lake.storage)
        self._writer = f"{name}.{os.getpid():x}.{secrets.token_hex(4)}"
        self._seal_bytes, self._held_bytes = seal_bytes, held_bytes
        self._tables: list[pa.Table] = []
        self._values: list[Mapping[str, np.ndarray]] = []
        self._collected = self._rows = self._sequence = 0
        self._staged: list[Staged] = []
        self._staged_bytes = 0
        self._log: Log | None = None  # holds no trajectory, but whose staged files are left behind if we die

    def __enter__(self) -> DerivedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        try:
            if error is None or isinstance(error, Interrupted):
                self._stage()
                self._publish()
        finally:
            for staged in self._staged:
                staged.discard()
            if self._log is not None:
                self._log.drop()

    def append(self, base: str, table: pa.Table, derived: Derived, uids: np.ndarray, method: str) -> None:
        """Write trajectories with the uids (n,) "S16", derived from some of segment `base`: `table` has the rows of its
        footer that `derived.place` counts in. ValueError when the columns do not fit.
        """
        if not len(derived):
            return
        values = {c.name: as_stored(c, derived.columns[c.name]) for c in self.columns}
        for column in self.columns:
            if values[column.name].shape != (int(derived.rows.sum()), *column.shape):
                raise ValueError(f"column '{column.name}' has the shape {values[column.name].shape}")
        self._tables.append(self._described(base, table, derived, values, uids, method))
        self._values.append(values)
        size = sum(array.nbytes for array in values.values())
        self.trajectories += len(derived)
        self.steps += int(derived.rows.sum()) - len(derived)
        self.bytes += size
        self._rows += int(derived.rows.sum())
        self._collected += size
        if self._collected >= self._seal_bytes:
            self._stage()
            if self._staged_bytes >= self._held_bytes:
                self._publish()

    def _described(
        self,
        base: str,
        table: pa.Table,
        derived: Derived,
        values: Mapping[str, np.ndarray],
        uids: np.ndarray,
        method: str,
    ) -> pa.Table:
        """Rows of the footer."""
        first, last, count = derived.first, derived.first + derived.rows - 1, len(derived)
        rows = table.take(pa.array(derived.place))
        whole = not derived.offset.any() and np.array_equal(derived.rows - 1, rows["length"].to_numpy())
        if not whole and not {REWARD, TERMINATED, TRUNCATED} <= values.keys():
            raise ValueError("what is a part of its base must bring rewards and ends of its own")
        changed: dict[str, Any] = {
            "uid": _binary(uids),
            "row0": first + self._rows,
            "length": derived.rows - 1,
            "source": ["relabel"] * count,
            "base_uid": rows["uid"],
            "base_segment": [base] * count,
            "base_offset": derived.offset,
            "relabel_method": [method] * count,
            "crc": self._checksums(first, derived.rows, values),
            "t_commit": pa.nulls(count, pa.float64()),
        }
        if REWARD in values:
            # What lies in a first row led to nothing; sums are of float64.
            paid = values[REWARD].astype(np.float64)
            paid[first] = 0.0
            changed["return"] = np.add.reduceat(paid, first)
        for flag in (TERMINATED, TRUNCATED):
            if flag in values:
                changed[flag] = values[flag][last] != 0
        if derived.success is not None:
            changed["success"] = pa.array(derived.success == 1, mask=derived.success < 0)
        if derived.tasks is not None:
            changed["task"] = list(derived.tasks)
        if not derived.names_goal:
            changed["goal_text"] = [""] * count
        if derived.tags:
            old = [dict(tags or ()) for tags in rows["tags"].to_pylist()]
            new = zip(*derived.tags.values(), strict=True)
            changed["tags"] = [
                list((tags | dict(zip(derived.tags, own, strict=True))).items())
                for tags, own in zip(old, new, strict=True)
            ]
        arrays = [
            pa.array(changed[field.name], field.type)
            if isinstance(changed.get(field.name), list | np.ndarray)
            else changed.get(field.name, rows[field.name])
            for field in TRAJECTORIES
        ]
        return pa.table(arrays, schema=TRAJECTORIES)

    def _checksums(self, first: np.ndarray, rows: np.ndarray, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """(n,) uint32: CRC32 of the bytes of each trajectory's columns, one after the other."""
        views = [(array.reshape(-1).view(np.uint8).data, array.nbytes // len(array)) for array in values.values()]
        found, crc32 = [], zlib.crc32
        for start, stop in zip(first.tolist(), (first + rows).tolist(), strict=True):
            crc = 0
            for data, size in views:
                crc = crc32(data[start * size : stop * size], crc)
            found.append(crc)
        return np.array(found, dtype=np.uint32)

    def _stage(self) -> None:
        """Write what was collected into files that have no name in the lake yet."""
        if not self._tables:
            return
        storage, values = self._storage, {c.name: _joined([v[c.name] for v in self._values]) for c in self.columns}
        header = {
            "format": footers.FORMAT,
            "kind": "overlay",
            "schema": self._schema_id,
            "writer": self._writer,
            "sequence": self._sequence + len(self._staged),
            "t_commit": time.time(),
            "rows": self._rows,
            "columns": {name: checksum(array) for name, array in values.items()},
        }
        table = pa.concat_tables(self._tables)
        with explained(f"write a segment into '{storage.url()}'"):
            if self._log is None:
                header_of_log = {
                    "format": LOG_FORMAT,
                    "schema": self._schema_id,
                    "columns": list(values),
                    "overlay": True,
                }
                path = storage.local / "wal" / f"{self._writer}-{0:08d}.wal"
                self._log = Log.create(path, header_of_log, tmp=storage.local / "tmp")
            staged = segments.stage_files(
                storage.local / "tmp", self._writer, self.columns, values, lambda: footers.metadata(header, table)
            )
        self._staged.append(staged)
        self._staged_bytes += self._collected
        self._tables, self._values, self._collected, self._rows = [], [], 0, 0

    def _publish(self) -> None:
        """Give what is staged its place in the lake."""
        while self._staged:
            with explained(f"write a segment into '{self._storage.url()}'"):
                id = segments.new_segment(self._folders, self._writer, self._sequence, overlay=True)
                self._sequence += 1
                assert self._log is not None
                self._log.mark(id)
                try:
                    segments.publish(self._storage, self._staged[0], id)
                except BaseException:
                    with contextlib.suppress(OSError):
                        segments.drop_orphan(self._storage, id)
                    raise
            self._staged.pop(0)
        self._staged_bytes = 0


def _binary(uids: np.ndarray) -> pa.Array:
    raw = np.ascontiguousarray(uids)
    return pa.Array.from_buffers(pa.binary(16), len(raw), [None, pa.py_buffer(raw.tobytes())])


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
