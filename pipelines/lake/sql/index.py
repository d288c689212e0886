"""The database file of the index: its tables, and how it is opened.

A lake may come from someone else, and its index with it: a view in it is SQL that every query would run. Therefore the
file is opened confined (no other file, no network, no extension), and used only if its catalog is exactly the one that
we write; otherwise it is removed unread and rebuilt.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb

from pipelines.errors import AmagoError
from pipelines.lake.sql import query as sql

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

_INDEX_VERSION = 1
_WRITING = {name: value for name, value in sql.CONFINED.items() if name != "temp_directory"}  # sorting may spill
# Episodes that are whole trajectories are listed as they are, so that a lake without pieces needs no grouping.
_EPISODES = """
select uid as episode, [uid] as uids, 1::bigint as chunks, true as complete, {same}, {last}, length, "return",
       attempts, epsilon, t_start, t_end, t_commit
from {source} where episode = uid
union all
select episode, list(uid order by chunk) as uids, count(*) as chunks,
       min(chunk) = 0 and count(*) = max(chunk) + 1 and bool_or(not continues) as complete,
       {first_of_same}, {last_of_last}, sum(length)::bigint as length, sum("return" order by chunk) as "return",
       flatten(list(attempts order by chunk) filter (attempts is not null)) as attempts,
       sum(epsilon * length) / sum(length) as epsilon, min(t_start) as t_start, max(t_end) as t_end,
       max(t_commit) as t_commit
from {source} where episode <> uid group by episode
"""
_SAME = ("schema", "env", "task", "source", "policy_id", "collector", "seed", "goal_text", "base_uid", "relabel_method")
_LAST = ("policy_version", "success", "terminated", "truncated", "tags")


def episodes_of(source: str) -> str:
    """Return the query for the episodes of some rows of the table `trajectories`: their pieces joined, returns summed.

    `complete`: all pieces are there, and the last one ended the episode. What pieces have in common is taken from the
    first one, the policy's version and how the episode ended from the last one.
    """
    return _EPISODES.format(
        source=source,
        same=", ".join(_SAME),
        last=", ".join(_LAST),
        first_of_same=", ".join(f"arg_min({name}, chunk) as {name}" for name in _SAME),
        last_of_last=", ".join(f"arg_max({name}, chunk) as {name}" for name in _LAST),
    )


TABLES = f"""
create schema bookkeeping;
create table bookkeeping.about (version integer, lake varchar);
create table bookkeeping.folders (folder varchar, stamp bigint, digest varchar);
create table bookkeeping.files (segment varchar, state varchar, problem varchar);
create table bookkeeping.rows (
    uid varchar, segment varchar, row0 bigint, length bigint, schema varchar, env varchar, task varchar,
    source varchar, policy_id varchar, policy_version bigint, collector varchar, seed bigint, "return" double,
    success boolean, attempts boolean[], terminated boolean, truncated boolean, epsilon double,
    goal_text varchar, t_start double, t_end double, episode varchar, chunk bigint, first_step bigint,
    continues boolean, t_commit double, base_uid varchar, base_segment varchar, base_offset bigint,
    relabel_method varchar, crc uinteger, tags map(varchar, varchar), live boolean);
create table segments (
    segment varchar, kind varchar, schema varchar, writer varchar, t_commit double, trajectories bigint,
    expired bigint, rows bigint, bytes bigint, columns varchar[], replaces varchar[]);
create view trajectories as
    select * exclude (live) replace (coalesce(nullif(episode, ''), uid) as episode) from bookkeeping.rows where live;
create view episodes as {episodes_of("trajectories")};
create view overlays as
    select t.uid, t.base_uid, t.base_offset, t.relabel_method, t.length, t."return", s.columns, t.segment
    from trajectories t join segments s using (segment) where s.kind = 'overlay';
