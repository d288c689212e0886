"""The SQL index of a lake: a DuckDB database derived from the footers of the segments.

`index.duckdb` can be deleted at any time and is rebuilt by the next query, as it is when it is damaged or of another
version. DuckDB allows one writing process or many readers, hence a flock: exclusive while writing, shared while
reading. Where the index cannot be written, it is built in memory.

A lake may come from someone else, and its index with it: a view in it is SQL that every query would run. Therefore the
file is opened confined (no other file, no network, no extension), and used only if its catalog is exactly the one that
we write; otherwise it is removed unread and rebuilt.

Tables: `trajectories`, `episodes`, `segments`, `overlays`; `steps` (see `pipelines.lake.sql.steps`); `runs`,
`checkpoints`, `metrics` if the lake is in a run directory. User SQL runs in another process
(`pipelines.lake.sql.sandbox`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.errors import AmagoError
from pipelines.events import Listener, Notice, silent
from pipelines.files.atomic import storage_error
from pipelines.files.locks import hold_lock
from pipelines.lake.folders import LOG, ROOT, folders, is_rewritten, list_segments, read_stamp
from pipelines.lake.footer import TRAJECTORIES, Footer, prefetch_footers, read_footer, uid_array
from pipelines.lake.live import choose_live
from pipelines.lake.log import LakeLog
from pipelines.lake.segment import stored_bytes
from pipelines.lake.sql import query as sql
from pipelines.lake.sql import sandbox
from pipelines.lake.sql.sandbox import Opened, QueryLimits
from pipelines.lake.storage import LocalStorage, Storage, require_lake
from pipelines.lake.uids import UidSet

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

_T = TypeVar("_T")
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
_SAME = (
    "schema", "env", "task", "source", "policy_id", "collector", "seed", "goal_text", "base_uid", "relabel_method",
    "history", "history_index",
)  # fmt: skip
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
    continues boolean, history varchar, history_index bigint,
    t_commit double, base_uid varchar, base_segment varchar, base_offset bigint,
    relabel_method varchar, crc uinteger, tags map(varchar, varchar), live boolean);
create table segments (
    segment varchar, kind varchar, schema varchar, writer varchar, t_commit double, trajectories bigint,
    expired bigint, rows bigint, bytes bigint, columns varchar[], replaces varchar[]);
create view trajectories as
    select * exclude (live) replace (coalesce(nullif(episode, ''), uid) as episode) from bookkeeping.rows where live;
create view episodes as {episodes_of("trajectories")};
create view histories as
    select history, any_value(task) as task, count(*) as episodes, arg_min("return", history_index) as first_return,
           arg_max("return", history_index) as last_return
    from episodes
    where history is not null and base_uid is null and complete
          and coalesce(map_extract(tags, 'unfinished')[1], '') <> 'true'
    group by history;
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
    found, wanted = _objects(connection), _list_expected_objects()
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
    """Compute a value that changes when the file or its log changes."""
    found: list[tuple[int, ...]] = []
    for path in (index, index.with_name(f"{index.name}.wal")):
        with contextlib.suppress(FileNotFoundError):
            stat = os.stat(path)
            found.append((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return tuple(found)


def _objects(connection: duckdb.DuckDBPyConnection) -> _Objects:
    return frozenset(connection.execute(_OBJECTS).fetchall())


@functools.cache
def _list_expected_objects() -> _Objects:
    with contextlib.closing(duckdb.connect(":memory:", config=sql.CONFINED)) as connection:
        connection.execute(TABLES)
        return _objects(connection)


_HIDDEN, _UNREADABLE = "hidden", "unreadable"
_BATCH_TRAJECTORIES = 100_000  # added in one transaction
_SUMMARY = """
select (select count(*) from trajectories) as trajectories,
       (select coalesce(sum(length), 0)::bigint from trajectories where base_uid is null) as steps,
       (select count(*) from episodes where complete and base_uid is null) as episodes,
       (select count(*) from trajectories where base_uid is not null) as overlays,
       (select count(*) from segments) as segments,
       (select coalesce(sum(bytes), 0)::bigint from segments) as bytes,
       (select coalesce(list(distinct env order by env), []) from trajectories) as environments
