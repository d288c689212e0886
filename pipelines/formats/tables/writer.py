"""A folder of Parquet files: `steps-SCHEMA-NNNNN.parquet` and `trajectories.parquet`.

The files of steps have `uid`, `t` (the time in the episode) and the step columns, one trajectory after another;
`trajectories.parquet` has a row for each with `file`, `row_group`, `first_row` (in that row group) and `rows`. A column
of shape (a, b) is a list of a * b values, and the metadata of its field has `shape`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.files.atomic import explain_errors, write_atomically
from pipelines.formats.base import Exported, Item
from pipelines.formats.tables.files import TRAJECTORIES as TABLE
from pipelines.formats.tables.reader import SPACES
from pipelines.lake.arrow import arrow_schema, to_arrow
from pipelines.lake.footer import TRAJECTORIES
from pipelines.lake.schema import Column, Schema
from pipelines.lake.trajectory import Trajectory

GROUP_BYTES = 32 << 20  # of steps in a row group, by their size in memory
FILE_BYTES = 512 << 20
# A page is checked by every reader that asks for it; a flipped bit in plain values is a value otherwise.
PACKING: Mapping[str, Any] = {"compression": "zstd", "write_page_checksum": True}
_ROWS_HELD = 10_000  # of trajectories as Python objects
_PLACES = pa.schema([("file", pa.string()), ("row_group", pa.int64()), ("first_row", pa.int64()), ("rows", pa.int64())])


def write(items: Iterable[Item], to: Path, about: Mapping[str, Any]) -> Exported:
    """Write trajectories of any schemas into the folder `to`."""
    for old in to.glob("*.parquet"):  # of an attempt that was interrupted, or of fewer trajectories
        old.unlink()
    parts: dict[str, _SchemaFiles] = {}
    rows: list[dict[str, Any]] = []
    tables: list[pa.Table] = []
    with contextlib.ExitStack() as stack, explain_errors(f"write '{to}'"):
        for item in items:
            schema = item.schema()
            if schema.id not in parts:
                parts[schema.id] = stack.enter_context(contextlib.closing(_SchemaFiles(to, schema)))
            rows.append(item.row() | parts[schema.id].add(item.uid, item.trajectory()))
            if len(rows) == _ROWS_HELD:
                tables.append(_make_table(rows))
                rows.clear()
    table = pa.concat_tables([*tables, _make_table(rows)])
    write_atomically(to / TABLE, lambda file: pq.write_table(table, file, **PACKING))
    steps, size = pc.sum(table["length"]).as_py() or 0, sum(path.stat().st_size for path in to.glob("*.parquet"))
    return Exported(trajectories=table.num_rows, steps=steps, written=table.num_rows, bytes=size)


def _make_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Build the table of trajectories and their places, uids as texts."""
    table = pa.Table.from_pylist(list(rows), schema=pa.schema([*TRAJECTORIES, *_PLACES])).drop_columns(["row0"])
    for name in ("uid", "base_uid"):
        texts = pa.array([None if value is None else value.hex() for value in table[name].to_pylist()], pa.string())
        table = table.set_column(table.schema.get_field_index(name), name, texts)
    return table


@dataclass
class _SchemaFiles:
    """The files of one schema, a row group at a time."""

    to: Path
    schema: Schema
    _groups: int = 0
    _files: int = 0
    _bytes: int = 0
    _writer: pq.ParquetWriter | None = None
    _pending: list[tuple[str, Trajectory]] = field(default_factory=list)
    _pending_rows: int = 0

    def add(self, uid: str, trajectory: Trajectory) -> dict[str, Any]:
        """Add a trajectory, and return where it will be."""
        if self._pending and (self._pending_rows + trajectory.length + 1) * self.schema.step_bytes > GROUP_BYTES:
            self._write_group()
        place = {
            "file": self._name(),
            "row_group": self._groups,
            "first_row": self._pending_rows,
            "rows": trajectory.length + 1,
        }
        self._pending.append((uid, trajectory))
        self._pending_rows += trajectory.length + 1
        return place

    def close(self) -> None:
        if self._pending:
            self._write_group()
        if self._writer is not None:
            self._writer.close()

    def _name(self) -> str:
        return f"steps-{self.schema.id[:8]}-{self._files:05d}.parquet"

    def _write_group(self) -> None:
        rows = [trajectory.length + 1 for _, trajectory in self._pending]
        uids = pa.DictionaryArray.from_arrays(
            pa.array(np.repeat(np.arange(len(rows), dtype=np.int32), rows)),
            pa.array([uid for uid, _ in self._pending], pa.string()),
        )
        time = np.concatenate([t.info.first_step + np.arange(t.length + 1, dtype=np.int64) for _, t in self._pending])
        arrays = [uids.dictionary_decode(), pa.array(time), *(self._join(column) for column in self.schema.columns)]
        spaces = {SPACES: json.dumps(self.schema.spaces.to_json()).encode()}
        fields = [pa.field("uid", pa.string()), pa.field("t", pa.int64())]
        for column in self.schema.columns:
            about = {"shape": json.dumps(list(column.shape)), "dtype": column.dtype, "role": column.role}
            fields.append(arrow_schema([column]).field(0).with_metadata(about))
        table = pa.table(arrays, schema=pa.schema(fields, metadata=spaces))
        if self._writer is None:
            self._writer = pq.ParquetWriter(self.to / self._name(), table.schema, **PACKING)
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._bytes += self._pending_rows * self.schema.step_bytes
        self._groups += 1
        self._pending, self._pending_rows = [], 0
        if self._bytes >= FILE_BYTES:
            self._writer.close()
            self._writer, self._bytes, self._groups, self._files = None, 0, 0, self._files + 1

    def _join(self, column: Column) -> pa.Array:
        return to_arrow(
            column,
            column.as_stored(np.concatenate([trajectory.columns[column.name] for _, trajectory in self._pending])),
        )