"""
# Everything that a database can define, by functions of the system schema: a file may shadow their names.
_OBJECTS = """
select 'table', schema_name, table_name, sql from system.main.duckdb_tables() where not internal and not temporary
union all
select 'view', schema_name, view_name, sql from system.main.duckdb_views() where not internal and not temporary
union all
select 'function', schema_name, function_name, '' from system.main.duckdb_functions() where not internal
union all
select 'type', schema_name, type_name, '' from system.main.duckdb_types() where not internal
union all
select 'sequence', schema_name, sequence_name, '' from system.main.duckdb_sequences()
union all
select 'index', schema_name, index_name, '' from system.main.duckdb_indexes()
"""
_Objects = frozenset[tuple[str, str, str, str]]
_Identity = tuple[tuple[int, ...], ...]
_checked: set[_Identity] = set()  # verified files, in their state at that time


class ForeignIndex(AmagoError):
    """The index was not written by us: it is removed unread and rebuilt."""


class NewerIndex(AmagoError):
    """The index is of a later version: it is not touched."""


def create(connection: duckdb.DuckDBPyConnection, lake: Lake) -> None:
    """Create the tables of an empty database."""
    connection.begin()
    connection.execute(TABLES)
    connection.execute("insert into bookkeeping.about values (?, ?)", [_INDEX_VERSION, lake.id])
    connection.commit()


def connect(index: Path, lake: Lake, megabytes: int | None = None) -> duckdb.DuckDBPyConnection:
    """Open a locked-down, read-only connection. ForeignIndex for an index that differs from ours."""
    _require_file(index)
    connection = duckdb.connect(str(index), read_only=True, config=sql.CONFINED)
    try:
        sql.lock_down(connection, megabytes)
        _require_ours(connection, index, lake)
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def writing(index: Path, lake: Lake) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a writing connection, to a new index if there is none. ForeignIndex as in `connect`."""
    _require_file(index)
    is_new = not index.exists()
    with contextlib.closing(duckdb.connect(str(index), config=_WRITING)) as connection:
        if is_new:
            create(connection, lake)
        else:
            _require_ours(connection, index, lake)
        yield connection
    _checked.add(_identity(index))


def _require_file(index: Path) -> None:
    """Raise ForeignIndex for a link, through which we would write elsewhere, and for anything but a file."""
    for path in (index, index.with_name(f"{index.name}.wal")):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise ForeignIndex(f"'{path}' is not a plain file")


def _require_ours(connection: duckdb.DuckDBPyConnection, index: Path, lake: Lake) -> None:
    if _identity(index) in _checked:
        return
    found, wanted = _objects(connection), _expected()
    about = {entry for entry in wanted if entry[2] == "about"}
    if about <= found and not any(kind == "function" for kind, *_ in found):
        versions = connection.execute("select version, lake from bookkeeping.about").fetchall()
        if any(version > _INDEX_VERSION for version, _ in versions):
            text = f"the index of lake '{lake.name}' is of a newer version: a temporary one is built in memory"
            raise NewerIndex(text, hint="upgrade amago, or rebuild it with: amago lake reindex")
        if found == wanted and versions == [(_INDEX_VERSION, lake.id)]:
            _checked.add(_identity(index))
            return
    raise ForeignIndex(f"'{index}' is not an index of lake '{lake.name}'")


def _identity(index: Path) -> _Identity:
    """Return a value that changes when the file or its log changes."""
    found: list[tuple[int, ...]] = []
    for path in (index, index.with_name(f"{index.name}.wal")):
        with contextlib.suppress(FileNotFoundError):
            stat = os.stat(path)
            found.append((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return tuple(found)


def _objects(connection: duckdb.DuckDBPyConnection) -> _Objects:
    return frozenset(connection.execute(_OBJECTS).fetchall())


@functools.cache
def _expected() -> _Objects:
    with contextlib.closing(duckdb.connect(":memory:", config=sql.CONFINED)) as connection:
        connection.execute(TABLES)
        return _objects(connection)
