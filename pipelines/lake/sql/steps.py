"""The table `steps`: one row a step over all live trajectories, read while a query asks for it.

Besides the step columns: `uid`, `t` (time in the episode; two pieces of it both have the row where they meet), `env`,
`task`, `policy_version`. A column of more than one value a step is an array of its shape; where schemas differ in it, a
list of its values. Wide columns (images) exist for a query that names one. Batches share the memory of the mapped files
where possible.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.errors import InputMissing, IntegrityError
from pipelines.events import Listener, Notice, silent
from pipelines.lake.arrow import to_arrow
from pipelines.lake.schema import Column
from pipelines.lake.segment import OpenSegments

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

_labels = pa.dictionary(pa.int32(), pa.string())
DERIVED = {"uid": _labels, "t": pa.int64(), "env": _labels, "task": _labels, "policy_version": pa.int64()}
BATCH_BYTES, BATCH_ROWS = 4 << 20, 1 << 16
_LONGEST_ARRAY = 100_000  # of SQL's arrays; beyond it a list
OPEN_FILES = 16

Trajectories = Callable[[], Iterator[pa.RecordBatch]]
"""Batches of trajectories, those of a segment one after the other, with the columns `segment`, `schema`, `row0`,
`length`, `first_step`, `base_segment` and `base_row0` (null but for overlays), and those of `DERIVED` that are
wanted."""


class StepTable:
    """The columns of a lake's steps, and how to read them."""

    def __init__(self, lake: Lake, listener: Listener = silent) -> None:
        self.lake, self.listener = lake, listener
        self._definitions: dict[str, list[Column]] = {}
        for schema in lake.schemas().values():
            for column in schema.columns:
                self._definitions.setdefault(column.name, []).append(column)
        self._types = {name: sql_type(columns) for name, columns in self._definitions.items()}

    def schema(self, *, wide: bool) -> pa.Schema:
        """Return names and types; `wide`: with the columns of 1 KiB a step or more."""
        names = [n for n, columns in self._definitions.items() if wide or not all(c.is_blob for c in columns)]
        return pa.schema([*DERIVED.items(), *((n, self._types[n]) for n in names if n not in DERIVED)])

    def stream(self, trajectories: Trajectories, wanted: set[str], *, wide: bool) -> StepStream:
        """Return the table for repeated scans; columns that are not `wanted` hold zeros."""
        return StepStream(self, trajectories, self.schema(wide=wide), wanted)

    def batches(self, trajectories: Trajectories, schema: pa.Schema, wanted: set[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows in batches of a few MB. A segment that cannot be read is reported and left out."""
        files = OpenSegments(self.lake, limit=OPEN_FILES)
        step_bytes = sum(max(c.step_bytes for c in self._definitions.get(n, ())) for n in wanted & set(self._types))
        most = max(1, min(BATCH_ROWS, BATCH_BYTES // max(step_bytes, 1)))
        blank = _Blank(schema, wanted, most)
        for found in trajectories():
            table = {name: found.column(i) for i, name in enumerate(found.schema.names)}
            ends = pc.run_end_encode(table["segment"]).run_ends.to_pylist()
            for first, last in zip([0, *ends[:-1]], ends, strict=True):
                part = {name: column.slice(first, last - first) for name, column in table.items()}
                try:
                    for piece in _Piece.split(part, most):
                        yield self._batch(files, piece, schema, wanted, blank)
                except (IntegrityError, InputMissing, FileNotFoundError) as error:
                    self.listener(Notice(text=f"{error}; it is left out", level="warning"))

    def _batch(
        self, files: OpenSegments, piece: _Piece, schema: pa.Schema, wanted: set[str], blank: _Blank
    ) -> pa.RecordBatch:
        columns = {c.name: c for c in self.lake.schema(piece.schema).columns}
        arrays = []
        for field in schema:
            if field.name not in wanted:
                arrays.append(blank.array(field.name, piece.count))
            elif field.name in DERIVED:
                arrays.append(piece.derived(field.name))
            elif field.name not in columns:
                arrays.append(pa.nulls(piece.count, field.type))
            else:
                column = columns[field.name]
                arrays.append(to_sql_array(column, piece.values(files, column), field.type))
        return pa.record_batch(arrays, schema=schema)


class StepStream:
    """An Arrow stream for DuckDB; every scan starts from the beginning."""

    def __init__(self, steps: StepTable, trajectories: Trajectories, schema: pa.Schema, wanted: set[str]) -> None:
        self._parts = (trajectories, schema, wanted)
        self._steps, self._schema = steps, schema

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        reader = pa.RecordBatchReader.from_batches(self._schema, self._steps.batches(*self._parts))
        return reader.__arrow_c_stream__(requested_schema)


class _Piece:
    """Rows [start, stop) of consecutive trajectories of one segment."""

    def __init__(self, table: dict[str, pa.Array], start: int, stop: int) -> None:
        self._table = table
        self.segment, self.schema = table["segment"][0].as_py(), table["schema"][0].as_py()
        rows = table["length"].to_numpy() + 1
        ends = np.cumsum(rows)
        begins = np.maximum(ends - rows, start)
        self._skipped = begins - (ends - rows)  # steps of each trajectory before the piece
        self._rows = np.minimum(ends, stop) - begins
        self.count = stop - start

    def derived(self, name: str) -> pa.Array:
        if name == "t":
            ends, first = np.cumsum(self._rows), self._table["first_step"].to_numpy()
            return pa.array(np.arange(self.count) - np.repeat(ends - self._rows - self._skipped - first, self._rows))
        if name == "policy_version":
            return self._table[name].take(pa.array(self._place()))
        labels = pc.dictionary_encode(self._table[name])
        return pa.DictionaryArray.from_arrays(labels.indices.take(pa.array(self._place())), labels.dictionary)

    def spans(self, of_base: bool) -> list[tuple[str, int, int]]:
        """Return the segment, first row and end of each contiguous range of rows in a file."""
        prefix = "base_" if of_base else ""
        first = (self._table[f"{prefix}row0"].to_numpy() + self._skipped).tolist()
        segments = self._table[f"{prefix}segment"].to_pylist()
        spans: list[tuple[str, int, int]] = []
        for segment, row, count in zip(segments, first, self._rows.tolist(), strict=True):
            if spans and spans[-1][0] == segment and spans[-1][2] == row:
                spans[-1] = (segment, spans[-1][1], row + count)
            else:
                spans.append((segment, row, row + count))
        return spans

    def values(self, files: OpenSegments, column: Column) -> np.ndarray:
        """Return a column (rows, *shape), a view of the file if the rows are contiguous in it."""
        is_own = column.name in files.open(self.segment, self.schema).footer.columns
        parts = []
        for segment, start, stop in self.spans(of_base=not is_own):
            file = files.open(segment, self.schema)
            plain = file.columns.get(column.name)
            parts.append(file.read_rows(column.name, start, stop) if plain is None else plain[start:stop])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _place(self) -> np.ndarray:
        return np.repeat(np.arange(len(self._rows)), self._rows)

    @classmethod
    def split(cls, table: dict[str, pa.Array], most: int) -> Iterator[_Piece]:
        """Split trajectories of a segment into pieces of up to `most` rows, cut between trajectories where possible."""
        ends = np.cumsum(table["length"].to_numpy() + 1)
        first, done = 0, 0
        while first < len(ends):
            last = max(first + 1, int(np.searchsorted(ends, done + most, side="right")))
            part = {name: column.slice(first, last - first) for name, column in table.items()}
            rows = int(ends[last - 1]) - done
            for start in range(0, rows, most):
                yield cls(part, start, min(rows, start + most))
            first, done = last, int(ends[last - 1])


class _Blank:
    """Zeros for columns that are not read; untouched, they cost no memory."""

    def __init__(self, schema: pa.Schema, wanted: set[str], most: int) -> None:
        size, self._arrays = 8 * (most + 1), {}
        kinds = {field.name: field.type for field in schema if field.name not in wanted}
        for kind in kinds.values():
            size = max(size, 8 * (most + 1) * self._flat_size(kind))
        self._zeros = pa.py_buffer(mmap.mmap(-1, size))
        self._arrays = {name: self._make(kind, most) for name, kind in kinds.items()}

    def array(self, name: str, count: int) -> pa.Array:
        return self._arrays[name].slice(0, count)

    def _make(self, kind: pa.DataType, count: int) -> pa.Array:
        if pa.types.is_dictionary(kind):
            return pa.DictionaryArray.from_arrays(self._make(kind.index_type, count), pa.array([""]))
        if pa.types.is_fixed_size_list(kind):
            return pa.FixedSizeListArray.from_arrays(self._make(kind.value_type, count * kind.list_size), type=kind)
        if pa.types.is_list(kind):
            offsets = pa.Array.from_buffers(pa.int32(), count + 1, [None, self._zeros])
            return pa.ListArray.from_arrays(offsets, self._make(kind.value_type, 0), type=kind)
        return pa.Array.from_buffers(kind, count, [None, self._zeros])

    @classmethod
    def _flat_size(cls, kind: pa.DataType) -> int:
        return kind.list_size * cls._flat_size(kind.value_type) if pa.types.is_fixed_size_list(kind) else 1


def sql_type(columns: Sequence[Column]) -> pa.DataType:
    """Return the type in `steps` of a column with these definitions in the schemas of a lake."""
    value = pa.from_numpy_dtype(np.result_type(*(c.stored_dtype for c in columns)))
    shapes = {c.shape for c in columns}
    shape = next(iter(shapes))
    if len(shapes) > 1 or 0 in shape or max(shape, default=0) > _LONGEST_ARRAY:
        return pa.list_(value)
    for size in reversed(shape):
        value = pa.list_(value, size)
    return value


def to_sql_array(column: Column, values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Convert `values` (rows, *shape) to an array of a type given by `sql_type`."""
    array = to_arrow(column, values)
    flat = array if column.shape == () else array.values
    if pa.types.is_list(kind):
        size = math.prod(column.shape)
        offsets = pa.array(np.arange(len(values) + 1, dtype=np.int32) * size)
        return pa.ListArray.from_arrays(offsets, flat.cast(kind.value_type), type=kind)
    sizes, value = [], kind
    while pa.types.is_fixed_size_list(value):
        sizes.append(value.list_size)
        value = value.value_type
    nested = flat.cast(value)
    for size in reversed(sizes):
        nested = pa.FixedSizeListArray.from_arrays(nested, size)
    return nested.cast(kind) if nested.type != kind else nested
