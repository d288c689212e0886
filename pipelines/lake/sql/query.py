"""User SQL: what it may contain, the tables it sees (`steps` among them, read while a query asks for it), expressions
over steps, and errors that point into its text.

A query is one SELECT whose table functions are harmless (others write files, change settings or end the process), in a
connection that can neither write nor reach a file. An expression is exactly one SQL expression, so that it means the
same in any context. Messages show the user's text with a mark under the place.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import mmap
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.errors import InputMissing, IntegrityError, StageFailed, UsageError
from pipelines.events import Listener, Notice, silent
from pipelines.files.json import read_object, read_objects
from pipelines.lake import collectors
from pipelines.lake.arrow import table_of_objects, to_arrow
from pipelines.lake.schema import Column
from pipelines.lake.segment import OpenSegments
from pipelines.lake.sql import sandbox
from pipelines.lake.sql.sandbox import QueryLimits

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

Rows = list[tuple[Any, ...]]

# How every database is opened: without access to other files and the network from the first statement on.
CONFINED: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "allow_unsigned_extensions": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",  # nothing is written to a disk
}
_TABLE_FUNCTIONS = frozenset(
    {"range", "generate_series", "unnest", "repeat", "repeat_row", "json_each", "json_tree", "histogram"}
    | {f"duckdb_{what}" for what in ("columns", "constraints", "functions", "keywords", "tables", "types", "views")}
    | {"duckdb_settings", "duckdb_memory", "pragma_table_info", "pragma_version", "test_all_types"}
)
_LINEAGE = """
create or replace temp view lineage as
select segment, collector, policy_id, policy_version, count(*) as trajectories, sum(length)::bigint as steps, run
from trajectories left join collectors using (collector) group by all
"""
_CHANGES = "a lake is changed by commands, never by SQL"
_EXPLAIN = re.compile(r"\s*explain\b\s*(?:analy[sz]e\b|\([^()]*\))?", re.IGNORECASE)
_UNREADABLE = re.compile(r"Corrupt database|Could not read|^(INTERNAL|FATAL|Serialization) Error")  # the index
_LOST = re.compile(r"StorageError: ([^\n]*)")  # while steps were fetched
_CLOSED = "Invalid Input Error: Attempting to execute an unsuccessful or closed pending query result\nError: "
_EXCERPT = re.compile(r"\s*\n+LINE (\d+): ([^\n]*)\n( *)\^\s*$")
_INTERRUPT_SECONDS = 0.05


class IndexDamaged(IntegrityError):
    """The index does not hold what it should: it is removed, and the query can be repeated."""


def connect(
    path: str = ":memory:", *, config: Mapping[str, Any] = CONFINED, read_only: bool = False
) -> duckdb.DuckDBPyConnection:
    """Open a database that prints nothing: where Python is interactive, DuckDB would draw its progress on stdout.
    UsageError if its path is not in UTF-8."""
    try:
        path = os.fsencode(path).decode()  # whatever the locale made of it
    except UnicodeDecodeError as error:
        raise UsageError(f"DuckDB cannot open '{path}', whose name is not UTF-8", hint="rename it") from error
    connection = duckdb.connect(path, read_only=read_only, config=dict(config))
    with contextlib.suppress(duckdb.Error):  # another thread has locked the settings
        connection.execute("set enable_progress_bar = false")
    return connection


def lock_down(connection: duckdb.DuckDBPyConnection, megabytes: int | None) -> None:
    """Limit the memory of a connection opened with `CONFINED`, and lock its settings."""
    try:
        if megabytes is not None:
            connection.execute(f"set memory_limit = '{megabytes}MB'")
        connection.execute("set lock_configuration = true")
    except duckdb.Error:  # threads share a database: another may have done it
        if not connection.execute("select current_setting('lock_configuration')").fetchall()[0][0]:
            raise


def may_be_replaced(error: Exception) -> bool:
    """Return whether a new index may help: not if another process holds this one, the disk is full, or a newer DuckDB
    wrote it.
    """
    words = ("lock", "no space", "permission", "read-only", "version number")
    return not any(word in str(error).lower() for word in words)


def list_problems(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """List why segments are not in the index."""
    with explain_errors({}):
        rows = connection.execute("select problem from bookkeeping.files where problem <> ''").fetchall()
    return [text for (text,) in rows]


def answer(
    connection: duckdb.DuckDBPyConnection,
    lake: Lake,
    listener: Listener,
    text: str,
    *,
    most: int | None = None,
) -> tuple[list[str], Rows]:
    """Return the column names and rows, `most` of them at most, of one SELECT. Segments that cannot be read are
    reported. UsageError, with the parser's message and the place, for anything else.
    """
    result = _execute(connection, lake, text, listener)
    with explain_errors({1: text}), repeat_interrupted(connection, text):
        rows = result.fetchall() if most is None else result.fetchmany(most)
    return [column[0] for column in result.description or []], rows


def _execute(
    connection: duckdb.DuckDBPyConnection, lake: Lake, text: str, listener: Listener
) -> duckdb.DuckDBPyConnection:
    """Begin one SELECT, or the EXPLAIN of one. UsageError as in `answer`."""
    with explain_errors({1: text}):
        statements = connection.extract_statements(text)
    explains = len(statements) == 1 and statements[0].type == duckdb.StatementType.EXPLAIN
    inner = text[_EXPLAIN.match(text).end() :] if explains and _EXPLAIN.match(text) else text  # type: ignore[union-attr]
    if len(statements) != 1 or statements[0].type not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
        raise UsageError("SQL: one SELECT is expected", hint=_CHANGES)
    with explain_errors({1: text}), repeat_interrupted(connection, text):
        offer(connection, lake, inner, listener)
        return connection.execute(text)


# Types of DuckDB without one of Arrow that means the same to all its readers. BIT, UHUGEINT and TIME WITH TIME ZONE
# would arrive as other values; Parquet has no type for an INTERVAL or a UNION. HUGEINT, the type of a sum of integers,
# becomes BIGINT where it is a column of its own.
_ONLY_OF_DUCKDB = frozenset(
    {"hugeint", "uhugeint", "bignum", "bit", "time with time zone", "interval", "union", "geometry", "variant"}
)
_VECTOR_ROWS = 2048  # DuckDB holds as many at a time: a batch of them needs little more memory, however wide they are


def require_distinct(names: Sequence[str]) -> None:
    """Raise UsageError if two columns of an answer have one name."""
    if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
        raise UsageError(f"SQL: two columns are called '{twice}'", hint="rename one: AS another_name")


def answer_in_batches(
    connection: duckdb.DuckDBPyConnection, lake: Lake, listener: Listener, text: str
) -> Iterator[pa.Schema | pa.RecordBatch]:
    """Yield the schema of the answer to one SELECT, and then its rows. Runs in the helper process.

    The schema follows from the query alone. UsageError as in `answer`, for a type that readers of Arrow do not share,
    for a sum beyond 64 bits, and for two columns of one name.
    """
    result = _execute(connection, lake, text, listener)
    require_distinct([name for name, *_ in result.description or ()])
    sums = []
    for name, kind, *_ in result.description or ():
        sums += [name] if kind.id == "hugeint" else []
        if kind.id != "hugeint" and _find_types(kind) & _ONLY_OF_DUCKDB:
            raise UsageError(
                f"SQL: the column '{name}' has the type {kind}, which readers of Arrow and Parquet do not share",
                hint=f'cast it, e.g. "{name}"::varchar',
            )
    with explain_errors({1: text}), repeat_interrupted(connection, text):
        reader = result.to_arrow_reader(_VECTOR_ROWS)
        schema = pa.schema([pa.field(f.name, pa.int64()) if f.name in sums else f for f in reader.schema])
        yield schema
        for batch in read_batches(reader):
            for place, name in enumerate(schema.names if sums else ()):
                if name in sums:
                    try:
                        batch = batch.set_column(place, schema.field(place), batch.column(place).cast(pa.int64()))
                    except pa.ArrowInvalid as error:
                        raise UsageError(
                            f"SQL: the column '{name}' holds a number beyond 64 bits",
                            hint=f'cast it, e.g. "{name}"::double',
                        ) from error
            yield batch


def _find_types(kind: Any) -> set[str]:
    """Return the ids of a type of DuckDB and of the types that it is made of."""
    parts = kind.children if kind.id in ("list", "array", "struct", "map") else ()
    return {kind.id}.union(*(_find_types(part) for _, part in parts if not isinstance(part, int)))  # an array's size


class ParsedQuery:
    """The parser's tree of one SELECT."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.root: Mapping[str, Any] = tree["node"]
        self.tables: set[str] = set()
        self.functions: list[tuple[str, int]] = []
        """Table functions and where they are, in bytes."""
        self.lists = False
        """Whether it asks for the names of tables."""
        self.columns: set[str] = set()
        self.stars = False
        """Whether it may use other columns than those that it names."""
        waiting: list[Any] = [tree]
        while waiting:
            node = waiting.pop()
            if isinstance(node, list):
                waiting += node
            elif isinstance(node, dict):
                self._look_at(node)
                waiting += node.values()

    def _look_at(self, node: Mapping[str, Any]) -> None:
        kind = node.get("type")
        self.columns.update(name.lower() for key in ("column_names", "using_columns") for name in node.get(key) or ())
        self.stars |= node.get("class") == "STAR" or kind == "PIVOT" or node.get("ref_type") == "NATURAL"
        if kind == "BASE_TABLE":
            self.tables.add(node["table_name"].lower())
            self.lists |= bool(node["schema_name"]) or node["table_name"].lower().startswith(
                ("duckdb_", "pg_", "sqlite_")
            )
        elif kind == "SHOW_REF":
            self.lists |= node.get("query") is None
        elif kind == "TABLE_FUNCTION":
            function = node["function"]
            self.functions.append((function["function_name"].lower(), function["query_location"]))
            self.lists |= function["function_name"].lower().startswith("duckdb_")


