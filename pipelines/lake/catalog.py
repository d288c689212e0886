"""SQL over a lake: a DuckDB index that only repeats what the segments' footers say.

`index.duckdb` can be deleted at any time and is built again by the next question; so it is when it is damaged
or of another version. DuckDB allows one writing process or many readers, hence our own flock: exclusive
around a writing open .. close, shared around a reading one. Where the index cannot be written it is built in
memory.

Tables: `trajectories`, `segments`, `overlays`; `steps` (see `pipelines.lake.steps`); `runs`, `checkpoints`,
`metrics` when the lake lies in a run directory. A user's SQL runs in a connection that can neither write nor
reach a file.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from pipelines.config.locking import locked
from pipelines.errors import AmagoError, UsageError
from pipelines.events import Listener, Notice, silent
from pipelines.lake import records
from pipelines.lake.follower import live_segments
from pipelines.lake.footer import read_footer
from pipelines.lake.segment import stored_bytes
from pipelines.lake.steps import steps

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

INDEX_VERSION = 1
_LOCKED_DOWN = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
}
_TABLES = """
create table about (version integer, lake varchar);
create table segments (
    segment varchar, kind varchar, schema varchar, writer varchar, t_commit double,
    trajectories bigint, rows bigint, bytes bigint, columns varchar[]);
create table trajectories (
    uid varchar, segment varchar, row0 bigint, length bigint, schema varchar, env varchar, task varchar,
    source varchar, policy_id varchar, policy_version bigint, collector varchar, seed bigint, "return" double,
    success boolean, attempts boolean[], terminated boolean, truncated boolean, epsilon double,
    goal_text varchar, t_start double, t_end double, t_commit double, base_uid varchar, base_segment varchar,
    base_offset bigint, relabel_method varchar, crc uinteger, tags map(varchar, varchar));
create view overlays as
    select t.uid, t.base_uid, t.base_offset, t.relabel_method, t.length, t."return", s.columns, t.segment
    from trajectories t join segments s using (segment) where s.kind = 'overlay';
"""
_ADD = """
insert into trajectories by name
select * replace (lower(hex(uid)) as uid, lower(hex(base_uid)) as base_uid) from new_trajectories
where lower(hex(uid)) not in (select uid from trajectories)
qualify row_number() over (partition by new_trajectories.uid order by segment, row0) = 1
order by segment, row0
"""
Rows = list[tuple[Any, ...]]


def query(lake: Lake, sql: str, *, listener: Listener = silent) -> tuple[list[str], Rows]:
    """Column names and rows of one SELECT. UsageError with the parser's words for anything else."""
    with _reading(lake, listener) as connection:
        _check(connection, sql)
        try:
            _offer(connection, lake, sql, listener)
            result = connection.execute(sql)
            return [column[0] for column in result.description or []], result.fetchall()
        except duckdb.Error as error:
            raise _user_error(error) from error


def select(lake: Lake, where: str, *, listener: Listener = silent) -> list[str]:
    """The uids of the trajectories for which the SQL predicate `where` holds. UsageError as `query`."""
    _, rows = query(lake, f"select uid from trajectories where (\n{where}\n)", listener=listener)
    return [row[0] for row in rows]


def remembered(lake: Lake, segment: str) -> list[str]:
    """The uids that the index, as it stands, has for a segment; none if the index cannot be read."""
    try:
        with (
            locked(lake.local / "locks" / "index.lock", shared=True),
            contextlib.closing(_connect_locked_down(lake.local / "index.duckdb")) as connection,
        ):
            rows = connection.execute("select uid from trajectories where segment = ?", [segment]).fetchall()
            return [row[0] for row in rows]
    except (OSError, duckdb.Error):
        return []


def refresh(lake: Lake, *, listener: Listener = silent) -> None:
    """Bring the index up to date, as every question does."""
    with _reading(lake, listener):
        pass


def rebuild(lake: Lake, *, listener: Listener = silent) -> None:
    """Delete the index and build it again from the segments."""
    with locked(lake.local / "locks" / "index.lock"):
        _remove(lake)
    refresh(lake, listener=listener)


def summary(lake: Lake, *, listener: Listener = silent) -> dict[str, Any]:
    """`trajectories`, `steps`, `overlays`, `segments`, `bytes`, and a row for every env and task under
    `tasks`.
    """
    names, rows = query(
        lake,
        """
        select (select count(*) from trajectories) as trajectories,
               (select coalesce(sum(length), 0)::bigint from trajectories where base_uid is null) as steps,
               (select count(*) from overlays) as overlays,
               (select count(*) from segments) as segments,
               (select coalesce(sum(bytes), 0)::bigint from segments) as bytes
        """,
        listener=listener,
    )
    task_names, tasks = query(
        lake,
        """
        select env, task, count(*) as trajectories, avg(length) as length_mean, avg("return") as return_mean,
               avg(success::int) as success_mean, max(policy_version) as policy_version
        from trajectories group by all order by all
        """,
        listener=listener,
    )
    return {
        **dict(zip(names, rows[0], strict=True)),
        "schemas": len(lake.schemas()),
        "tasks": [dict(zip(task_names, row, strict=True)) for row in tasks],
    }


