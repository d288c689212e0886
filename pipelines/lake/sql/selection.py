"""Selection of trajectories by SQL: a predicate and a weight, each one expression over the table `trajectories`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipelines.config.host import find_memory
from pipelines.errors import UsageError
from pipelines.events import Listener, silent
from pipelines.lake.footer import TRAJECTORIES, hex_uids, uid_array
from pipelines.lake.sql import catalog, sandbox
from pipelines.lake.sql import query as sql
from pipelines.lake.sql.sandbox import QueryLimits
from pipelines.lake.uids import positions

if TYPE_CHECKING:
    from pipelines.lake.store import Lake


# What became of an episode is known at its end, and holds for all of its pieces. Episodes are joined only if the lake
# has pieces: that costs a scan.
_OUTCOMES = ("return", "success", "attempts", "terminated", "truncated")
_WITH_OUTCOMES = f"""(select t.* replace ({", ".join(f'e."{name}" as "{name}"' for name in _OUTCOMES)})
from trajectories t join episodes e using (episode))"""


# Columns of `trajectories` that never change in a row, whatever is appended, expires or is rewritten: not its place.
_LASTING = frozenset(TRAJECTORIES.names) - {"row0", "base_segment", "base_offset"} | {"schema"}


class SelectionResult(NamedTuple):
    """Trajectories and their weights: `uids` (n,) "S16", sorted; `weights` (n,) float64, none negative. `by_row`:
    whether each of them, selected or not, will have the same weight as long as it is live."""

    uids: np.ndarray
    weights: np.ndarray
    by_row: bool

    def places(self, uids: np.ndarray) -> np.ndarray:
        """Return the index (m,) of each of `uids` ("S16") in `self.uids`; -1 for those that were not selected."""
        return positions(self.uids, uids, np.arange(len(self.uids)))

    def weights_of(self, uids: np.ndarray) -> np.ndarray:
        """Return (m,) float64: the weight of each of `uids` ("S16"), 0 for those that were not selected."""
        places = self.places(uids)
        return np.where(places >= 0, np.append(self.weights, 0.0)[places], 0.0)


def select(
    lake: Lake,
    where: str | None = None,
    weight: str | None = None,
    schema_id: str | None = None,
    *,
    originals: bool = False,
    among: np.ndarray | None = None,
    limits: QueryLimits | None = None,
    listener: Listener = silent,
) -> SelectionResult:
    """Select the live trajectories that match the predicate `where` (empty: all), with the value of `weight` (empty:
    1).

    Both see the outcome of the whole episode in each of its pieces: "return", success, attempts, terminated, truncated.
    NULL counts as false. Windows in `weight` run over the selected trajectories; subqueries see all tables.
    `schema_id`: only of this schema; `originals`: only trajectories that do not derive from others; `among`: only these
    uids (n,) "S16", although subqueries and outcomes of episodes see the whole lake. UsageError, with the place in the
    text, for anything but one expression of the right type, for reaching beyond the lake or a limit, and for a weight
    that is not a number of at least 0.
    """
    chosen = {"schema_id": schema_id, "originals": originals, "among": among}
    arguments = {"where": where or "", "weight": weight or "", **chosen}
    return SelectionResult(*catalog.ask(lake, choose, arguments, limits or choose_limits(), listener))


def select_rows(
    rows: Sequence[pa.Table], where: str, weight: str, *, limits: QueryLimits | None = None, listener: Listener = silent
) -> SelectionResult:
    """Select among trajectories that are in no index: `rows` are tables by `TRAJECTORIES`. The result is that
    of `select` if it is `by_row`, and meaningless otherwise. UsageError as in `select`.
    """
    limits = limits or choose_limits()
    arguments = {"rows": pa.concat_tables(rows), "where": where, "weight": weight, "limits": limits}
    return SelectionResult(*sandbox.ask(choose_rows, arguments, limits, listener=listener))


def choose_limits() -> QueryLimits:
    """Choose the limits of a selection: five minutes, and a quarter of the host's memory or a gigabyte. It looks at
    every trajectory of a lake, of which a window function keeps about a hundred bytes."""
    return QueryLimits(seconds=300.0, megabytes=max(1024, (find_memory() or 0) >> 22))


def choose_rows(rows: pa.Table, where: str, weight: str, limits: QueryLimits) -> tuple[np.ndarray, np.ndarray, bool]:
    """Select among rows in an index of nothing else, which is empty again afterwards. Runs in the helper process."""
    connection = catalog.make_empty_index(limits.megabytes)
    for name in ("segment", "schema"):
        rows = rows.append_column(name, pa.repeat(pa.scalar("", pa.string()), rows.num_rows))
    rows = rows.append_column("expired", pa.repeat(pa.scalar(False), rows.num_rows))
    connection.begin()
    try:
        connection.register("new_rows", rows)
        connection.execute(catalog.ADD)
        with sql.enforce_limits(connection, limits):
            # Without a lake: an expression that asks for other tables is not by row, and refused here.
            return choose(connection, None, silent, where, weight, None, False)
    finally:
        connection.rollback()
        connection.unregister("new_rows")


def choose(
    connection: Any,
    lake: Lake | None,
    listener: Listener,
    where: str,
    weight: str,
    schema_id: str | None,
    originals: bool,
    among: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Select trajectories. Runs in the helper process."""
    conditions = ["base_uid is null"] if originals else []
    if among is not None:
        connection.register("selected_among", pa.table({"uid": pa.array(hex_uids(among), pa.string())}))
        conditions.append("uid in (select uid from selected_among)")
    if schema_id is not None:
        conditions.append("schema = '" + schema_id.replace("'", "''") + "'")
    pieces, reads = has_pieces(connection), list[set[str] | None]()
    start = f"(select * from {rows_of(pieces)} as trajectories where " + (" and ".join(conditions) or "true")
    end = ") as trajectories"
    rows, value = [start, end], ["1.0"]
    if where.strip():
        expect(connection, lake, where, "predicate", rows)
        rows = [start, " and (\n", UsersText(where), "\n)", end]
        reads.append(sql.find_row_columns(connection, where, _LASTING))
    if weight.strip():
        expect(connection, lake, weight, "weight", rows)
        value = ["(\n", UsersText(weight), "\n)"]
        reads.append(sql.find_row_columns(connection, weight, _LASTING))
    query = ["select unhex(uid) as uid, ", *value, "::double as weight from ", *rows]
    parts, missing = [(np.zeros(0, "S16"), np.zeros(0))], 0
    with run_query(connection, lake, query, listener) as found:
        for batch in sql.read_batches(found.to_arrow_reader(65_536)):
            values = batch.column(1)
            missing += values.null_count
            raw = uid_array(pa.chunked_array([batch.column(0).cast(pa.binary(16))]))
            parts.append((raw.copy(), values.fill_null(0.0).to_numpy().copy()))  # a view would keep the whole batch
    uids, weights = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.argsort(uids)
    uids, weights = uids[order], weights[order]
    bad = {
        "NULL": missing,
        "NaN": int(np.isnan(weights).sum()),
        "infinite": int(np.isinf(weights).sum()),
        "negative": int((weights < 0).sum()),
    }
    if any(bad.values()):
        raise UsageError(
            f"SQL: of {len(weights)} weights {', '.join(f'{count} {what}' for what, count in bad.items() if count)}",
            hint="give every trajectory a number of 0 or more, e.g. coalesce(X, 0) or greatest(X, 0)",
        )
    if len(uids) and (uids[1:] == uids[:-1]).any():
        raise UsageError("SQL: the weight has several values per trajectory", hint="it must be one value per row")
    by_row = all(own is not None and not (pieces and own & set(_OUTCOMES)) for own in reads)
    return uids, weights, by_row