def parse_query(
    connection: duckdb.DuckDBPyConnection, text: str, *, before: str = "", after: str = ""
) -> ParsedQuery | None:
    """Parse `before` + `text` + `after`; None if it is not one SELECT. UsageError, about `text`, for invalid or harmful
    SQL.
    """
    start = len(before.encode())
    _require_utf8(text)
    (found,) = connection.execute("select json_serialize_sql(?)", [before + text + after]).fetchall()[0]
    tree = json.loads(found)
    if tree["error"] and tree["error_type"] == "parser" and "selection list" not in tree["error_message"]:
        place = int(tree["position"]) - start if str(tree.get("position", "")).isdigit() else None
        raise UsageError(f"SQL: {tree['error_message']}{_mark(text, place)}")
    if tree["error"] or len(tree["statements"]) != 1:
        return None
    result = ParsedQuery(tree["statements"][0])
    for name, place in result.functions:
        if name not in _TABLE_FUNCTIONS:
            raise UsageError(f"SQL: the table function {name} is disabled here{_mark(text, place - start)}")
    return result


def check_expression(connection: duckdb.DuckDBPyConnection, text: str) -> None:
    """Raise UsageError unless the text is exactly one SQL expression."""
    found = parse_query(connection, text, before="select ", after="\n")
    root: Mapping[str, Any] = found.root if found is not None else {"type": "nothing"}
    listed = root.get("select_list", ())
    clauses = ("modifiers", "where_clause", "group_expressions", "having", "sample", "qualify")
    more = root["type"] != "SELECT_NODE" or any(root[clause] for clause in clauses) or root["cte_map"]["map"]
    if more or root["from_table"]["type"] != "EMPTY" or len(listed) != 1 or listed[0]["alias"]:
        raise UsageError(f"SQL: one expression is expected, without a name or clauses{_mark(text, None)}")
    if listed[0]["class"] == "STAR":
        raise UsageError(f"SQL: one value is expected{_mark(text, 0)}")
    parse_query(connection, text, before="select (\n", after="\n)")


