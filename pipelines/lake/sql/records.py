"""Tables of what a run directory records besides its lake: the run, its checkpoints, its metrics."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipelines.files.json import read_object, read_objects


def runs(run: Path) -> pa.Table:
    """Return one row from `run.json`: `name`, `path` and its fields (nested ones as JSON text); none without a run."""
    data = read_object(run / "run.json")
    rows = [] if data is None else [{"name": run.resolve().name, "path": str(run), **data}]
    return table(rows, {"name": pa.string(), "path": pa.string()})


def checkpoints(run: Path) -> pa.Table:
    """Return a row for every `checkpoints/NAME/checkpoint.json`: `name`, `update`, `time` and its other fields."""
    rows = []
    for path in sorted((run / "checkpoints").glob("*/checkpoint.json")):
        data = read_object(path)
        if data is not None and not path.parent.is_symlink():
            rows.append({"name": path.parent.name, **data})
    return table(rows, {"name": pa.string(), "update": pa.int64(), "time": pa.float64()})


def metrics(run: Path) -> pa.Table:
    """Return a row for every line of `metrics.jsonl`, a column for every metric, without a torn last line."""
    return table(list(read_objects(run / "metrics.jsonl")), {"update": pa.int64()})


TABLES: Mapping[str, Callable[[Path], pa.Table]] = {
    "runs": runs,
    "checkpoints": checkpoints,
    "metrics": metrics,
}


def table(rows: Sequence[Mapping[str, Any]], required: Mapping[str, pa.DataType]) -> pa.Table:
    """Return rows of JSON objects as a table: the `required` columns and any others, types as wide as needed."""
    names = dict.fromkeys([*required, *(name for row in rows for name in row)])
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        columns[name] = _column(values, required.get(name))
    return pa.table(columns)


def _column(values: Sequence[Any], wanted: pa.DataType | None) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    natural = _natural(kinds)
    if wanted is not None and (not kinds or natural == wanted or {natural, wanted} <= _NUMBERS):
        with contextlib.suppress(pa.ArrowException, OverflowError):
            return pa.array(values, type=wanted)
    with contextlib.suppress(pa.ArrowException, OverflowError):  # a number of more than 64 bits
        if natural == pa.float64():
            return pa.array([None if v is None else float(v) for v in values], natural)
        if natural != pa.string():
            return pa.array(values, natural)
    texts = (v if v is None or isinstance(v, str) else json.dumps(v) for v in values)
    return pa.array([None if v is None else v.encode(errors="backslashreplace") for v in texts], pa.string())


_NUMBERS = {pa.int64(), pa.float64()}


def _natural(kinds: Iterable[type]) -> pa.DataType:
    kinds = set(kinds)
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int}:
        return pa.int64()
    if kinds and kinds <= {int, float, bool}:
        return pa.float64()
    return pa.string()
