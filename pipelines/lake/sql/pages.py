"""Pages of the table `trajectories`: those that match a user's predicate, in an order, some at a time. An episode in
pieces is one row, named by the uid of its first piece, and matches if one of its pieces does.

A page begins after, or ends before, a trajectory that is named by its uid, so that a page in the middle of a million
costs as much as the first one. Text is cut, so that a page has a bounded size. The functions that take a connection run
in the helper process.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.errors import UsageError
from pipelines.events import Listener, silent
from pipelines.lake.sql import catalog
from pipelines.lake.sql.sandbox import QueryLimits
from pipelines.lake.sql.selection import UsersText, expect, has_pieces, rows_of, run_query

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

_MOST_ROWS = 500
_LETTERS = 400
_SHOWN_ATTEMPTS = 200
_TEXTS = (
    *("uid", "env", "task", "source", "policy_id", "collector", "goal_text", "base_uid", "relabel_method"),
    *("segment", "schema"),
)
_NUMBERS = (
    *("return", "length", "success", "policy_version", "t_commit", "t_start", "t_end", "epsilon", "seed"),
    *("terminated", "truncated", "base_offset", "row0"),
)
ORDERS = (*_TEXTS, *_NUMBERS)
"""Columns that a page can be in the order of."""
_TAGS = "array_to_string(list_transform(map_entries(tags), e -> e.key || '=' || e.value), ', ')"
_CELLS = ", ".join(
    [
        *(f'left("{name}", {_LETTERS}) as "{name}"' for name in _TEXTS),
        *(f'"{name}"' for name in _NUMBERS),
        f"attempts[:{_SHOWN_ATTEMPTS}] as attempts",
        f"left({_TAGS}, {_LETTERS}) as tags",
    ]
)
_JOINED = """
select t.* replace ({}), e.complete from trajectories t join episodes e using (episode) where t.uid = e.uids[1]
""".format(
    ", ".join(
        f'e."{name}" as "{name}"'
        for name in (
            *("length", "return", "success", "attempts", "terminated", "truncated", "epsilon", "tags"),
            *("policy_version", "t_end", "t_commit"),
        )
    )
).strip()
_FINITE = "and isfinite(x) and isfinite(y)"


class TrajectoryPage(NamedTuple):
    """Rows of `columns`. `start`: the position of the first one among all that match; `more`: whether others follow."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    start: int
    more: bool


def fetch_page(
    lake: Lake,
    *,
    where: str = "",
    order: str = "t_commit",
    descending: bool = True,
    after: str = "",
    before: str = "",
    rows: int = 100,
    limits: QueryLimits,
    listener: Listener = silent,
) -> TrajectoryPage:
    """Return the page that begins after the trajectory `after`, or ends before `before`, or is the first one.

    NULL is last in either direction; equal values are in the order of their uids. UsageError for wrong SQL, and for an
    order or uid that there cannot be.
    """
    if order not in ORDERS:
        raise UsageError(f"trajectories cannot be sorted by '{order}'", hint=f"by {', '.join(ORDERS)}")
    for uid in (after, before):
        if uid and not is_uid(uid):
            raise UsageError(f"'{uid}' is not a uid", hint="a uid has 32 hex digits")
    arguments = {
        "where": where,
        "order": order,
        "descending": descending,
        "anchor": after or before,
        "backwards": bool(before and not after),
        "most": max(1, min(rows, _MOST_ROWS)),
    }
    return TrajectoryPage(*catalog.ask(lake, page, arguments, limits, listener))


def fetch_count(lake: Lake, where: str, *, limits: QueryLimits, listener: Listener = silent) -> dict[str, Any]:
    """Return `trajectories` and `steps` of those that match, and of complete episodes among them `episodes` (their
    number), `return_mean` and `success_mean`."""
    found: dict[str, Any] = catalog.ask(lake, count, {"where": where}, limits, listener)
    return found


def fetch_curve(
    lake: Lake, where: str, *, across: str, bins: int, limits: QueryLimits, listener: Listener = silent
) -> list[dict[str, Any]]:
    """Return the returns of complete episodes that match, in `bins` equal intervals of the column `across`, empty ones
    left out: `x` (mean), `episodes`, `mean`, `low` and `high` (10 and 90%), `success`.
    """
    if across not in _NUMBERS:
        raise UsageError(f"no curve over '{across}'", hint=f"over {', '.join(_NUMBERS)}")
    arguments = {"where": where, "across": across, "bins": max(1, min(bins, 500))}
    found: list[dict[str, Any]] = catalog.ask(lake, curve, arguments, limits, listener)
    return found


def is_uid(text: str) -> bool:
    return len(text) == 32 and all(letter in "0123456789abcdef" for letter in text)