"""
_REMEMBERED = """
select * replace (unhex(uid) as uid, unhex(base_uid) as base_uid) from bookkeeping.rows where segment = ? order by row0
"""
_ADD = """
insert into bookkeeping.rows by name
select * replace (lower(hex(uid)) as uid, lower(hex(base_uid)) as base_uid), true as live from new_rows
"""
_IN_SIGHT = """
select segment, coalesce(s.trajectories, 0)::bigint as trajectories
from bookkeeping.files f left join segments s using (segment)
where f.state <> ?
"""
# The rows whose liveness may have changed.
_TOUCHED = """
select rowid as place, unhex(uid) as uid, base_uid, live from bookkeeping.rows
where uid in (from touched) or base_uid in (from touched)
"""
_BASES = "select distinct uid from bookkeeping.rows where base_uid is null and uid in (from wanted_bases)"


def query(
    lake: Lake,
    text: str,
    *,
    limits: QueryLimits | None = None,
    most: int | None = None,
    wait: bool = True,
    listener: Listener = silent,
) -> tuple[list[str], sql.Rows]:
    """Return the column names and rows, `most` of them at most, of one SELECT. UsageError, with the parser's message
    and the place, for anything else.

    `limits`: the text comes from a user, and runs in the helper process within these limits. Without `wait`, an index
    that other queries are reading is not updated first.
    """

    def answer() -> tuple[list[str], sql.Rows]:
        with reading(lake, listener, wait=wait) as connection:
            return sql.answer(connection, lake, text, most=most, listener=listener)

    if limits is None:
        return _retry_rebuilt(answer)
    found: tuple[list[str], sql.Rows] = ask(lake, sql.answer, {"text": text, "most": most}, limits, listener)
    return found


def ask(
    lake: Lake, task: Callable[..., Any], arguments: Mapping[str, Any], limits: QueryLimits, listener: Listener = silent
) -> Any:
    """Call `task` in the helper process with a connection to the updated index of `lake`, the lake, and `arguments`."""
    opening = functools.partial(_open_in_helper, type(lake), lake.name)
    return _retry_rebuilt(lambda: sandbox.ask(task, arguments, limits, opening=opening, listener=listener))


@contextlib.contextmanager
def _open_in_helper(kind: type[Lake], name: str, limits: QueryLimits, listener: Listener) -> Iterator[Opened]:
    lake = kind(name)
    with reading(lake, listener, megabytes=limits.megabytes // 2) as connection, sql.within(connection, limits):
        yield Opened((connection, lake), writes=not isinstance(lake.storage, LocalStorage))


def _retry_rebuilt(answer: Callable[[], _T]) -> _T:
    """Return what `answer` does, called a second time if the first removed a damaged index."""
    try:
        return answer()
    except sql.IndexDamaged:
        return answer()


def recall_uids(lake: Lake, segment: str) -> list[str]:
    """Return the uids that the index, without being updated, has for a segment; none if it cannot be read."""
    found = _recall(lake, "select uid from bookkeeping.rows where segment = ?", [segment])
    return [] if found is None else found["uid"].to_pylist()


def recall_segments(lake: Lake) -> dict[str, int]:
    """Return the visible segments and their numbers of trajectories as of the index, without updating it; none if it
    cannot be read.
    """
    found = _recall(lake, _IN_SIGHT, [_HIDDEN])
    return {} if found is None else {row["segment"]: row["trajectories"] for row in found.to_pylist()}


def _recall(lake: Lake, text: str, arguments: list[Any]) -> pa.Table | None:
    """Ask the index without updating it; None if it cannot be read."""
    try:
        with hold_lock(_lock(lake), shared=True), contextlib.closing(connect(_index(lake), lake)) as connection:
            return connection.execute(text, arguments).to_arrow_table()
    except (OSError, duckdb.Error, AmagoError, pa.ArrowException):
        return None


def read_index_time(lake: Lake) -> float:
    """Look up when the index was written; 0 if there is none."""
    with contextlib.suppress(OSError):
        return os.stat(_index(lake)).st_mtime
    return 0.0


def recall_footer(lake: Lake, segment: str) -> tuple[dict[str, Any], pa.Table] | None:
    """Return a segment's row of the table `segments` and its live trajectories by `TRAJECTORIES`, both as of the index
    without updating it; None if it does not have them.
    """
    facts, rows = _recall(lake, "from segments where segment = ?", [segment]), _recall(lake, _REMEMBERED, [segment])
    if facts is None or rows is None or not facts.num_rows or not rows.num_rows:
        return None
    return facts.to_pylist()[0], rows.select(TRAJECTORIES.names).cast(TRAJECTORIES)


def refresh(lake: Lake, *, listener: Listener = silent) -> None:
    """Update the index, as every query does."""
    with reading(lake, listener):
        pass


def rebuild(lake: Lake, *, listener: Listener = silent) -> None:
    """Delete the index and build it from the segments."""
    _discard(lake)
    refresh(lake, listener=listener)


def summary(lake: Lake, *, listener: Listener = silent) -> dict[str, Any]:
    """Return `trajectories`, `steps`, `episodes` (complete ones, without relabelled copies), `overlays`, `segments`,
    `bytes`, and the names of `environments`."""
    names, rows = query(lake, _SUMMARY, listener=listener)
    return dict(zip(names, rows[0], strict=True))


@contextlib.contextmanager
def reading(
    lake: Lake, listener: Listener = silent, *, megabytes: int | None = None, wait: bool = True
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a locked-down connection to an updated index; queries may use `megabytes`. Segments that are left out are
    reported. IndexDamaged, after removing the index, if it is unreadable. `wait` as in `query`.
    """
    if isinstance(lake.storage, LocalStorage):
        # Locks and the index would be made again in a directory that was removed.
        require_lake(lake.storage)
    try:
        with contextlib.ExitStack() as stack:
            connection = _open(lake, stack, megabytes, listener, wait)
            for problem in sql.problems(connection):
                listener(Notice(text=f"{problem}; it is left out of the index", level="warning"))
            yield connection
    except sql.IndexDamaged:
        with contextlib.suppress(OSError):
            _discard(lake)
        raise


