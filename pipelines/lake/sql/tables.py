"""User SQL over tables of plain rows and over logs of JSON lines, e.g. those of many runs.

All of this runs in the helper process, with the limits and the confinement of all user SQL. A log is read by another
connection, whose statement is ours: only the columns that the text names, so that logs of gigabytes can be queried.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence

import duckdb
import pyarrow as pa

from pipelines.errors import UsageError
from pipelines.lake.sql import query as sql
from pipelines.lake.sql.records import table
from pipelines.lake.sql.row_tables import LogTable, RowTable, Tables
from pipelines.lake.sql.sandbox import QueryLimits

_TYPES = {"text": pa.string(), "count": pa.int64(), "number": pa.float64()}
_PLACE = "place of the row"  # a column that no table has
_OWN = ("run", "stage", "update", "filename")  # columns of logs that are always there
_LONGEST_LINE = 1 << 20


def answer(tables: Tables, text: str, limits: QueryLimits) -> tuple[list[str], sql.Rows]:
    """Return the column names and rows of one SELECT."""
    with _opened(limits) as connection, sql.within(connection, limits):
        with sql.in_users_words({1: text}):
            found = sql.parsed(connection, text)
        if found is None:
            raise UsageError("SQL: one SELECT is expected")
        for name, each in tables.items():
            if name in found.tables or found.lists:
                connection.register(name, _arrow(each, found, limits))
        with sql.in_users_words({1: text}):
            result = connection.execute(text)
            return [column[0] for column in result.description or []], result.fetchall()


def matching(tables: Tables, text: str, limits: QueryLimits) -> list[int]:
    """Return the places of the rows of the only table for which an expression holds."""
    ((name, rows),) = tables.items()
    assert isinstance(rows, RowTable)
    numbered = RowTable(columns=rows.columns, rows=[{**row, _PLACE: place} for place, row in enumerate(rows.rows)])
    with _opened(limits) as connection, sql.within(connection, limits):
        sql.check_expression(connection, text)
        connection.register(name, _arrow(numbered, None, limits))
        with sql.in_users_words({2: text}):
            found = connection.execute(f'select "{_PLACE}", (\n{text}\n) from {name}')
            assert found.description is not None
            if str(found.description[1][1]) != "BOOLEAN":
                kind = found.description[1][1]
                raise UsageError(
                    f"SQL: '{text.strip()}' is not a predicate: its type is {kind}",
                    hint="compare it with something, e.g. score > 0.5",
                )
            return [int(place) for place, holds in found.fetchall() if holds]


@contextlib.contextmanager
def _opened(limits: QueryLimits) -> Iterator[duckdb.DuckDBPyConnection]:
    with contextlib.closing(duckdb.connect(":memory:", config={**sql.CONFINED, "threads": 2})) as connection:
        sql.lock_down(connection, limits.megabytes // 2)
        yield connection


def _arrow(given: RowTable | LogTable, found: sql.ParsedQuery | None, limits: QueryLimits) -> pa.Table:
    if isinstance(given, RowTable):
        return table(given.rows, {name: _TYPES[kind] for name, kind in given.columns.items()})
    known = {name.lower(): name for name in given.columns if name.lower() not in _OWN}
    names = [name for key, name in known.items() if found is None or found.stars or key in found.columns]
    return _lines(given.files, names, limits)


def _lines(files: Sequence[tuple[str, str]], names: Sequence[str], limits: QueryLimits) -> pa.Table:
    """Return the lines of the logs that have an update, with the columns `names`."""
    regular = {path: run for run, path in files if _is_regular(path)}
    wanted = [("stage", "VARCHAR"), *((name, "DOUBLE") for name in ("update", *names))]
    if not regular:
        fields = [("run", pa.string()), ("stage", pa.string()), *((name, pa.float64()) for name, _ in wanted[1:])]
        return pa.schema(fields).empty_table()
    with contextlib.closing(duckdb.connect(":memory:", config={"threads": 2})) as connection:
        connection.execute(f"set memory_limit = '{limits.megabytes // 2}MB'")
        connection.register("runs", pa.table({"path": list(regular), "run": list(regular.values())}))
        columns = ", ".join(f"{_quoted(name)}: '{kind}'" for name, kind in wanted)
        shown = ", ".join(f"read_ndjson.{_identifier(name)}" for name, _ in wanted)
        with sql.within(connection, limits):
            return connection.execute(
                f"select runs.run, {shown} from read_ndjson(?, columns={{{columns}}}, ignore_errors=true,"
                f" filename=true, maximum_object_size={_LONGEST_LINE})"
                ' join runs on filename = runs.path where "update" is not null',
                [list(regular)],
            ).to_arrow_table()


def _is_regular(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