# Expressions and functions whose value in a row follows from the row alone: neither from other rows, nor from the time
# of the query, nor from how rows are batched. Names that are missing here only make a selection slower.
_ROW_CLASSES = frozenset(
    {"COLUMN_REF", "CONSTANT", "COMPARISON", "CONJUNCTION", "BETWEEN", "CASE", "CAST", "FUNCTION", "OPERATOR"}
)
_ROW_OPERATORS = frozenset(
    {"OPERATOR_NOT", "OPERATOR_IS_NULL", "OPERATOR_IS_NOT_NULL", "OPERATOR_COALESCE", "COMPARE_IN", "COMPARE_NOT_IN"}
    | {"ARRAY_EXTRACT", "ARRAY_SLICE"}
)
_ROW_FUNCTIONS = frozenset(
    {"+", "-", "*", "/", "//", "%", "**", "^", "&", "|", "<<", ">>", "||", "~~", "!~~", "~~*", "!~~*", "~~~"}
    | {"abs", "ceil", "ceiling", "floor", "round", "trunc", "sign", "sqrt", "cbrt", "exp", "ln", "log", "log2"}
    | {"log10", "pow", "power", "greatest", "least", "isnan", "isinf", "isfinite", "lower", "upper", "length"}
    | {"len", "strlen", "substr", "substring", "left", "right", "trim", "ltrim", "rtrim", "replace", "split_part"}
    | {"concat", "contains", "starts_with", "ends_with", "prefix", "suffix", "regexp_matches"}
    | {"regexp_full_match", "regexp_extract", "like_escape", "not_like_escape", "ilike_escape"}
    | {"not_ilike_escape", "list_contains", "array_contains", "list_has", "element_at", "map_extract"}
    | {"map_contains", "cardinality", "hash", "md5"}
)


