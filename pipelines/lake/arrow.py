"""Step columns as Arrow arrays and back, without copying; and tables of JSON objects.

A column of shape () is a primitive array; any other shape is a FixedSizeList of its flat size. Nothing is
nullable.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.files.malformed import MALFORMED, open_regular
from pipelines.lake.schema import Column

# What reading a damaged Arrow file can raise.
UNREADABLE = (pa.ArrowException, OSError, *MALFORMED)


def _arrow_type(column: Column) -> pa.DataType:
    value = pa.from_numpy_dtype(column.stored_dtype)
    if column.shape == ():
        return value
    return pa.list_(pa.field("item", value, nullable=False), math.prod(column.shape))


def arrow_schema(columns: Sequence[Column]) -> pa.Schema:
    return pa.schema([pa.field(c.name, _arrow_type(c), nullable=False) for c in columns])


def to_arrow(column: Column, values: np.ndarray) -> pa.Array:
    """Wrap `values` (rows, *shape), C-contiguous, as an array that shares their memory."""
    rows, buffer = len(values), pa.py_buffer(values.reshape(-1).view(np.uint8))
    kind = _arrow_type(column)
    if column.shape == ():
        return pa.Array.from_buffers(kind, rows, [None, buffer])
    child = pa.Array.from_buffers(kind.value_type, values.size, [None, buffer])
    return pa.Array.from_buffers(kind, rows, [None], children=[child])


def to_numpy(column: Column, array: pa.Array) -> np.ndarray:
    """View an array without nulls as (rows, *shape), read-only."""
    flat = array if column.shape == () else array.values
    rows, size = len(array), math.prod(column.shape)
    dtype = column.stored_dtype
    values = np.frombuffer(flat.buffers()[1], dtype, rows * size, flat.offset * dtype.itemsize)
    return values.view(column.dtype).reshape(rows, *column.shape)


def map_file(path: Path, *, scattered: bool) -> mmap.mmap:
    """Map a file for reading. `scattered`: short ranges anywhere will be read, so the kernel should not read ahead."""
    with open_regular(path) as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if scattered:
        memory.madvise(mmap.MADV_RANDOM)
    return memory


def table_of_objects(rows: Sequence[Mapping[str, Any]], required: Mapping[str, pa.DataType]) -> pa.Table:
    """Return rows of JSON objects as a table: the `required` columns and any others, types as wide as needed."""
    names = dict.fromkeys([*required, *(name for row in rows for name in row)])
    return pa.table({name: _build_column([row.get(name) for row in rows], required.get(name)) for name in names})


def _build_column(values: Sequence[Any], wanted: pa.DataType | None) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    natural = pa.string()
    if kinds and kinds <= {int, float, bool}:
        natural = pa.bool_() if kinds == {bool} else pa.int64() if kinds == {int} else pa.float64()
    numbers = {pa.int64(), pa.float64()}
    if wanted is not None and (not kinds or natural == wanted or {natural, wanted} <= numbers):
        with contextlib.suppress(pa.ArrowException, OverflowError):
            return pa.array(values, type=wanted)
    with contextlib.suppress(pa.ArrowException, OverflowError):  # a number of more than 64 bits
        if natural == pa.float64():
            return pa.array([None if v is None else float(v) for v in values], natural)
        if natural != pa.string():
            return pa.array(values, natural)
    texts = (v if v is None or isinstance(v, str) else json.dumps(v) for v in values)
    return pa.array([None if v is None else v.encode(errors="backslashreplace") for v in texts], pa.string())