def _open(
    lake: Lake, stack: contextlib.ExitStack, megabytes: int | None, listener: Listener, wait: bool
) -> duckdb.DuckDBPyConnection:
    try:
        with contextlib.ExitStack() as opened:
            connection: duckdb.DuckDBPyConnection | None = _open_current(lake, opened, megabytes)
            if connection is None:
                opened.close()
                _bring_up_to_date(lake, wait=wait)
                opened.enter_context(hold_lock(_lock(lake), shared=True))
                connection = opened.enter_context(contextlib.closing(connect(_index(lake), lake, megabytes)))
            stack.enter_context(opened.pop_all())
            return connection
    except (
        OSError,
        duckdb.Error,
        NewerIndex,
        ForeignIndex,
    ) as error:  # a full or read-only disk, for example
        if isinstance(error, NewerIndex):
            listener(Notice(text=str(error), level="warning"))
        return stack.enter_context(contextlib.closing(_in_memory(lake, megabytes)))


def _open_current(lake: Lake, opened: contextlib.ExitStack, megabytes: int | None) -> Any:
    """Return a connection to the index under its shared lock, both left in `opened`; None if it is outdated."""
    opened.enter_context(hold_lock(_lock(lake), shared=True))
    if not os.path.lexists(_index(lake)):
        return None
    try:
        connection = opened.enter_context(contextlib.closing(connect(_index(lake), lake, megabytes)))
        known = _folders(connection)
    except (duckdb.Error, ForeignIndex):
        return None
    return None if has_changes(list_changes(lake.storage, known), known) else connection


def _in_memory(lake: Lake, megabytes: int | None) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(":memory:", config=sql.CONFINED)
    create(connection, lake)
    _update(connection, lake, list_changes(lake.storage, {}))
    (held,) = connection.execute("select sum(memory_usage_bytes) from duckdb_memory()").fetchall()[0]
    sql.lock_down(connection, None if megabytes is None else megabytes + int(held) // 10**6 + 1)
    return connection


def _bring_up_to_date(lake: Lake, *, wait: bool) -> None:
    """Update the index; without `wait`, leave one that others are reading as it is."""
    index = _index(lake)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold_lock(_lock(lake), wait=wait))
        except BlockingIOError:
            if index.exists():
                return
            raise
        for attempt in range(2):
            try:
                with writing(index, lake) as connection:
                    _update(connection, lake, list_changes(lake.storage, _folders(connection)))
                return
            except (duckdb.Error, ForeignIndex) as error:
                if attempt or not sql.may_be_replaced(error):
                    raise
                _remove(lake)


def _folders(connection: duckdb.DuckDBPyConnection) -> dict[str, FolderListing]:
    rows = connection.execute("select folder, stamp, digest from bookkeeping.folders").fetchall()
    return {folder: FolderListing(stamp, digest) for folder, stamp, digest in rows}