def find_row_columns(connection: duckdb.DuckDBPyConnection, text: str, columns: Collection[str]) -> set[str] | None:
    """Return which of `columns` an expression over the table `trajectories` reads, if its value in a row follows from
    these columns of that row alone; None otherwise, and where that is not certain."""
    found = parse_query(connection, text, before="select (\n", after="\n)")
    assert found is not None, "the expression has been checked"
    reads: set[str] = set()
    waiting: list[Any] = [found.root["select_list"]]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            waiting += node.values()
            kind = node.get("class")
            if kind == "COLUMN_REF":
                *table, name = (part.lower() for part in node["column_names"])
                if table not in ([], ["trajectories"]) or name not in columns:
                    return None
                reads.add(name)
            elif kind is not None and (
                kind not in _ROW_CLASSES
                or (kind == "OPERATOR" and node["type"] not in _ROW_OPERATORS)
                or (kind == "FUNCTION" and node["function_name"].lower() not in _ROW_FUNCTIONS)
            ):
                return None
    return reads


def _read_run_table(name: str, run: Path | None) -> pa.Table:
    """Read a table of what a run directory records besides its lake; empty without a run.

    `runs`: one row from `run.json`, `name`, `path` and its fields (nested ones as JSON text). `checkpoints`: a row for
    every `checkpoints/NAME/checkpoint.json`, `name`, `update`, `time` and its other fields. `metrics`: a row for every
    line of `metrics.jsonl`, a column for every metric, without a torn last line.
    """
    if run is None:
        return table_of_objects([], {})
    if name == "runs":
        data = read_object(run / "run.json")
        rows = [] if data is None else [{"name": run.resolve().name, "path": str(run), **data}]
        return table_of_objects(rows, {"name": pa.string(), "path": pa.string()})
    if name == "metrics":
        return table_of_objects(list(read_objects(run / "metrics.jsonl")), {"update": pa.int64()})
    rows = []
    for path in sorted((run / "checkpoints").glob("*/checkpoint.json")):
        data = read_object(path)
        if data is not None and not path.parent.is_symlink():
            rows.append({"name": path.parent.name, **data})
    return table_of_objects(rows, {"name": pa.string(), "update": pa.int64(), "time": pa.float64()})


