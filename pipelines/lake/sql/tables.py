"""User SQL over tables without a lake: rows in memory, and logs of JSON lines, e.g. those of many runs.

The text runs in the helper process, with the limits and the confinement of all user SQL. A log is read by another
connection, whose statement is ours: only the columns that the text names, so that logs of gigabytes can be queried.

Importing this module imports neither Arrow nor DuckDB: `amago runs` lists runs in a fraction of the time that takes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.errors import UsageError
from pipelines.events import Listener, silent
from pipelines.lake.sql import sandbox
from pipelines.lake.sql.sandbox import Opened, QueryLimits

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from pipelines.lake.sql.query import ParsedQuery, Rows

_PLACE = "place of the row"  # a column that no table has
_OWN = ("run", "stage", "update", "filename")  # columns of logs that are always there
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RowTable:
    """Rows as JSON objects; `columns` are always there, with the type "text", "count" or "number"."""

    columns: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]

    def to_arrow(self, found: ParsedQuery | None, limits: QueryLimits) -> pa.Table:
        """Convert the rows to a table for a query."""
        import pyarrow as pa

        from pipelines.lake.arrow import table_of_objects

        types = {"text": pa.string(), "count": pa.int64(), "number": pa.float64()}
        return table_of_objects(self.rows, {name: types[kind] for name, kind in self.columns.items()})


@dataclass(frozen=True, kw_only=True)
class LogTable:
    """Lines of `files`, each with the name of its run: columns `run`, `stage`, and the numbers called `columns`."""

    files: Sequence[tuple[str, str]]
    columns: Sequence[str]

    def to_arrow(self, found: ParsedQuery | None, limits: QueryLimits) -> pa.Table:
        """Read the lines that have an update, with the columns that the query may use (None: all)."""
        import pyarrow as pa

        from pipelines.lake.sql import query as sql

        known = {name.lower(): name for name in self.columns if name.lower() not in _OWN}
        names = [
            "update",
            *(name for key, name in known.items() if found is None or found.stars or key in found.columns),
        ]
        regular = {path: run for run, path in self.files if os.path.isfile(path)}
        if not regular:
            fields = [("run", pa.string()), ("stage", pa.string()), *((name, pa.float64()) for name in names)]
            return pa.schema(fields).empty_table()
        with contextlib.closing(sql.connect(config={"threads": 2})) as connection:
            connection.execute(f"set memory_limit = '{limits.megabytes // 2}MB'")
            connection.register("runs", pa.table({"path": list(regular), "run": list(regular.values())}))
            literals = [("stage", "VARCHAR"), *((name.replace("'", "''"), "DOUBLE") for name in names)]
            columns = ", ".join(f"'{name}': '{kind}'" for name, kind in literals)
            identifiers = ["stage", *(name.replace('"', '""') for name in names)]
            shown = ", ".join(f'read_ndjson."{name}"' for name in identifiers)
            with sql.enforce_limits(connection, limits):
                return connection.execute(
                    f"select runs.run, {shown} from read_ndjson(?, columns={{{columns}}}, ignore_errors=true,"
                    f" filename=true, maximum_object_size={_LONGEST_LINE})"
                    ' join runs on filename = runs.path where "update" is not null',
                    [list(regular)],
                ).to_arrow_table()


Tables = Mapping[str, RowTable | LogTable]


def query(
    tables: Tables, text: str, *, limits: QueryLimits | None = None, listener: Listener = silent
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return the column names and rows of one SELECT by a user. UsageError, with the place in the text, for anything
    else."""
    found: tuple[list[str], list[tuple[Any, ...]]] = sandbox.ask(
        answer, {"tables": dict(tables), "text": text}, limits or QueryLimits(), opening=_open, listener=listener
    )
    return found


def select_rows(name: str, table: RowTable, text: str, *, listener: Listener = silent) -> list[int]:
    """Return the places of the rows for which a user's SQL expression holds. UsageError, with the place in the text."""
    found: list[int] = sandbox.ask(
        find_places, {"name": name, "table": table, "text": text}, QueryLimits(), opening=_open, listener=listener
    )
    return found


def answer(
    connection: duckdb.DuckDBPyConnection, limits: QueryLimits, tables: Tables, text: str
) -> tuple[list[str], Rows]:
    """Return the column names and rows of one SELECT. Runs in the helper process."""
    from pipelines.lake.sql import query as sql

    with sql.explain_errors({1: text}):
        found = sql.parse_query(connection, text)
    if found is None:
        raise UsageError("SQL: one SELECT is expected")
    for name, each in tables.items():
        if name in found.tables or found.lists:
            connection.register(name, each.to_arrow(found, limits))
    with sql.explain_errors({1: text}), sql.repeat_interrupted(connection, text):
        result = connection.execute(text)
        return [column[0] for column in result.description or []], result.fetchall()


def find_places(
    connection: duckdb.DuckDBPyConnection, limits: QueryLimits, name: str, table: RowTable, text: str
) -> list[int]:
    """Return the places of the rows for which an expression holds. Runs in the helper process."""
    from pipelines.lake.sql import query as sql

    numbered = RowTable(columns=table.columns, rows=[{**row, _PLACE: place} for place, row in enumerate(table.rows)])
    sql.check_expression(connection, text)
    connection.register(name, numbered.to_arrow(None, limits))
    query = f'select "{_PLACE}", (\n{text}\n) from {name}'
    with sql.explain_errors({2: text}), sql.repeat_interrupted(connection, query):
        found = connection.execute(query)
        assert found.description is not None
        if str(found.description[1][1]) != "BOOLEAN":
            kind = found.description[1][1]
            raise UsageError(
                f"SQL: '{text.strip()}' is not a predicate: its type is {kind}",
                hint="compare it with something, e.g. score > 0.5",
            )
        return [int(place) for place, holds in found.fetchall() if holds]


@contextlib.contextmanager
def _open(limits: QueryLimits, listener: Listener) -> Iterator[Opened]:
    from pipelines.lake.sql import query as sql

    with contextlib.closing(sql.connect(config={**sql.CONFINED, "threads": 2})) as connection:
        sql.lock_down(connection, limits.megabytes // 2)
        with sql.enforce_limits(connection, limits):
            yield Opened((connection, limits))
