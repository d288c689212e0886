"""The SQL index of a lake: a DuckDB database derived from the footers of the segments.

`index.duckdb` can be deleted at any time and is rebuilt by the next query, as it is when it is damaged or of another
version. DuckDB allows one writing process or many readers, hence a flock: exclusive while writing, shared while
reading. Where the index cannot be written, it is built in memory.

A lake may come from someone else, and its index with it: a view in it is SQL that every query would run. Therefore the
file is opened confined (no other file, no network, no extension), and used only if its catalog is exactly the one that
we write; otherwise it is removed unread and rebuilt.

Tables: `trajectories`, `episodes`, `segments`, `overlays`; `steps` (see `pipelines.lake.sql.query.StepTable`); `runs`,
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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.errors import AmagoError
from pipelines.events import Event, Listener, Notice, silent
from pipelines.files.atomic import make_storage_error
from pipelines.files.locks import hold_lock
from pipelines.lake.folders import LOG, ROOT, folders, is_rewritten, list_each, read_stamp, segment_ids
from pipelines.lake.footer import TRAJECTORIES, prefetch_footers, read_footer, uid_array
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
_INDEX_VERSION = 2
_WRITING = {name: value for name, value in sql.CONFINED.items() if name != "temp_directory"}  # sorting may spill
_SAME = (
    "schema", "env", "task", "source", "policy_id", "collector", "seed", "goal_text", "base_uid", "relabel_method",
    "history", "history_index",
)  # fmt: skip
_LAST = ("policy_version", "success", "terminated", "truncated", "tags")
# The episodes of the table `trajectories`: their pieces joined, returns summed. `complete`: all pieces are there, and
# the last one ended the episode. What pieces have in common is taken from the first one, the policy's version and how
# the episode ended from the last one. Episodes that are whole trajectories are listed as they are, so that a lake
# without pieces needs no grouping.
_EPISODES = f"""
select uid as episode, [uid] as uids, 1::bigint as chunks, true as complete, {", ".join(_SAME)},
       {", ".join(_LAST)}, length, "return", attempts, epsilon, t_start, t_end, t_commit
from trajectories where episode = uid
union all
select episode, list(uid order by chunk) as uids, count(*) as chunks,
       min(chunk) = 0 and count(*) = max(chunk) + 1 and bool_or(not continues) as complete,
       {", ".join(f"arg_min({name}, chunk) as {name}" for name in _SAME)},
       {", ".join(f"arg_max({name}, chunk) as {name}" for name in _LAST)},
       sum(length)::bigint as length, sum("return" order by chunk) as "return",
       flatten(list(attempts order by chunk) filter (attempts is not null)) as attempts,
       sum(epsilon * length) / sum(length) as epsilon, min(t_start) as t_start, max(t_end) as t_end,
       max(t_commit) as t_commit
from trajectories where episode <> uid group by episode
"""
# A view excludes one column at a time: the order of several in its SQL may change when the file is opened again.
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
    relabel_method varchar, crc uinteger, tags map(varchar, varchar), expired boolean, live boolean);
create table segments (
    segment varchar, kind varchar, schema varchar, writer varchar, t_commit double, trajectories bigint,
    expired bigint, rows bigint, bytes bigint, columns varchar[], replaces varchar[]);
create view trajectories as
    select * exclude (live) replace (coalesce(nullif(episode, ''), uid) as episode)
    from (select * exclude (expired) from bookkeeping.rows where live);
create view episodes as {_EPISODES};
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
_checked: set[tuple[tuple[int, ...], ...]] = set()  # verified files, in their state at that time


class ForeignIndex(AmagoError):
    """The index was not written by us: it is removed unread and rebuilt."""


class NewerIndex(AmagoError):
    """The index is of a later version: it is not touched."""


_HIDDEN, _UNREADABLE = "hidden", "unreadable"
_BATCH_TRAJECTORIES = 100_000  # inserted at once
_SETTLED_SHARE = 8  # an eighth of the rows that are there is added in one transaction
TOTALS = """
select (select count(*) from trajectories) as trajectories,
       (select coalesce(sum(length), 0)::bigint from trajectories where base_uid is null) as steps,
       (select count(*) from episodes where complete and base_uid is null) as episodes,
       (select count(*) from trajectories where base_uid is not null) as overlays,
       (select count(*) from segments) as segments,
       (select coalesce(sum(bytes), 0)::bigint from segments) as bytes,