def page(
    connection: Any,
    lake: Lake,
    listener: Listener,
    where: str,
    order: str,
    descending: bool,
    anchor: str,
    backwards: bool,
    most: int,
) -> tuple[list[str], list[tuple[Any, ...]], int, bool]:
    """Query the fields of a `TrajectoryPage`. Runs in the helper process."""
    matching, _ = _select_from(connection, lake, where)
    start, beyond = 0, ""
    if anchor:
        every, _ = _select_from(connection, lake, "")
        found = connection.execute(f'select "{order}" from {"".join(every)} where uid = ?', [anchor]).fetchall()
        if found:  # otherwise it expired: begin at the first page
            beyond = _build_condition(order, found[0][0], anchor, descending=descending, backwards=backwards)
            with run_query(
                connection, lake, ["select count(*) from ", *matching, f" where {beyond}"], listener
            ) as counted:
                ((others,),) = counted.fetchall()
            with run_query(connection, lake, ["select count(*) from ", *matching], listener) as counted:
                ((total,),) = counted.fetchall()
            start = max(others - most, 0) if backwards else total - others
    backwards = backwards and bool(beyond)
    direction, nulls = ("desc" if descending != backwards else "asc"), ("first" if backwards else "last")
    tie = "desc" if backwards else "asc"
    query = [
        f"select {_CELLS} from (select * from ",
        *matching,
        f' where {beyond or "true"} order by "{order}" {direction} nulls {nulls}, uid {tie} limit {most + 1}) as shown',
        f' order by shown."{order}" {direction} nulls {nulls}, shown.uid {tie}',
    ]
    with run_query(connection, lake, query, listener) as result:
        names, rows = [column[0] for column in result.description], result.fetchall()
    others_follow = len(rows) > most
    rows = rows[:most]
    if backwards:
        rows.reverse()
        others_follow = True
    return names, rows, start, others_follow


def count(connection: Any, lake: Lake, listener: Listener, where: str) -> dict[str, Any]:
    """Summarise those that match. Runs in the helper process."""
    matching, complete = _select_from(connection, lake, where)
    text = (
        f"select count(*) as trajectories, count(*) filter ({complete}) as episodes,"
        " coalesce(sum(length), 0)::bigint as steps,"
        f' avg("return") filter ({complete} and isfinite("return")) as return_mean,'
        f" avg(success::int) filter ({complete}) as success_mean from "
    )
    with run_query(connection, lake, [text, *matching], listener) as result:
        names = [column[0] for column in result.description]
        return dict(zip(names, result.fetchall()[0], strict=True))


def curve(connection: Any, lake: Lake, listener: Listener, where: str, across: str, bins: int) -> list[dict[str, Any]]:
    """Bin the returns of those that match. Runs in the helper process."""
    matching, complete = _select_from(connection, lake, where)
    query = [
        f'with shown as materialized (select "{across}"::double as x, "return" as y, success::int as s from ',
        *matching,
        f" where {complete} and x is not null and y is not null {_FINITE}),",
        " edges as (select min(x) as low, max(x) as high from shown)",
        f" select avg(x) as x, count(*) as episodes, avg(y) as mean, quantile_cont(y, 0.1) as low,"
        f" quantile_cont(y, 0.9) as high, avg(s) as success from (select x, y, s,"
        f" case when edges.high > edges.low then least(floor({bins} * (x - edges.low) / (edges.high - edges.low)),"
        f" {bins - 1}) else 0 end as bin from shown, edges) as binned group by bin order by bin",
    ]
    with run_query(connection, lake, query, listener) as result:
        names = [column[0] for column in result.description]
        return [dict(zip(names, row, strict=True)) for row in result.fetchall()]


def _select_from(connection: Any, lake: Lake, where: str) -> tuple[list[str], str]:
    """Return the parts of a query's FROM clause for the trajectories that match a user's predicate, and the condition
    for complete episodes among them. Episodes are joined only if the lake has pieces: that costs a scan."""
    rows = f"{rows_of(has_pieces(connection))} as trajectories"
    if where.strip():
        expect(connection, lake, where, "predicate", [rows])
    if not has_pieces(connection):
        if not where.strip():
            return ["trajectories"], "true"
        return ["(select * from trajectories where (\n", UsersText(where), "\n)) as trajectories"], "true"
    among = []
    if where.strip():
        among = [f" and episode in (select episode from {rows} where (\n", UsersText(where), "\n))"]
    return [f"({_JOINED}", *among, ") as trajectories"], "complete"


def _build_condition(order: str, value: Any, uid: str, *, descending: bool, backwards: bool) -> str:
    """Build the condition for rows after a row in the order, or before it."""
    column, sign = f'"{order}"', "<" if backwards else ">"
    if value is None:
        same = f"({column} is null and uid {sign} '{uid}')"
        return f"({column} is not null or {same})" if backwards else same
    if isinstance(value, str):
        literal = "'" + value.replace("'", "''") + "'"
    elif isinstance(value, float):
        literal = f"'{value!r}'::double" if math.isfinite(value) else f"'{value}'::double"
    else:
        literal = str(value).lower() if isinstance(value, bool) else str(int(value))
    further = ">" if descending == backwards else "<"
    beyond = f"{column} {further} {literal} or ({column} = {literal} and uid {sign} '{uid}')"
    return f"({beyond})" if backwards else f"({beyond} or {column} is null)"