def offer(connection: duckdb.DuckDBPyConnection, lake: Lake, query: str, listener: Listener = silent) -> None:
    """Register the tables that the query uses and that are not in the index. UsageError if it is not harmless."""
    found = parse_query(connection, query)
    if found is None:
        raise UsageError("SQL: one SELECT is expected", hint=_CHANGES)
    for name in ("runs", "checkpoints", "metrics"):
        if name in found.tables or found.lists:
            connection.register(name, _read_run_table(name, lake.run))
    if found.lists or found.tables & {"collectors", "lineage"}:
        connection.register("collectors", collectors.table(lake))
        connection.execute(_LINEAGE)
    if "steps" in found.tables or found.lists:
        _offer_steps(connection, lake, query, listener)


_LITERAL = r"(?:'(?:[^']|'')*'|-?\d+)"
_TERM = rf"(?:uid|env|task|policy_version)(?:=|<>|!=|>=|<=|>|<){_LITERAL}"
_IN = rf"(?:uid|env|task|policy_version) IN \({_LITERAL}(?:, {_LITERAL})*\)"
_COMPARISON = re.compile(rf"{_TERM}(?: AND {_TERM})*|{_TERM}(?: OR {_TERM})*|{_IN}")


def _offer_steps(connection: duckdb.DuckDBPyConnection, lake: Lake, query: str, listener: Listener) -> None:
    """Register `steps` such that only what the query's plan needs is read from the segments."""
    steps = StepTable(lake, listener)
    wide, scans = False, None
    try:
        scans = _read_scans(connection, steps.schema(wide=False), query)
    except duckdb.BinderException:  # it may name a wide column; otherwise it fails again
        wide = True
        with contextlib.suppress(duckdb.Error):
            scans = _read_scans(connection, steps.schema(wide=True), query)
    wanted = {name for columns, _ in scans or () for name in columns}
    columns = ["segment", "schema", "row0", "length", "first_step"]
    columns += [name for name in DERIVED if name in wanted and name != "t"]
    conditions = " and ".join(["true", *(scans[0][1] if scans and len(scans) == 1 else ())])
    originals = f"""
        select {", ".join(columns)}, segment as base_segment, row0 as base_row0
        from trajectories where base_uid is null and {conditions}
    """
    overlays = f"""
        select {", ".join(f"t.{name}" for name in columns)}, b.segment as base_segment,
               b.row0 + t.base_offset as base_row0
        from (select * from trajectories where base_uid is not null and {conditions}) t
        join trajectories b on b.uid = t.base_uid
        order by t.segment, t.row0
    """

    def trajectories() -> Iterator[pa.RecordBatch]:
        cursor = connection.cursor()
        for text in (originals, overlays):
            yield from cursor.execute(text).to_arrow_reader(10_000)

    connection.register("steps", steps.stream(trajectories, wanted, wide=wide))


def _read_scans(
    connection: duckdb.DuckDBPyConnection, schema: pa.Schema, query: str
) -> list[tuple[set[str], list[str]]]:
    """Return, for each scan of an Arrow table in the plan of a query if `steps` has this schema, its columns, and
    conditions that hold for all rows that matter.

    Only conditions that DuckDB wrote as comparisons of a column of the table `trajectories` with constants are used.
    """
    connection.register("steps", schema.empty_table())
    try:
        rows = connection.execute(f"explain (format json) {query}").fetchall()
    finally:
        connection.unregister("steps")
    found, waiting = [], [json.loads(rows[-1][1])]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
            continue
        waiting += node["children"]
        if node["name"].strip() == "ARROW_SCAN":
            listed = (node["extra_info"].get(name) or [] for name in ("Filters", "Projections"))
            filters, columns = ([texts] if isinstance(texts, str) else texts for texts in listed)
            columns = {*columns, *(name for name in schema.names for text in filters if name.lower() in text.lower())}
            plain = (text.removeprefix("optional: ") for text in filters)
            found.append((columns, [f"({text})" for text in plain if _COMPARISON.fullmatch(text)]))
    return found


