"""The `steps` table: one row a step over all live segments, with only the columns that are asked for.

Beside the step columns of 1 KiB or less: `uid`, `t` (time in the trajectory), `env`, `task`,
`policy_version`. Step columns share the memory of the mapped files; overlays are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pipelines.errors import IntegrityError
from pipelines.events import Listener, Notice, silent
from pipelines.lake.arrow import arrow_type, to_arrow
from pipelines.lake.follower import Follower, Segment
from pipelines.lake.footer import hex_uids, read_footer
from pipelines.lake.schema import Column
from pipelines.lake.segment import open_segment

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

DERIVED = ("uid", "t", "env", "task", "policy_version")
MAPPED_FILES = 256  # beyond these a column is copied, and the file closed


def steps(lake: Lake, wanted: Callable[[str], bool], *, listener: Listener = silent) -> pa.Table:
    """The table with the columns for which `wanted(name)`, and `t` in any case. What cannot be read is left
    out.
    """
    columns = {c.name: c for schema in lake.schemas().values() for c in schema.columns if not c.is_blob}
    names = [name for name in columns if wanted(name)]
    derived = [name for name in DERIVED if name == "t" or wanted(name)]
    follower = Follower(lake, listener)
    follower.refresh()
    tables = []
    for segment in follower.segments:
        try:
            tables.append(_table(lake, follower, segment, names, derived))
        except (IntegrityError, FileNotFoundError) as error:
            listener(Notice(text=f"{error}; it is left out", level="warning"))
    if not tables:
        fields = [(n, pa.int64() if n in ("t", "policy_version") else pa.string()) for n in derived]
        return pa.schema([*fields, *((n, arrow_type(columns[n])) for n in names)]).empty_table()
    if len({table.schema for table in tables}) > 1:
        tables = _reconciled(tables)
    return pa.concat_tables(tables, promote_options="permissive")


def _table(lake: Lake, follower: Follower, segment: Segment, names: list[str], derived: list[str]) -> pa.Table:
    schema = {c.name: c for c in lake.schema(segment.schema_id).columns}
    rows = segment.length.astype(np.int64) + 1
    arrays: dict[str, Any] = _derived(follower, segment, rows, derived)
    present = [schema[name] for name in names if name in schema]
    if segment.is_overlay:
        arrays |= _overlaid(follower, segment, rows, list(schema.values()), present)
    else:
        arrays |= _stored(follower, segment, rows, list(schema.values()), present)
    return pa.table(arrays)


def _stored(
    follower: Follower, segment: Segment, rows: np.ndarray, schema: list[Column], present: list[Column]
) -> Mapping[str, pa.Array]:
    if not present:
        return {}
    file = open_segment(follower.lake.storage, segment.file, schema)
    whole = int(rows.sum()) == file.rows
    index = None if whole else np.repeat(segment.row0 - _before(rows), rows) + np.arange(rows.sum())
    arrays = {}
    for column in present:
        values = file.columns[column.name]
        if index is not None:
            values = values[index]
        elif segment.number >= MAPPED_FILES:
            values = values.copy()
        arrays[column.name] = to_arrow(column, values)
    return arrays


def _overlaid(
    follower: Follower, segment: Segment, rows: np.ndarray, schema: list[Column], present: list[Column]
) -> Mapping[str, pa.Array]:
    files = {
        number: open_segment(follower.lake.storage, follower.segments[number].file, schema)
        for number in {segment.number, *segment.base.tolist()}
    }
    arrays = {}
    for column in present:
        own = column.name in segment.columns
        first, base = (segment.row0, np.full(len(rows), segment.number)) if own else (segment.base_row0, segment.base)
        parts = [
            files[number].columns[column.name][row : row + count]
            for number, row, count in zip(base.tolist(), first.tolist(), rows.tolist(), strict=True)
        ]
        if parts:
            arrays[column.name] = to_arrow(column, np.concatenate(parts))
    return arrays


def _derived(follower: Follower, segment: Segment, rows: np.ndarray, names: list[str]) -> dict[str, pa.Array]:
    place = np.repeat(np.arange(len(rows), dtype=np.int32), rows)
    arrays: dict[str, Any] = {}
    known: dict[str, dict[str, Any]] = {}
    if {"env", "task", "policy_version"} & set(names):
        table = read_footer(follower.lake.storage, segment.file).trajectories
        table = table.select(["uid", "env", "task", "policy_version"])
        known = {row["uid"].hex(): row for row in table.to_pylist()}
    uids = hex_uids(segment.uids)
    for name in names:
        if name == "t":
            arrays[name] = np.arange(rows.sum()) - np.repeat(_before(rows), rows)
        elif name == "policy_version":
            arrays[name] = np.array([known[uid][name] for uid in uids], dtype=np.int64)[place]
        else:
            texts = uids if name == "uid" else [known[uid][name] for uid in uids]
            arrays[name] = pa.DictionaryArray.from_arrays(place, pa.array(texts, pa.string()))
    return arrays


def _before(rows: np.ndarray) -> np.ndarray:
    """Rows of the trajectories before each."""
    return np.cumsum(rows) - rows


def _reconciled(tables: list[pa.Table]) -> list[pa.Table]:
    """Columns whose shape differs between schemas as lists of one type, so that the tables go together."""
    kinds: dict[str, set[pa.DataType]] = {}
    for table in tables:
        for field in table.schema:
            kinds.setdefault(field.name, set()).add(field.type)
    lists = {
        name: pa.list_(pa.from_numpy_dtype(np.result_type(*(_value_type(t).to_pandas_dtype() for t in types))))
        for name, types in kinds.items()
        if len(types) > 1 and any(pa.types.is_fixed_size_list(t) for t in types)
    }
    return [_with_lists(table, lists) for table in tables]


def _with_lists(table: pa.Table, lists: Mapping[str, pa.DataType]) -> pa.Table:
    for i, field in enumerate(table.schema):
        if field.name not in lists:
            continue
        column = table.column(i).combine_chunks()
        if not pa.types.is_fixed_size_list(field.type):
            column = pa.ListArray.from_arrays(np.arange(len(column) + 1, dtype=np.int32), column)
        table = table.set_column(i, field.name, column.cast(lists[field.name]))
    return table


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_fixed_size_list(kind) else kind