def _check(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise _user_error(error) from error
    allowed = {duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN}
    if len(statements) != 1 or statements[0].type not in allowed:
        raise UsageError("SQL: one SELECT is expected", hint="a lake is changed by commands, never by SQL")


def _user_error(error: duckdb.Error) -> UsageError:
    return UsageError(f"SQL: {error}")


def _offer(connection: duckdb.DuckDBPyConnection, lake: Lake, sql: str, listener: Listener) -> None:
    """Register the tables that are not in the index and that the text may mean."""
    words = set(re.findall(r"[a-z_0-9.]+", sql.lower()))
    listing = bool(words & {"show", "information_schema.tables", "duckdb_tables", "duckdb_views"})
    for name, load in records.TABLES.items():
        if name in words or listing:
            connection.register(name, load(lake.run) if lake.run else records.table([], {}))
    if "steps" in words or listing:
        text = sql.lower()
        every = "*" in text or "select" not in words  # also "from steps", "describe steps"
        connection.register("steps", steps(lake, lambda name: every or name.lower() in text, listener=listener))


@contextlib.contextmanager
def _reading(lake: Lake, listener: Listener) -> Iterator[duckdb.DuckDBPyConnection]:
    """A locked-down connection to an index that is up to date."""
    with contextlib.ExitStack() as stack:
        yield _open(lake, stack, listener)


def _open(lake: Lake, stack: contextlib.ExitStack, listener: Listener) -> duckdb.DuckDBPyConnection:
    lock, index = lake.local / "locks" / "index.lock", lake.local / "index.duckdb"
    try:
        _bring_up_to_date(lake, lock, index, listener)
        stack.enter_context(locked(lock, shared=True))
        return stack.enter_context(contextlib.closing(_connect_locked_down(index)))
    except (OSError, duckdb.Error):  # a read-only or full disk, or a stranger's process holds the file
        return stack.enter_context(contextlib.closing(_in_memory(lake, listener)))


def _connect_locked_down(index: Path) -> duckdb.DuckDBPyConnection:
    return duckdb.connect(str(index), read_only=True, config={**_LOCKED_DOWN, "lock_configuration": "true"})


def _in_memory(lake: Lake, listener: Listener) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(":memory:")
    _create(connection, lake)
    _update(connection, lake, listener)
    for name, value in {**_LOCKED_DOWN, "lock_configuration": "true"}.items():
        connection.execute(f"set {name} = {value}")
    return connection


def _bring_up_to_date(lake: Lake, lock: Path, index: Path, listener: Listener) -> None:
    live = set(live_segments(lake.storage))
    with locked(lock, shared=True):
        if index.exists() and _known(index, lake) == live:
            return
    with locked(lock):
        for attempt in range(2):
            try:
                with contextlib.closing(duckdb.connect(str(index))) as connection:
                    if not _is_ours(connection, lake):
                        _create(connection, lake)
                    _update(connection, lake, listener)
                return
            except duckdb.Error as error:
                if attempt or not _is_damage(error):
                    raise
                _remove(lake)


def _known(index: Path, lake: Lake) -> set[str] | None:
    try:
        with contextlib.closing(_connect_locked_down(index)) as connection:
            if not _is_ours(connection, lake):
                return None
            return {row[0] for row in connection.execute("select segment from segments").fetchall()}
    except duckdb.Error:
        return None


def _is_ours(connection: duckdb.DuckDBPyConnection, lake: Lake) -> bool:
    try:
        return connection.execute("select * from about").fetchall() == [(INDEX_VERSION, lake.id)]
    except duckdb.CatalogException:
        return False


def _is_damage(error: duckdb.Error) -> bool:
    """Whether a new file may help: not so when another process holds this one, or the disk is full."""
    text = str(error).lower()
    return not any(word in text for word in ("lock", "no space", "permission", "read-only"))


def _create(connection: duckdb.DuckDBPyConnection, lake: Lake) -> None:
    connection.begin()
    connection.execute("drop view if exists overlays")
    for name in ("about", "segments", "trajectories"):
        connection.execute(f"drop table if exists {name}")
    connection.execute(_TABLES)
    connection.execute("insert into about values (?, ?)", [INDEX_VERSION, lake.id])
    connection.commit()


def _update(connection: duckdb.DuckDBPyConnection, lake: Lake, listener: Listener) -> None:
    """Add the footers of new segments, forget segments that are no longer live; one transaction."""
    live = live_segments(lake.storage)
    known = {row[0] for row in connection.execute("select segment from segments").fetchall()}
    new, gone = [id for id in live if id not in known], sorted(known - set(live))
    segments, tables = _read_footers(lake, new, listener)
    connection.begin()
    if gone:
        for name in ("segments", "trajectories"):
            connection.execute(f"delete from {name} where segment in (select unnest(?))", [gone])
    if segments:
        connection.register("new_segments", pa.Table.from_pylist(segments))
        connection.register("new_trajectories", pa.concat_tables(tables))
        connection.execute("insert into segments by name select * from new_segments")
        connection.execute(_ADD)
        connection.unregister("new_segments")
        connection.unregister("new_trajectories")
    connection.commit()


def _read_footers(lake: Lake, ids: Sequence[str], listener: Listener) -> tuple[list[dict[str, Any]], list[pa.Table]]:
    segments, tables = [], []
    for id in ids:
        try:
            footer = read_footer(lake.storage, id)
            table = footer.trajectories
        except FileNotFoundError:
            continue
        except (AmagoError, ValueError) as error:
            listener(Notice(text=f"{error}; it is left out of the index", level="warning"))
            continue
        header, n = footer.header, table.num_rows
        segments.append(
            {
                "segment": id,
                "kind": header["kind"],
                "schema": header["schema"],
                "writer": header["writer"],
                "t_commit": header["t_commit"],
                "trajectories": n,
                "rows": header["rows"],
                "bytes": stored_bytes(lake.storage, id),
                "columns": list(header["columns"]),
            }
        )
        for name, value, kind in (
            ("segment", id, pa.string()),
            ("schema", header["schema"], pa.string()),
        ):
            table = table.append_column(name, pa.array([value] * n, kind))
        tables.append(table)
    return segments, tables


def _remove(lake: Lake) -> None:
    for name in ("index.duckdb", "index.duckdb.wal"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(lake.local / name)
