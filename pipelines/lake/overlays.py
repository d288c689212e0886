"""Overlays: trajectories derived from others, stored as the columns that differ.

An overlay trajectory has a uid of its own, refers to its base by uid and segment, starts `base_offset` steps into it
and may be shorter. The base is never an overlay, so a window is read from two files at most, and it stays live: an
overlay is one more trajectory.

Overlays can be derived again, so they are not logged. The uid of each follows from its base, the method and the number
of the copy, which keeps a lake free of duplicates however often it is relabelled. Segments are staged and published
together at the end, so a failure leaves the lake unchanged; they are published earlier once the staged files take
`held_bytes`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pipelines.errors import InputMissing, Interrupted
from pipelines.files.atomic import explain_errors
from pipelines.lake import footer as footers
from pipelines.lake import segment as segments
from pipelines.lake.folders import FolderChooser
from pipelines.lake.footer import TRAJECTORIES
from pipelines.lake.schema import REWARD, TERMINATED, TRUNCATED, Schema
from pipelines.lake.segment import StagedFiles, checksum
from pipelines.lake.wal import Log
from pipelines.lake.writer import LOG_FORMAT

if TYPE_CHECKING:
    from pipelines.lake.store import Lake


@dataclass(frozen=True, kw_only=True)
class OverlayBatch:
    """n derived trajectories. `place` (n,) int64: index of each one's base among the given originals, ascending;
    `offset` (n,) int64: the row of the base at which it begins; `rows` (n,) int64: its number of rows, at least 2.
    `columns`: the columns that differ, trajectory after trajectory.

    Per trajectory: `success` (n,) int8, 1, 0, or -1 where unknown; `tasks`; `tags`, values by name. None: as in the
    base. `names_goal`: whether the base's `goal_text` still describes the goal. `pieces`: of episodes derived as a
    whole, what each piece says of its episode (see `TrajectoryInfo`); None: each trajectory is an episode of its own.
    """

    place: np.ndarray
    offset: np.ndarray
    rows: np.ndarray
    columns: Mapping[str, np.ndarray]
    success: np.ndarray | None = None
    tasks: Sequence[str] | None = None
    tags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    names_goal: bool = True
    pieces: Sequence[EpisodePiece] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def first(self) -> np.ndarray:
        """(n,) int64: row of `columns` at which each trajectory begins."""
        return np.cumsum(self.rows) - self.rows

    def part(self, which: np.ndarray, begin: np.ndarray, rows: np.ndarray) -> OverlayBatch:
        """Return, of the trajectories `which` (m,), the `rows` (m,) rows from row `begin` (m,) on."""
        index = np.repeat(self.first[which] + begin - (np.cumsum(rows) - rows), rows) + np.arange(int(rows.sum()))
        return replace(
            self,
            place=self.place[which],
            offset=self.offset[which] + begin,
            rows=rows,
            columns={name: values[index] for name, values in self.columns.items()},
            success=None if self.success is None else self.success[which],
            tasks=None if self.tasks is None else [self.tasks[i] for i in which.tolist()],
            tags={name: [values[i] for i in which.tolist()] for name, values in self.tags.items()},
            pieces=None if self.pieces is None else [self.pieces[i] for i in which.tolist()],
        )


@dataclass(frozen=True, kw_only=True)
class EpisodePiece:
    """The place of a trajectory in its episode; see `TrajectoryInfo`."""

    episode: str = ""
    chunk: int = 0
    first_step: int = 0
    continues: bool = False


def split_versions(
    versions: OverlayBatch, lengths: Sequence[np.ndarray], names: Sequence[str], first_steps: Sequence[int]
) -> tuple[np.ndarray, OverlayBatch]:
    """Split versions of joined episodes into versions of their pieces.

    Of each episode given: `lengths`, the actions of its pieces; `first_steps`, the time of its first row; `names`, what
    to call a version of it that covers several pieces. Returns for each part (m,) the number of its piece in the
    episode, and the parts, whose `place` is still that of the episode and whose `offset` is in the piece.
    """
    which, begins, rows, numbers, offsets, pieces = [], [], [], [], [], []
    for version, (place, offset, count) in enumerate(
        zip(versions.place.tolist(), versions.offset.tolist(), versions.rows.tolist(), strict=True)
    ):
        ends = np.cumsum(lengths[place])
        starts, last = ends - lengths[place], offset + count - 1
        inside = np.flatnonzero((starts < last) & (ends > offset)).tolist()
        for chunk, number in enumerate(inside):
            first, stop = max(offset, int(starts[number])), min(last, int(ends[number]))
            which.append(version)
            begins.append(first - offset)
            rows.append(stop - first + 1)
            numbers.append(number)
            offsets.append(first - int(starts[number]))
            # A version that begins later than its episode begins at time 0.
            time = first_steps[place] + first if offset == 0 else first - offset
            known = {"episode": names[place], "chunk": chunk} if len(inside) > 1 else {}
            pieces.append(EpisodePiece(first_step=time, continues=chunk + 1 < len(inside), **known))
    found = versions.part(*(np.array(each, dtype=np.int64) for each in (which, begins, rows)))
    goes_on = np.array([piece.continues for piece in pieces], dtype=bool)
    columns = dict(found.columns)
    if TRUNCATED in columns:
        columns[TRUNCATED][(found.first + found.rows - 1)[goes_on]] = 1
    success = None if found.success is None else np.where(goes_on, -1, found.success).astype(np.int8)
    offset = np.array(offsets, dtype=np.int64)
    return np.array(numbers, dtype=np.int64), replace(
        found, columns=columns, success=success, offset=offset, pieces=pieces
    )


def overlay_uids(base: np.ndarray, method: str, copies: np.ndarray | int) -> np.ndarray:
    """Return the uids (n,) "S16" of the copies that `method` derives from trajectories, given their uids `base` and the
    numbers `copies`.
    """
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


class OverlayWriter:
    """Writer of overlay segments that store `columns` of `schema`, which may be that of the bases with labels.

    Counts `trajectories`, `steps` and `bytes` (of columns) written.

    A context manager: leaving it publishes what was written, after an interruption too, but not after an error.
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
        self._lake, self._schema = lake, schema
        self._storage, self._schema_id = lake.storage, schema.id
        self._folders = FolderChooser(lake.storage)
        self._writer = f"{name}.{os.getpid():x}.{secrets.token_hex(4)}"
        self._seal_bytes, self._held_bytes = seal_bytes, held_bytes
        self._tables: list[pa.Table] = []
        self._values: list[Mapping[str, np.ndarray]] = []
        self._collected = self._rows = self._sequence = 0
        self._staged: list[StagedFiles] = []
        self._staged_bytes = 0
        self._log: Log | None = None  # holds no trajectory: salvage finds the staged files of a dead writer by it

    def __enter__(self) -> OverlayWriter:
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

    def append(self, base: str, table: pa.Table, batch: OverlayBatch, uids: np.ndarray, method: str) -> None:
        """Write trajectories with the uids (n,) "S16", derived from some of segment `base`: `batch.place` indexes
        `table`, rows of that segment's footer. ValueError if the columns do not fit.
        """
        if not len(batch):
            return
        values = {c.name: c.as_stored(batch.columns[c.name]) for c in self.columns}
        for column in self.columns:
            if values[column.name].shape != (int(batch.rows.sum()), *column.shape):
                raise ValueError(f"column '{column.name}' has the shape {values[column.name].shape}")
        self._tables.append(self._describe(base, table, batch, values, uids, method))
        self._values.append(values)
        size = sum(array.nbytes for array in values.values())
        self.trajectories += len(batch)
        self.steps += int(batch.rows.sum()) - len(batch)
        self.bytes += size
        self._rows += int(batch.rows.sum())
        self._collected += size
        if self._collected >= self._seal_bytes:
            self._stage()
            if self._staged_bytes >= self._held_bytes:
                self._publish()

    def _describe(
        self, base: str, table: pa.Table, batch: OverlayBatch, values: Mapping[str, np.ndarray], uids: np.ndarray,
        method: str,
    ) -> pa.Table:  # fmt: skip
        first, last, count = batch.first, batch.first + batch.rows - 1, len(batch)
        rows = table.take(pa.array(batch.place))
        whole = not batch.offset.any() and np.array_equal(batch.rows - 1, rows["length"].to_numpy())
        if not whole and not {REWARD, TERMINATED, TRUNCATED} <= values.keys():
            raise ValueError("an overlay of a part of its base must store 'reward', 'terminated' and 'truncated'")
        changed: dict[str, Any] = {
            "uid": pa.Array.from_buffers(pa.binary(16), count, [None, pa.py_buffer(uids.tobytes())]),
            "row0": first + self._rows,
            "length": batch.rows - 1,
            "source": ["relabel"] * count,
            "base_uid": rows["uid"],
            "base_segment": [base] * count,
            "base_offset": batch.offset,
            "relabel_method": [method] * count,
            "crc": self._compute_crcs(first, batch.rows, values),
            "t_commit": pa.nulls(count, pa.float64()),
        }
        # A version that begins later than its base begins at time 0.
        begins = np.where(batch.offset == 0, rows["first_step"].to_numpy(), 0).tolist()
        pieces = batch.pieces or [EpisodePiece(first_step=first_step) for first_step in begins]
        changed |= {name: [getattr(piece, name) for piece in pieces] for name in vars(pieces[0])}
        if REWARD in values:
            # The reward in the first row belongs to no action; sums are float64.
            paid = values[REWARD].astype(np.float64)
            paid[first] = 0.0
            changed["return"] = np.add.reduceat(paid, first)
        for flag in (TERMINATED, TRUNCATED):
            if flag in values:
                changed[flag] = values[flag][last] != 0
        if batch.success is not None:
            changed["success"] = pa.array(batch.success == 1, mask=batch.success < 0)
        if batch.tasks is not None:
            changed["task"] = list(batch.tasks)
        if not batch.names_goal:
            changed["goal_text"] = [""] * count
        if batch.tags:
            old = [dict(tags or ()) for tags in rows["tags"].to_pylist()]
            new = zip(*batch.tags.values(), strict=True)
            changed["tags"] = [
                list((tags | dict(zip(batch.tags, own, strict=True))).items())
                for tags, own in zip(old, new, strict=True)
            ]
        arrays = [
            pa.array(changed[field.name], field.type)
            if isinstance(changed.get(field.name), list | np.ndarray)
            else changed.get(field.name, rows[field.name])
            for field in TRAJECTORIES
        ]
        return pa.table(arrays, schema=TRAJECTORIES)

    def _compute_crcs(self, first: np.ndarray, rows: np.ndarray, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return (n,) uint32: the CRC32 of each trajectory over its columns in order."""
        views = [(array.reshape(-1).view(np.uint8).data, array.nbytes // len(array)) for array in values.values()]
        found, crc32 = [], zlib.crc32
        for start, stop in zip(first.tolist(), (first + rows).tolist(), strict=True):
            crc = 0
            for data, size in views:
                crc = crc32(data[start * size : stop * size], crc)
            found.append(crc)
        return np.array(found, dtype=np.uint32)

    def _stage(self) -> None:
        """Write the collected trajectories to temporary files."""
        if not self._tables:
            return
        storage, each = self._storage, {c.name: [values[c.name] for values in self._values] for c in self.columns}
        values = {name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for name, arrays in each.items()}
        header = footers.make_header(
            overlay=True,
            schema_id=self._schema_id,
            writer=self._writer,
            sequence=self._sequence + len(self._staged),
            rows=self._rows,
            columns={name: checksum(array) for name, array in values.items()},
        )
        table = pa.concat_tables(self._tables)
        with explain_errors(f"write a segment into '{storage.url()}'"):
            if self._log is None:
                about = {"format": LOG_FORMAT, "schema": self._schema_id, "columns": list(values)}
                path = storage.local / "wal" / f"{self._writer}-{0:08d}.wal"
                self._log = Log.create(path, about, tmp=storage.local / "tmp")
            staged = segments.stage_files(
                storage.local / "tmp", self._writer, self.columns, values, lambda: footers.encode(header, table)
            )
        self._staged.append(staged)
        self._staged_bytes += self._collected
        self._tables, self._values, self._collected, self._rows = [], [], 0, 0

    def _publish(self) -> None:
        if self._staged:
            self._lake.register(self._schema)  # labels make it another one than that of the originals
        while self._staged:
            with explain_errors(f"write a segment into '{self._storage.url()}'"):
                id = self._folders.name_segment(self._writer, self._sequence, overlay=True)
                self._sequence += 1
                assert self._log is not None
                self._log.mark(id)
                try:
                    self._staged[0].publish(self._storage, id)
                except BaseException:
                    with contextlib.suppress(OSError):
                        segments.drop_orphan(self._storage, id)
                    raise
            self._staged.pop(0)
        self._staged_bytes = 0
