"""A user's SQL expression over the columns of steps, evaluated on arrays.

It sees one row a step: the step columns as in the table `steps` (a column of more than one value is an array, a name
with a dot is quoted), `t`, the time in the trajectory, and `trajectory`, a number: windows over a trajectory are
written `over (partition by trajectory order by t)`. It cannot name tables, reach a file or change a setting. Like all
user SQL, it is evaluated by the helper process (`pipelines.lake.sql.sandbox`), within limits of time and memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from pipelines.errors import UsageError
from pipelines.events import Listener, silent
from pipelines.lake.arrow import storage_dtype
from pipelines.lake.schema import Column
from pipelines.lake.sql import query as sql
from pipelines.lake.sql import sandbox
from pipelines.lake.sql.sandbox import QueryLimits
from pipelines.lake.sql.steps import sql_type, to_sql_array

_TIME, _TRAJECTORY, _ROW = "t", "trajectory", "row_number_of_all"
_NUMBERS = (
    *("UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "UHUGEINT", "TINYINT", "SMALLINT", "INTEGER", "BIGINT"),
    *("HUGEINT", "FLOAT", "DOUBLE", "DECIMAL", "BOOLEAN"),
)
_LIMITS = QueryLimits(seconds=300.0, megabytes=2048)
_KEPT = 8  # expressions


class StepExpression:
    """An SQL expression that is a number, or for a `predicate` a boolean, in every step of these columns.

    `reads`: the columns it names. UsageError, with the place in the text, for anything else. The listener receives
    Waiting during evaluation.
    """

    def __init__(
        self,
        text: str,
        columns: Sequence[Column],
        *,
        predicate: bool = False,
        limits: QueryLimits = _LIMITS,
        listener: Listener = silent,
    ) -> None:
        self._what = {"text": text, "columns": tuple(columns), "predicate": predicate, "limits": limits}
        self._limits, self._listener = limits, listener
        self.reads: tuple[str, ...] = self._ask(check)

    def evaluate(self, columns: Mapping[str, np.ndarray], time: np.ndarray, trajectory: np.ndarray) -> np.ndarray:
        """Return (R,) float64 for the columns `reads` (R, ...); NaN for NULL."""
        values: np.ndarray = self._ask(evaluate, values=columns, time=time, trajectory=trajectory)
        return values

    def _ask(self, task: Callable[..., Any], **arguments: Any) -> Any:
        return sandbox.ask(task, self._what | arguments, self._limits, listener=self._listener)


def check(text: str, columns: tuple[Column, ...], predicate: bool, limits: QueryLimits) -> tuple[str, ...]:
    """List the columns that an expression names. Runs in the helper process."""
    return _compiled(text, columns, predicate, limits).reads


def evaluate(
    text: str,
    columns: tuple[Column, ...],
    predicate: bool,
    limits: QueryLimits,
    values: Mapping[str, np.ndarray],
    time: np.ndarray,
    trajectory: np.ndarray,
) -> np.ndarray:
    """Evaluate an expression. Runs in the helper process."""
    return _compiled(text, columns, predicate, limits).evaluate(values, time, trajectory)


class _Compiled:
    """An expression, and a connection that evaluates it within these limits."""

    def __init__(self, text: str, columns: tuple[Column, ...], predicate: bool, limits: QueryLimits) -> None:
        self._text, self._limits = text, limits
        self._connection = duckdb.connect(":memory:", config={**sql.CONFINED, "threads": 1})
        sql.lock_down(self._connection, limits.megabytes // 2)
        self._columns = {column.name: column for column in columns}
        sql.check_expression(self._connection, text)
        self._query = f"select (\n{text}\n)::double as value, {_ROW} from steps"
        found = sql.parse_query(self._connection, f"select (\n{text}\n) from steps")
        if found is None or found.tables != {"steps"} or found.functions or found.lists:
            raise UsageError(f"SQL: '{text.strip()}' asks for tables", hint="it can only use the columns of steps")
        self.reads = self._named()
        self._require_kind(predicate)

    def _named(self) -> tuple[str, ...]:
        """List the columns in the text; all of them if it has a star."""
        found = sql.parse_query(self._connection, f"select (\n{self._text}\n)")
        assert found is not None  # it has been checked
        return tuple(name for name in self._columns if found.stars or name.lower() in found.columns)

    def _require_kind(self, predicate: bool) -> None:
        with self._given({name: np.zeros((0, *c.shape), storage_dtype(c)) for name, c in self._columns.items()}):
            result = self._connection.execute(f"select (\n{self._text}\n), {_ROW} from steps limit 0")
            assert result.description is not None
            kind = str(result.description[0][1])
        wanted = ("BOOLEAN",) if predicate else _NUMBERS
        if not kind.startswith(wanted) or kind.endswith("]"):
            what = "predicate" if predicate else "number"
            raise UsageError(f"SQL: '{self._text.strip()}' is not a {what}: its type is {kind}")

    def evaluate(self, columns: Mapping[str, np.ndarray], time: np.ndarray, trajectory: np.ndarray) -> np.ndarray:
        values = np.full(len(time), np.nan)
        with self._given(columns, time, trajectory):
            table = self._connection.execute(self._query).to_arrow_table()
            found = table["value"].combine_chunks()
            values[table[_ROW].to_numpy()] = found.fill_null(np.nan).to_numpy(zero_copy_only=False)
        return values

    @contextlib.contextmanager
    def _given(
        self,
        columns: Mapping[str, np.ndarray],
        time: np.ndarray | None = None,
        trajectory: np.ndarray | None = None,
    ) -> Iterator[None]:
        """Register the table `steps` with these columns; errors point into the user's text."""
        rows = 0 if time is None else len(time)
        arrays: dict[str, Any] = {_TIME: time, _TRAJECTORY: trajectory, _ROW: np.arange(rows)}
        table = {name: pa.array(np.zeros(0, np.int64) if v is None else v) for name, v in arrays.items()}
        for name, values in columns.items():
            column = self._columns[name]
            stored = np.ascontiguousarray(values).view(storage_dtype(column))
            table[name] = to_sql_array(column, stored, sql_type([column]))
        self._connection.register("steps", pa.table(table))
        try:
            with sql.within(self._connection, self._limits), sql.in_users_words({2: self._text}):
                yield
        finally:
            self._connection.unregister("steps")


_compiled = functools.lru_cache(maxsize=_KEPT)(_Compiled)