@contextlib.contextmanager
def enforce_limits(connection: duckdb.DuckDBPyConnection, limits: QueryLimits) -> Iterator[None]:
    """Stop what runs inside at its limits, with a UsageError that says which."""
    is_over, is_done = threading.Event(), threading.Event()

    def interrupt() -> None:
        if is_done.wait(limits.seconds):
            return
        is_over.set()
        while not is_done.is_set():
            # DuckDB forgets an interrupt when the next statement begins. Therefore one is not enough.
            connection.interrupt()
            is_done.wait(_INTERRUPT_SECONDS)

    timer = threading.Thread(target=interrupt, daemon=True)
    timer.start()
    try:
        yield
    except duckdb.InterruptException as error:
        if not is_over.is_set():
            raise StageFailed("SQL: DuckDB stopped the query, and does not say why", hint="repeat it") from error
        raise limits.out_of_time() from error
    except (duckdb.OutOfMemoryException, MemoryError) as error:
        raise limits.out_of_memory() from error
    except RuntimeError as error:
        if "allocate" in str(error):  # how the bindings report that a Python object did not fit
            raise limits.out_of_memory() from error
        raise
    finally:
        # The connection may be closed next, and DuckDB does not bear an interrupt of one that is being closed.
        is_done.set()
        timer.join()


@contextlib.contextmanager
def repeat_interrupted(connection: duckdb.DuckDBPyConnection, query: str) -> Iterator[None]:
    """Find the error of a query whose result is fetched inside, where DuckDB says only that it was interrupted.

    When one thread of a query fails, DuckDB interrupts the others, and now and then reports that in place of the error.
    As columns, an answer ends with the error itself. This costs the time of the query again, only after such a report.
    """
    try:
        yield
    except duckdb.Error as error:
        if "INTERRUPT Error" not in str(error):
            raise
        for _ in read_batches(connection.execute(query).to_arrow_reader(_VECTOR_ROWS)):
            pass
        raise