"""
_SUMMARY = f"""{TOTALS}
       (select coalesce(list(distinct env order by env), []) from trajectories) as environments
"""
_REMEMBERED = """
select * replace (unhex(uid) as uid, unhex(base_uid) as base_uid) from bookkeeping.rows
where segment = ? and not expired order by row0
"""
ADD = """
insert into bookkeeping.rows by name
select * replace (lower(hex(uid)) as uid, lower(hex(base_uid)) as base_uid), not expired as live from new_rows
"""
_IN_SIGHT = """
select segment, coalesce(s.trajectories, 0)::bigint as trajectories
from bookkeeping.files f left join segments s using (segment)
where f.state <> ?
"""
# The rows whose liveness may have changed.
_TOUCHED = """
select rowid as place, unhex(uid) as uid, base_uid, live from bookkeeping.rows
where not expired and (uid in (from touched) or base_uid in (from touched))
"""
_BASES = """
select distinct uid from bookkeeping.rows
where base_uid is null and not expired and uid in (from wanted_bases)
"""
# The rows of some segments that have expired, or no longer have, since they were written.
_WRONG = """
select r.rowid as place, r.uid from bookkeeping.rows r join altered a using (segment)
where r.expired <> exists (from dead d where d.number = a.number and d.uid = r.uid)
"""
_COUNT_EXPIRED = """
update segments s set expired = coalesce(counted.expired, 0) from
    (select segment, count(*) filter (expired) as expired from bookkeeping.rows
     where segment in (select segment from altered) group by segment) as counted