def rows_of(pieces: bool) -> str:
    """Return the rows of trajectories that a user's expression sees, for a FROM clause without an alias; `pieces`:
    whether the lake `has_pieces`."""
    return _WITH_OUTCOMES if pieces else "trajectories"


def has_pieces(connection: Any) -> bool:
    """Return whether an episode of the lake is stored in pieces."""
    return bool(connection.execute("select 1 from bookkeeping.rows where live and episode <> '' limit 1").fetchall())


# The required type of an expression, as prefixes of the names of SQL's types, and a hint.
_KINDS = {
    "predicate": (("BOOLEAN",), "compare it with something, e.g. length > 10"),
    "weight": (tuple(name for name in sql.NUMBERS if name != "BOOLEAN"), "make it a number, e.g. success::int"),
}


class UsersText(str):
    """The part of a query that a user wrote."""


@contextlib.contextmanager
def run_query(connection: Any, lake: Lake | None, parts: list[str], listener: Listener = silent) -> Iterator[Any]:
    """Run the query made of the parts; errors point into the user's text. `lake`: for tables that are not in the
    index; None if the query names none. Segments that cannot be read are reported."""
    query, begins, line = "".join(parts), {}, 1
    for part in parts:
        if isinstance(part, UsersText):
            begins[line] = str(part)
        line += part.count("\n")
    try:
        with sql.explain_errors(begins), sql.repeat_interrupted(connection, query):
            if lake is not None:
                sql.offer(connection, lake, query, listener)
            yield connection.execute(query)
    except UsageError as error:
        if "GROUP BY clause" in error.message:
            raise UsageError(
                "SQL: the weight aggregates over all trajectories",
                hint="say over which: count(*) over (), or a subquery",
            ) from error
        raise


def expect(connection: Any, lake: Lake | None, text: str, kind: str, rows: list[str]) -> None:
    """Raise UsageError unless the text is one expression in `rows`, of the type of a "predicate" or a "weight"."""
    types, hint = _KINDS[kind]
    sql.check_expression(connection, text)
    with run_query(connection, lake, ["select (\n", UsersText(text), "\n) from ", *rows, " limit 0"]) as found:
        given = str(found.description[0][1])
    if not given.startswith(types) or given.endswith("]"):
        raise UsageError(f"SQL: '{text.strip()}' is not a {kind}: its type is {given}", hint=hint)


def tasks(lake: Lake, where: str, *, env: str, listener: Listener = silent) -> list[str]:
    """Return the names of the tasks of environment `env` with trajectories that match the SQL predicate `where`, in
    order. UsageError as in `select`.
    """
    chosen = select(lake, where, listener=listener)
    with catalog.open_index(lake, listener) as connection:
        connection.register("chosen", pa.table({"uid": pa.array(hex_uids(chosen.uids), pa.string())}))
        text = "select distinct task from trajectories semi join chosen using (uid) where env = ? order by task"
        return [task for (task,) in connection.execute(text, [env]).fetchall()]