def read_batches(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a result with DuckDB's own errors, which Arrow replaces by others."""
    try:
        yield from reader
    except (OSError, pa.ArrowException) as error:
        text = str(error)
        if "Out of Memory Error" in text:
            raise duckdb.OutOfMemoryException(text) from error
        if "INTERRUPT Error" in text:
            raise duckdb.InterruptException(text) from error
        raise duckdb.Error(text) from error


def _require_utf8(text: str) -> None:
    """Refuse bytes of a command that are not UTF-8, which DuckDB would answer with an error of its binding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"SQL: {text[error.start]!r} is not a character of UTF-8") from error


@contextlib.contextmanager
def explain_errors(texts: Mapping[int, str]) -> Iterator[None]:
    """Turn errors of DuckDB into UsageErrors that point into a user's texts, keyed by their first line in the query."""
    for text in texts.values():
        _require_utf8(text)
    try:
        yield
    except (duckdb.InterruptException, duckdb.OutOfMemoryException):
        raise
    except duckdb.Error as error:
        message = str(error).removeprefix(_CLOSED)  # how an error that follows after some rows is wrapped
        if "INTERRUPT Error" in message:
            raise duckdb.InterruptException(message) from error
        if "module 'pytz'" in message:
            raise UsageError(
                "SQL: a time with a time zone as a Python value needs pytz, which is not installed",
                hint="cast it, e.g. to_timestamp(t_commit)::varchar or ::timestamp, or: pip install pytz",
            ) from error
        lost = _LOST.search(message)
        if lost is not None:
            raise StageFailed(f"cannot read the steps: {lost[1]}") from error
        if _UNREADABLE.search(message):
            raise IndexDamaged(f"the index is damaged: {message}", hint="repeat the command: it is rebuilt") from error
        if (found := _EXCERPT.search(message)) is not None:
            message, line = message[: found.start()], int(found[1])
            for first, text in texts.items():
                if first <= line <= first + text.count("\n"):
                    head = f"LINE {line - first + 1}: "
                    indent = len(found[3]) - len(f"LINE {line}: ") + len(head)
                    message = f"{message}\n\n{head}{found[2]}\n{' ' * indent}^"
                    break
        raise UsageError(f"SQL: {message}") from error


def _mark(text: str, place: int | None) -> str:
    """Quote the line of `text` at a byte offset, with a mark below."""
    raw = text.encode()
    place = len(raw) if place is None else min(max(place, 0), len(raw))
    before = raw[:place].decode(errors="ignore").split("\n")
    head = f"LINE {len(before)}: "
    return f"\n\n{head}{text.split(chr(10))[len(before) - 1]}\n{' ' * (len(head) + len(before[-1]))}^"


_TIME, _TRAJECTORY, _ROW = "t", "trajectory", "row_number_of_all"
NUMBERS = (
    *("UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "UHUGEINT", "TINYINT", "SMALLINT", "INTEGER", "BIGINT"),
    *("HUGEINT", "FLOAT", "DOUBLE", "DECIMAL", "BOOLEAN"),
)
_LIMITS = QueryLimits(seconds=300.0, megabytes=2048)
_KEPT = 8  # expressions


class StepExpression:
    """A user's SQL expression over the columns of steps, evaluated on arrays: a number, or for a `predicate` a boolean,
    in every step.

    It sees one row a step: the step columns as in the table `steps` (a column of more than one value is an array, a
    name with a dot is quoted), `t`, the time in the trajectory, and `trajectory`, a number: windows over a trajectory
    are written `over (partition by trajectory order by t)`. It cannot name tables, reach a file or change a setting.
    The helper process evaluates it, within limits of time and memory.

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
        self.reads: tuple[str, ...] = self._ask(CompiledExpression.list_columns)

    def evaluate(self, columns: Mapping[str, np.ndarray], time: np.ndarray, trajectory: np.ndarray) -> np.ndarray:
        """Return (R,) float64 for the columns `reads` (R, ...); NaN for NULL."""
        values: np.ndarray = self._ask(CompiledExpression.compute, values=columns, time=time, trajectory=trajectory)
        return values

    def _ask(self, task: Callable[..., Any], **arguments: Any) -> Any:
        return sandbox.ask(task, self._what | arguments, self._limits, listener=self._listener)


class CompiledExpression:
    """An expression, and a connection that evaluates it within these limits."""

    def __init__(self, text: str, columns: tuple[Column, ...], predicate: bool, limits: QueryLimits) -> None:
        self._text, self._limits = text, limits
        self._connection = connect(config={**CONFINED, "threads": 1})
        lock_down(self._connection, limits.megabytes // 2)
        self._columns = {column.name: column for column in columns}
        check_expression(self._connection, text)
        self._query = f"select (\n{text}\n)::double as value, {_ROW} from steps"
        found = parse_query(self._connection, f"select (\n{text}\n) from steps")
        if found is None or found.tables != {"steps"} or found.functions or found.lists:
            raise UsageError(f"SQL: '{text.strip()}' asks for tables", hint="it can only use the columns of steps")
        found = parse_query(self._connection, f"select (\n{text}\n)")
        assert found is not None  # it has been checked
        self.reads = tuple(name for name in self._columns if found.stars or name.lower() in found.columns)
        with self._register_steps({name: np.zeros((0, *c.shape), c.stored_dtype) for name, c in self._columns.items()}):
            result = self._connection.execute(f"select (\n{self._text}\n), {_ROW} from steps limit 0")
            assert result.description is not None
            kind = str(result.description[0][1])
        wanted = ("BOOLEAN",) if predicate else NUMBERS
        if not kind.startswith(wanted) or kind.endswith("]"):
            what = "predicate" if predicate else "number"
            raise UsageError(f"SQL: '{self._text.strip()}' is not a {what}: its type is {kind}")

    @staticmethod
    def list_columns(text: str, columns: tuple[Column, ...], predicate: bool, limits: QueryLimits) -> tuple[str, ...]:
        """List the columns that an expression names. Runs in the helper process."""
        return _compile(text, columns, predicate, limits).reads

    @staticmethod
    def compute(
        text: str, columns: tuple[Column, ...], predicate: bool, limits: QueryLimits, values: Mapping[str, np.ndarray],
        time: np.ndarray, trajectory: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """Evaluate an expression. Runs in the helper process."""
        return _compile(text, columns, predicate, limits).evaluate(values, time, trajectory)

    def evaluate(self, columns: Mapping[str, np.ndarray], time: np.ndarray, trajectory: np.ndarray) -> np.ndarray:
        values = np.full(len(time), np.nan)
        with self._register_steps(columns, time, trajectory):
            table = self._connection.execute(self._query).to_arrow_table()
            found = table["value"].combine_chunks()
            values[table[_ROW].to_numpy()] = found.fill_null(np.nan).to_numpy(zero_copy_only=False)
        return values

    @contextlib.contextmanager
    def _register_steps(
        self, columns: Mapping[str, np.ndarray], time: np.ndarray | None = None, trajectory: np.ndarray | None = None
    ) -> Iterator[None]:
        """Register the table `steps` with these columns; errors point into the user's text."""
        rows = 0 if time is None else len(time)
        arrays: dict[str, Any] = {_TIME: time, _TRAJECTORY: trajectory, _ROW: np.arange(rows)}
        table = {name: pa.array(np.zeros(0, np.int64) if v is None else v) for name, v in arrays.items()}
        for name, values in columns.items():
            column = self._columns[name]
            stored = np.ascontiguousarray(values).view(column.stored_dtype)
            table[name] = to_sql_array(column, stored, sql_type([column]))
        self._connection.register("steps", pa.table(table))
        try:
            with enforce_limits(self._connection, self._limits), explain_errors({2: self._text}):
                yield
        finally:
            self._connection.unregister("steps")


_compile = functools.lru_cache(maxsize=_KEPT)(CompiledExpression)


_labels = pa.dictionary(pa.int32(), pa.string())
DERIVED = {"uid": _labels, "t": pa.int64(), "env": _labels, "task": _labels, "policy_version": pa.int64()}
BATCH_BYTES, BATCH_ROWS = 4 << 20, 1 << 16
_LONGEST_ARRAY = 100_000  # of SQL's arrays; beyond it a list
OPEN_FILES = 16

TrajectoryBatches = Callable[[], Iterator[pa.RecordBatch]]
"""Batches of trajectories, those of a segment one after the other, with the columns `segment`, `schema`, `row0`,
`length`, `first_step`, `base_segment` and `base_row0` (null but for overlays), and those of `DERIVED` that are
wanted."""


class StepTable:
    """The table `steps`: one row a step over all live trajectories, read while a query asks for it.

    Besides the step columns: `uid`, `t` (time in the episode; two pieces of it both have the row where they meet),
    `env`, `task`, `policy_version`. A column of more than one value a step is an array of its shape; where schemas
    differ in it, a list of its values. Wide columns (images) exist for a query that names one. Batches share the memory
    of the mapped files where possible.
    """

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

    def stream(self, trajectories: TrajectoryBatches, wanted: set[str], *, wide: bool) -> StepStream:
        """Return the table for repeated scans; columns that are not `wanted` hold zeros."""
        return StepStream(self, trajectories, self.schema(wide=wide), wanted)

    def batches(self, trajectories: TrajectoryBatches, schema: pa.Schema, wanted: set[str]) -> Iterator[pa.RecordBatch]:
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
                arrays.append(piece.derive(field.name))
            elif field.name not in columns:
                arrays.append(pa.nulls(piece.count, field.type))
            else:
                column = columns[field.name]
                arrays.append(to_sql_array(column, piece.values(files, column), field.type))
        return pa.record_batch(arrays, schema=schema)


class StepStream:
    """An Arrow stream for DuckDB; every scan starts from the beginning."""

    def __init__(self, steps: StepTable, trajectories: TrajectoryBatches, schema: pa.Schema, wanted: set[str]) -> None:
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

    def derive(self, name: str) -> pa.Array:
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