def _update(connection: duckdb.DuckDBPyConnection, lake: Lake, changed: dict[str, FolderListing | None]) -> None:
    """Add the content of the `changed` folders. The final state does not depend on the steps that led there."""
    if not changed:
        return
    known = dict(connection.execute("select segment, state from bookkeeping.files").fetchall())
    log = LakeLog(lake.storage, lake.id)
    log.refresh()  # after the listing: it names every rewritten segment
    ids = sorted({*list_ids(lake.storage, changed, known), *(id for id in log.added if not log.hides(id))})
    _ignore_unreadable(lake, log, ids, known)
    # The state of a segment changes when trajectories of it expire.
    states = {
        id: _HIDDEN if log.hides(id) else f"{zlib.crc32(log.dead[id].tobytes()) if id in log.dead else 0:08x}"
        for id in ids
    }
    kept = {
        id
        for id, state in known.items()
        if id in states
        # An unreadable one is read again once its folder has changed.
        and (state == states[id] or (state == _UNREADABLE and f"{ROOT}/{id.partition('/')[0]}" not in changed))
    }
    connection.begin()
    _forget(connection, known.keys() - kept)
    new = [id for id in ids if id not in kept]
    out = [id for id in new if states[id] == _HIDDEN]
    _insert(connection, "bookkeeping.files", [{"segment": id, "state": states[id], "problem": ""} for id in out])
    connection.commit()
    in_sight = [id for id in new if states[id] != _HIDDEN]
    prefetch_footers(lake.storage, in_sight)
    for batch in _batches(lake, in_sight, log, states):
        connection.begin()
        batch.insert(connection)
        connection.commit()
    connection.begin()
    connection.execute("delete from bookkeeping.folders where folder in (select unnest(?))", [list(changed)])
    folders = [{"folder": name, **listed._asdict()} for name, listed in changed.items() if listed is not None]
    _insert(connection, "bookkeeping.folders", folders)
    connection.commit()


def _ignore_unreadable(lake: Lake, log: LakeLog, ids: Iterable[str], known: Mapping[str, str]) -> None:
    """Let the segments count from which an unreadable one was rewritten, as far as they are there."""
    for id in ids:
        if is_rewritten(id) and known.get(id, _UNREADABLE) == _UNREADABLE and not log.hides(id):
            try:
                _ = read_footer(lake.storage, id).trajectories
            except FileNotFoundError:  # rewritten since
                continue
            except AmagoError:  # reported when its rows are read
                log.ignore(id)


def _forget(connection: duckdb.DuckDBPyConnection, gone: Collection[str]) -> None:
    if not gone:
        return
    connection.register("gone", pa.table({"segment": list(gone)}))
    uids = connection.execute(
        "select unhex(uid) as uid from bookkeeping.rows where segment in (from gone)"
    ).to_arrow_table()
    for name in ("bookkeeping.files", "bookkeeping.rows", "segments"):
        connection.execute(f"delete from {name} where segment in (from gone)")
    connection.unregister("gone")
    _settle(connection, uids)