where s.segment = counted.segment
"""


class FolderListing(NamedTuple):
    """A folder when it was last listed: `stamp` (None if unreliable) and a digest of its names."""

    stamp: int | None
    digest: str


class SqlIndex:
    """The index of a lake: the file, its lock, and connections to it."""

    def __init__(self, lake: Lake) -> None:
        self.lake, self.path = lake, lake.local / "index.duckdb"
        self._files = (self.path, lake.local / "index.duckdb.wal")

    def hold(self, *, shared: bool = False, wait: bool = True) -> contextlib.AbstractContextManager[None]:
        """Hold the lock of the index: `shared` to read it, exclusively to write. BlockingIOError without `wait`."""
        return hold_lock(self.lake.local / "locks" / "index.lock", shared=shared, wait=wait)

    def connect(self, megabytes: int | None = None) -> duckdb.DuckDBPyConnection:
        """Open a locked-down, read-only connection. ForeignIndex for an index that differs from ours."""
        self._require_plain_files()
        connection = sql.connect(str(self.path), read_only=True)
        try:
            sql.lock_down(connection, megabytes)
            self._require_ours(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    @contextlib.contextmanager
    def write(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Open a writing connection, to a new index if there is none. ForeignIndex as in `connect`."""
        self._require_plain_files()
        is_new = not self.path.exists()
        with contextlib.closing(sql.connect(str(self.path), config=_WRITING)) as connection:
            if is_new:
                self._create_tables(connection)
            else:
                self._require_ours(connection)
            yield connection
        _checked.add(self._identify())

    def _create_tables(self, connection: duckdb.DuckDBPyConnection) -> None:
        connection.begin()
        connection.execute(TABLES)
        connection.execute("insert into bookkeeping.about values (?, ?)", [_INDEX_VERSION, self.lake.id])
        connection.commit()

    def _require_plain_files(self) -> None:
        """Raise ForeignIndex for a link, through which we would write elsewhere, and for anything but a file."""
        for path in self._files:
            if path.is_symlink() or (path.exists() and not path.is_file()):
                raise ForeignIndex(f"'{path}' is not a plain file")

    def _require_ours(self, connection: duckdb.DuckDBPyConnection) -> None:
        if self._identify() in _checked:
            return
        found, wanted = set(connection.execute(_OBJECTS).fetchall()), list_expected_objects()
        about = {entry for entry in wanted if entry[2] == "about"}
        if about <= found and not any(kind == "function" for kind, *_ in found):
            versions = connection.execute("select version, lake from bookkeeping.about").fetchall()
            if any(version > _INDEX_VERSION for version, _ in versions):
                text = f"the index of lake '{self.lake.name}' is of a newer version: a temporary one is built in memory"
                raise NewerIndex(text, hint="upgrade amago, or rebuild it with: amago lake reindex")
            if found == wanted and versions == [(_INDEX_VERSION, self.lake.id)]:
                _checked.add(self._identify())
                return
        raise ForeignIndex(f"'{self.path}' is not an index of lake '{self.lake.name}'")

    def _identify(self) -> tuple[tuple[int, ...], ...]:
        """Compute a value that changes when the file or its log changes."""
        found: list[tuple[int, ...]] = []
        for path in self._files:
            with contextlib.suppress(FileNotFoundError):
                stat = os.stat(path)
                found.append((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
        return tuple(found)

    def remove(self) -> None:
        """Remove the index, under its lock."""
        for path in self._files:
            path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the index. Nobody reads it meanwhile."""
        with self.hold():
            self.remove()

    def open(
        self, stack: contextlib.ExitStack, *, megabytes: int | None, listener: Listener, wait: bool
    ) -> duckdb.DuckDBPyConnection:
        """Return a connection to the updated index, which `stack` closes: to one in memory if it cannot be written, as
        on a full or read-only disk.
        """
        try:
            with contextlib.ExitStack() as opened:
                connection: duckdb.DuckDBPyConnection | None = self._open_current(opened, megabytes)
                if connection is None:
                    opened.close()
                    self._bring_up_to_date(wait=wait)
                    opened.enter_context(self.hold(shared=True))
                    connection = opened.enter_context(contextlib.closing(self.connect(megabytes)))
                stack.enter_context(opened.pop_all())
                return connection
        except (OSError, duckdb.Error, NewerIndex, ForeignIndex) as error:
            if isinstance(error, NewerIndex):
                listener(Notice(text=str(error), level="warning"))
        connection = stack.enter_context(contextlib.closing(sql.connect()))
        self._create_tables(connection)
        _IndexUpdate(connection, self.lake).apply({})
        (held,) = connection.execute("select sum(memory_usage_bytes) from duckdb_memory()").fetchall()[0]
        sql.lock_down(connection, None if megabytes is None else megabytes + int(held) // 10**6 + 1)
        return connection

    def _open_current(self, opened: contextlib.ExitStack, megabytes: int | None) -> Any:
        """Return a connection to the index under its shared lock, both left in `opened`; None if it is outdated."""
        opened.enter_context(self.hold(shared=True))
        if not os.path.lexists(self.path):
            return None
        try:
            connection = opened.enter_context(contextlib.closing(self.connect(megabytes)))
            known = _read_folders(connection)
        except (duckdb.Error, ForeignIndex):
            return None
        for folder, listed in list_changes(self.lake.storage, known).items():
            before = known.get(folder)
            # A stamp that became reliable does not matter.
            if listed is None or before is None or before.stamp is not None or before.digest != listed.digest:
                return None
        return connection

    def _bring_up_to_date(self, *, wait: bool) -> None:
        """Update the index; without `wait`, leave one that others are reading as it is."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.hold(wait=wait))
            except BlockingIOError:
                if self.path.exists():
                    return
                raise
            for attempt in range(2):
                try:
                    with self.write() as connection:
                        _IndexUpdate(connection, self.lake).apply(_read_folders(connection))
                    return
                except (duckdb.Error, ForeignIndex) as error:
                    if attempt or not sql.may_be_replaced(error):
                        raise
                    self.remove()

    def _recall(self, text: str, arguments: list[Any]) -> pa.Table | None:
        """Ask the index without updating it; None if it cannot be read."""
        try:
            with self.hold(shared=True), contextlib.closing(self.connect()) as connection:
                return connection.execute(text, arguments).to_arrow_table()
        except (OSError, duckdb.Error, AmagoError, pa.ArrowException):
            return None

    def recall_uids(self, segment: str) -> list[str]:
        """Return the uids that the index, without being updated, has for a segment; none if it cannot be read."""
        found = self._recall("select uid from bookkeeping.rows where segment = ? and not expired", [segment])
        return [] if found is None else found["uid"].to_pylist()

    def recall_segments(self) -> dict[str, int]:
        """Return the visible segments and their numbers of trajectories as of the index, without updating it; none if
        it cannot be read.
        """
        found = self._recall(_IN_SIGHT, [_HIDDEN])
        return {} if found is None else {row["segment"]: row["trajectories"] for row in found.to_pylist()}

    def recall_footer(self, segment: str) -> tuple[dict[str, Any], pa.Table] | None:
        """Return a segment's row of the table `segments` and its live trajectories by `TRAJECTORIES`, both as of the
        index without updating it; None if it does not have them.
        """
        facts = self._recall("from segments where segment = ?", [segment])
        rows = self._recall(_REMEMBERED, [segment])
        if facts is None or rows is None or not facts.num_rows or not rows.num_rows:
            return None
        return facts.to_pylist()[0], rows.select(TRAJECTORIES.names).cast(TRAJECTORIES)

    def read_time(self) -> float:
        """Look up when the index was written; 0 if there is none."""
        with contextlib.suppress(OSError):
            return os.stat(self.path).st_mtime
        return 0.0


@functools.cache
def list_expected_objects() -> frozenset[tuple[str, str, str, str]]:
    """List what a database of ours defines: kind, schema, name and SQL."""
    with contextlib.closing(sql.connect()) as connection:
        connection.execute(TABLES)
        return frozenset(connection.execute(_OBJECTS).fetchall())


@functools.cache
def make_empty_index(megabytes: int) -> duckdb.DuckDBPyConnection:
    """Make an index of nothing, in memory, for rows that are in no index of a lake; `megabytes` as in `open_index`."""
    connection = sql.connect(config={**sql.CONFINED, "threads": 1})
    connection.execute(TABLES)
    sql.lock_down(connection, megabytes // 2)
    return connection


def _read_folders(connection: duckdb.DuckDBPyConnection) -> dict[str, FolderListing]:
    rows = connection.execute("select folder, stamp, digest from bookkeeping.folders").fetchall()
    return {folder: FolderListing(stamp, digest) for folder, stamp, digest in rows}


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
        raise make_storage_error(error, f"list '{storage.url()}'") from error
    return found


class _IndexUpdate:
    """An update of the tables of an open index. The final state does not depend on the steps that led there."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, lake: Lake) -> None:
        self._connection, self._lake = connection, lake
        self._log = LakeLog(lake.storage, lake.id)

    def apply(self, listings: Mapping[str, FolderListing]) -> None:
        """Add the content of the folders that have changed since `listings`."""
        lake, log, connection = self._lake, self._log, self._connection
        changed = list_changes(lake.storage, listings)
        if not changed:
            return
        known = dict(connection.execute("select segment, state from bookkeeping.files").fetchall())
        log.refresh()  # after the listing: it names every rewritten segment
        relisted = [folder.removeprefix(f"{ROOT}/") for folder in changed if folder.startswith(ROOT)]
        found = {id for id in known if id.partition("/")[0] not in set(relisted)}
        for folder, names in zip(relisted, list_each(lake.storage, relisted), strict=True):
            found.update(segment_ids(folder, names))
        ids = sorted({*found, *(id for id in log.added if not log.hides(id))})
        self._ignore_unreadable(ids, known)
        # The state of a segment changes when trajectories of it expire.
        states = {id: _HIDDEN if log.hides(id) else f"{zlib.crc32(log.find_dead(id).tobytes()):08x}" for id in ids}
        kept = {
            id
            for id, state in known.items()
            if id in states
            # An unreadable one is read again once its folder has changed.
            and (state == states[id] or (state == _UNREADABLE and f"{ROOT}/{id.partition('/')[0]}" not in changed))
        }
        # Only trajectories in them have expired: their rows are marked, and their footers need not be read again.
        altered = {
            id: states[id]
            for id, state in known.items()
            if id in states and id not in kept and not {state, states[id]} & {_HIDDEN, _UNREADABLE}
        }
        kept |= altered.keys()
        connection.begin()
        self._forget(known.keys() - kept)
        self._mark(altered)
        new = [id for id in ids if id not in kept]
        damaged = log.list_quarantined()
        hidden = [
            {"segment": id, "state": _HIDDEN, "problem": damaged.get(id, "")} for id in new if states[id] == _HIDDEN
        ]
        self._insert("bookkeeping.files", hidden)
        connection.commit()
        self._add([id for id in new if states[id] != _HIDDEN], states)
        connection.begin()
        connection.execute("delete from bookkeeping.folders where folder in (select unnest(?))", [list(changed)])
        listed = [{"folder": name, **listing._asdict()} for name, listing in changed.items() if listing is not None]
        self._insert("bookkeeping.folders", listed)
        connection.commit()

    def _ignore_unreadable(self, ids: Iterable[str], known: Mapping[str, str]) -> None:
        """Let the segments count from which an unreadable one was rewritten, as far as they are there."""
        for id in ids:
            if is_rewritten(id) and known.get(id, _UNREADABLE) == _UNREADABLE and not self._log.hides(id):
                try:
                    _ = read_footer(self._lake.storage, id).trajectories
                except FileNotFoundError:  # rewritten since
                    continue
                except AmagoError:  # reported when its rows are read
                    self._log.ignore(id)

    def _add(self, ids: Sequence[str], states: Mapping[str, str]) -> None:
        """Add the rows of segments, many in a transaction.

        What is live is decided at the end of each, which reads the whole table: hence each adds a share of the rows
        that are there, so that a build takes time in proportion to the lake.
        """
        prefetch_footers(self._lake.storage, ids)
        files: list[dict[str, str]] = []
        segments: list[dict[str, Any]] = []
        rows: list[pa.Table] = []
        added: list[pa.Table] = []
        count = num_added = 0
        ((before,),) = self._connection.execute("select count(*) from bookkeeping.rows").fetchall()
        for number, id in enumerate(ids, 1):
            file = {"segment": id, "state": states[id], "problem": ""}
            try:
                footer = read_footer(self._lake.storage, id)
                header, table = footer.header, footer.trajectories
                alive = self._log.select_unexpired(id, footer.uids())
                facts = {name: header[name] for name in ("kind", "schema", "writer", "t_commit", "rows")}
                facts |= {"segment": id, "trajectories": len(alive), "expired": int(len(alive) - alive.sum())}
                facts |= {"columns": list(footer.columns), "replaces": list(footer.replaces)}
                segments.append(facts | {"bytes": stored_bytes(self._lake.storage, id)})
                for name, value in (("segment", id), ("schema", header["schema"])):
                    table = table.append_column(name, pa.repeat(pa.scalar(value, pa.string()), table.num_rows))
                rows.append(table.append_column("expired", pa.array(~alive)))
                count += len(alive)
                files.append(file)
            except FileNotFoundError:  # swept since it was listed
                pass
            except AmagoError as error:
                files.append(file | {"state": _UNREADABLE, "problem": str(error)})
            is_last = number == len(ids)
            if count >= _BATCH_TRAJECTORIES or is_last:
                if not num_added:
                    self._connection.begin()
                self._insert("bookkeeping.files", files)
                self._insert("segments", segments)
                if rows:
                    whole = pa.concat_tables(rows).combine_chunks()  # DuckDB is slow on small ones
                    self._connection.register("new_rows", whole)
                    self._connection.execute(ADD)
                    self._connection.unregister("new_rows")
                    added.append(whole.select(["uid"]))
                num_added += count
                files, segments, rows, count = [], [], [], 0
                if num_added >= before // _SETTLED_SHARE or is_last:
                    if added:
                        self._settle(pa.concat_tables(added))
                    self._connection.commit()
                    before, added, num_added = before + num_added, [], 0

    def _forget(self, gone: Collection[str]) -> None:
        if not gone:
            return
        connection = self._connection
        connection.register("gone", pa.table({"segment": list(gone)}))
        text = "select unhex(uid) as uid from bookkeeping.rows where segment in (from gone)"
        uids = connection.execute(text).to_arrow_table()
        for name in ("bookkeeping.files", "bookkeeping.rows", "segments"):
            connection.execute(f"delete from {name} where segment in (from gone)")
        connection.unregister("gone")
        self._settle(uids)

    def _mark(self, altered: Mapping[str, str]) -> None:
        """Mark which rows of segments have expired; `altered` are their new states."""
        if not altered:
            return
        connection, dead = self._connection, [self._log.find_dead(id) for id in altered]
        numbers, uids = np.repeat(np.arange(len(dead)), [len(some) for some in dead]), np.concatenate(dead)
        raw = pa.Array.from_buffers(pa.binary(16), len(uids), [None, pa.py_buffer(uids.tobytes())])
        states = {"segment": list(altered), "state": list(altered.values()), "number": np.arange(len(altered))}
        connection.register("altered", pa.table(states))
        connection.register("dead_uids", pa.table({"number": numbers, "uid": raw}))
        connection.execute("create or replace temp table dead as select number, lower(hex(uid)) as uid from dead_uids")
        connection.unregister("dead_uids")
        connection.execute(f"create or replace temp table wrong as {_WRONG}")
        changed = connection.execute("select unhex(uid) as uid from wrong").to_arrow_table()
        connection.execute(
            "update bookkeeping.rows set expired = not expired, live = false where rowid in (select place from wrong)"
        )
        connection.execute(_COUNT_EXPIRED)
        connection.execute(
            "update bookkeeping.files f set state = altered.state from altered where f.segment = altered.segment"
        )
        connection.execute("drop table dead; drop table wrong")
        connection.unregister("altered")
        self._settle(changed)

    def _insert(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            self._connection.register("new_objects", pa.Table.from_pylist(list(rows)))
            self._connection.execute(f"insert into {table} by name from new_objects")
            self._connection.unregister("new_objects")

    def _settle(self, changed: pa.Table) -> None:
        """Decide which rows are live among those that depend on the uids `changed`."""
        connection = self._connection
        connection.register("changed_uids", changed)
        connection.execute(
            "create or replace temp table touched as select distinct lower(hex(uid)) as uid from changed_uids"
        )
        connection.unregister("changed_uids")
        found = connection.execute(_TOUCHED).to_arrow_table()
        uids = uid_array(found["uid"].cast(pa.binary(16)))
        if not UidSet().add(uids).all():  # only then does precedence matter, and sorting costs as much as the rest
            found = connection.execute(f"{_TOUCHED} order by segment, row0").to_arrow_table()
            uids = uid_array(found["uid"].cast(pa.binary(16)))
        connection.execute("drop table touched")
        has_base = found["base_uid"].is_null().to_numpy()
        if not has_base.all():
            connection.register("wanted_bases", found.select(["base_uid"]))
            bases = connection.execute(_BASES).to_arrow_table()["uid"].combine_chunks()
            connection.unregister("wanted_bases")
            has_base |= pc.is_in(found["base_uid"], bases).to_numpy()
        wrong = choose_live(uids, has_base, UidSet()) != found["live"].to_numpy()
        if wrong.any():
            connection.register("wrong", pa.table({"place": found["place"].filter(pa.array(wrong))}))
            connection.execute("update bookkeeping.rows set live = not live where rowid in (from wrong)")
            connection.unregister("wrong")


@contextlib.contextmanager
def open_index(
    lake: Lake, listener: Listener = silent, *, megabytes: int | None = None, wait: bool = True
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a locked-down connection to an updated index; queries may use `megabytes`. Segments that are left out are
    reported. IndexDamaged, after removing the index, if it is unreadable. `wait` as in `query`.
    """
    if isinstance(lake.storage, LocalStorage):
        # Locks and the index would be made again in a directory that was removed.
        require_lake(lake.storage)
    index = SqlIndex(lake)
    try:
        with contextlib.ExitStack() as stack:
            connection = index.open(stack, megabytes=megabytes, listener=listener, wait=wait)
            for problem in sql.list_problems(connection):
                listener(Notice(text=f"{problem}; it is left out of the index", level="warning"))
            yield connection
    except sql.IndexDamaged:
        with contextlib.suppress(OSError):
            index.discard()
        raise


def refresh(lake: Lake, *, listener: Listener = silent) -> None:
    """Update the index, as every query does."""
    with open_index(lake, listener):
        pass


def rebuild(lake: Lake, *, listener: Listener = silent) -> None:
    """Delete the index and build it from the segments."""
    SqlIndex(lake).discard()
    refresh(lake, listener=listener)


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
    if limits is not None:
        found: tuple[list[str], sql.Rows] = ask(lake, sql.answer, {"text": text, "most": most}, limits, listener)
        return found

    def answer() -> tuple[list[str], sql.Rows]:
        with open_index(lake, listener, wait=wait) as connection:
            return sql.answer(connection, lake, listener, text, most=most)

    return _answer_twice(answer)


def summary(lake: Lake, *, listener: Listener = silent) -> dict[str, Any]:
    """Count `trajectories`, `steps`, `episodes` (complete ones, without relabelled copies), `overlays`, `segments` and
    `bytes`, and list the names of `environments`.
    """
    names, rows = query(lake, _SUMMARY, listener=listener)
    return dict(zip(names, rows[0], strict=True))


def ask(
    lake: Lake,
    task: Callable[..., Any],
    arguments: Mapping[str, Any],
    limits: QueryLimits,
    listener: Listener = silent,
    *,
    take: Callable[[Any], None] | None = None,
) -> Any:
    """Call `task` in the helper process with a connection to the updated index of `lake`, the lake, a listener, and
    `arguments`. What the task reports to that listener, e.g. segments that cannot be read, reaches `listener` before
    the answer.

    `take` receives the parts that a generator yields, from the first part on again if the index proves to be damaged.
    """
    opening = functools.partial(_open_in_helper, type(lake), lake.name)
    return _answer_twice(lambda: sandbox.ask(task, arguments, limits, opening=opening, take=take, listener=listener))


def _answer_twice(answer: Callable[[], _T]) -> _T:
    """Return what `answer` does, called a second time if the first removed a damaged index."""
    try:
        return answer()
    except sql.IndexDamaged:
        return answer()


@contextlib.contextmanager
def _open_in_helper(kind: type[Lake], name: str, limits: QueryLimits, listener: Listener) -> Iterator[Opened]:
    lake = kind(name)
    with (
        open_index(lake, listener, megabytes=limits.megabytes // 2) as connection,
        sql.enforce_limits(connection, limits),
    ):
        notices: list[Event] = []
        writes = not isinstance(lake.storage, LocalStorage)
        yield Opened((connection, lake, notices.append), writes=writes, notices=notices)