def _insert(connection: duckdb.DuckDBPyConnection, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        connection.register("new_objects", pa.Table.from_pylist(list(rows)))
        connection.execute(f"insert into {table} by name from new_objects")
        connection.unregister("new_objects")


def _settle(connection: duckdb.DuckDBPyConnection, uids: pa.Table) -> None:
    """Decide which rows are live among those that depend on `uids`."""
    connection.register("changed_uids", uids)
    connection.execute(
        "create or replace temp table touched as select distinct lower(hex(uid)) as uid from changed_uids"
    )
    connection.unregister("changed_uids")
    found = connection.execute(_TOUCHED).to_arrow_table()
    if not UidSet().add(_raw(found)).all():  # only then does precedence matter, and sorting costs as much as the rest
        found = connection.execute(f"{_TOUCHED} order by segment, row0").to_arrow_table()
    connection.execute("drop table touched")
    has_base = found["base_uid"].is_null().to_numpy()
    if not has_base.all():
        connection.register("wanted_bases", found.select(["base_uid"]))
        bases = connection.execute(_BASES).to_arrow_table()["uid"].combine_chunks()
        connection.unregister("wanted_bases")
        has_base |= pc.is_in(found["base_uid"], bases).to_numpy()
    wrong = choose_live(_raw(found), has_base, UidSet()) != found["live"].to_numpy()
    if wrong.any():
        connection.register("wrong", pa.table({"place": found["place"].filter(pa.array(wrong))}))
        connection.execute("update bookkeeping.rows set live = not live where rowid in (from wrong)")
        connection.unregister("wrong")


def _raw(rows: pa.Table) -> np.ndarray:
    return uid_array(rows["uid"].cast(pa.binary(16)))


@dataclass
class _Batch:
    """Rows of `files`, `segments` and `rows` for several segments."""

    files: list[dict[str, str]] = field(default_factory=list)
    segments: list[dict[str, Any]] = field(default_factory=list)
    rows: list[pa.Table] = field(default_factory=list)

    def insert(self, connection: duckdb.DuckDBPyConnection) -> None:
        _insert(connection, "bookkeeping.files", self.files)
        _insert(connection, "segments", self.segments)
        if self.rows:
            table = pa.concat_tables(self.rows).combine_chunks()  # DuckDB is slow on small ones
            connection.register("new_rows", table)
            connection.execute(_ADD)
            connection.unregister("new_rows")
            _settle(connection, table.select(["uid"]))


def _batches(lake: Lake, ids: Iterable[str], log: LakeLog, states: Mapping[str, str]) -> Iterator[_Batch]:
    batch, count = _Batch(), 0
    for id in ids:
        file = {"segment": id, "state": states[id], "problem": ""}
        try:
            footer = read_footer(lake.storage, id)
            alive = log.select_unexpired(id, footer.uids())
            batch.segments.append(segment_row(lake, id, footer, alive))
            batch.rows.append(trajectory_rows(id, footer, alive))
            count += len(alive)
        except FileNotFoundError:  # swept since it was listed
            continue
        except AmagoError as error:
            file |= {"state": _UNREADABLE, "problem": str(error)}
        batch.files.append(file)
        if count >= _BATCH_TRAJECTORIES:
            yield batch
            batch, count = _Batch(), 0
    yield batch


def _index(lake: Lake) -> Path:
    return lake.local / "index.duckdb"


def _lock(lake: Lake) -> Path:
    return lake.local / "locks" / "index.lock"


def _discard(lake: Lake) -> None:
    with hold_lock(_lock(lake)):
        _remove(lake)


def _remove(lake: Lake) -> None:
    for name in ("index.duckdb", "index.duckdb.wal"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(lake.local / name)


class FolderListing(NamedTuple):
    """A folder when it was last listed: `stamp` (None if unreliable) and a digest of its names."""

    stamp: int | None
    digest: str


def list_changes(storage: Storage, known: Mapping[str, FolderListing]) -> dict[str, FolderListing | None]:
    """Return the folders that differ from `known`; None for those that are gone. Checks every folder."""
    here = [LOG, *(f"{ROOT}/{name}" for name in folders(storage, ROOT))]
    if len(here) == 1:  # without a folder of segments
        require_lake(storage)
    found: dict[str, FolderListing | None] = dict.fromkeys(known.keys() - set(here))
    due = {}
    try:
        for folder in here:
            stamp, settled = read_stamp(storage, folder)
            if stamp is None or folder not in known or known[folder].stamp != stamp:
                due[folder] = stamp if settled else None
        for (folder, stamp), names in zip(due.items(), storage.listings(list(due)), strict=True):
            text = "\n".join(sorted(names)).encode(errors="surrogateescape")
            listed = FolderListing(stamp, hashlib.blake2b(text, digest_size=16).hexdigest())
            if listed != known.get(folder):
                found[folder] = listed
    except OSError as error:
        raise storage_error(error, f"list '{storage.url()}'") from error
    return found


def has_changes(changed: Mapping[str, FolderListing | None], known: Mapping[str, FolderListing]) -> bool:
    """Return whether files may have appeared or disappeared. A stamp that became reliable does not matter."""
    return any(
        listed is None
        or folder not in known
        or known[folder].stamp is not None
        or known[folder].digest != listed.digest
        for folder, listed in changed.items()
    )


def list_ids(storage: Storage, changed: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the sorted ids of all segments: of the `changed` folders as they are now, of the others as `known`."""
    relisted = {folder.removeprefix(f"{ROOT}/") for folder in changed if folder.startswith(ROOT)}
    ids = [id for id in known if id.partition("/")[0] not in relisted]
    ids += [id for folder in relisted for id in list_segments(storage, folder)]
    return sorted(ids)


def segment_row(lake: Lake, id: str, footer: Footer, alive: np.ndarray) -> dict[str, Any]:
    """Build a segment's row of the table `segments`."""
    header = footer.header
    return {
        "segment": id,
        "kind": header["kind"],
        "schema": header["schema"],
        "writer": header["writer"],
        "t_commit": header["t_commit"],
        "trajectories": len(alive),
        "expired": int(len(alive) - alive.sum()),
        "rows": header["rows"],
        "bytes": stored_bytes(lake.storage, id),
        "columns": list(footer.columns),
        "replaces": list(footer.replaces),
    }


def trajectory_rows(id: str, footer: Footer, alive: np.ndarray) -> pa.Table:
    """Build a segment's rows of the table `trajectories`; uids are 16 bytes each."""
    table = footer.trajectories
    for name, value in (("segment", id), ("schema", footer.header["schema"])):
        table = table.append_column(name, pa.repeat(pa.scalar(value, pa.string()), table.num_rows))
    return table if alive.all() else table.filter(pa.array(alive))
