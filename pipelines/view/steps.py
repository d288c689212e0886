"""Steps of one trajectory: a few rows of a few columns, wherever they are stored.

A trajectory is located by the SQL index, so that the footers of a large lake need not be read. What is read at a time
is bounded, whatever the length of the trajectory and the width of its columns. A piece of an episode stands for the
whole episode, as far as it is stored without a gap.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from pipelines.errors import InputMissing, UsageError
from pipelines.lake.schema import Schema
from pipelines.lake.segment import OpenSegments
from pipelines.lake.sql import catalog
from pipelines.lake.sql.pages import is_uid
from pipelines.lake.store import Lake

_LETTERS = 20_000  # of a text in a trajectory's facts
_TEXTS = (
    *("env", "task", "source", "policy_id", "collector", "goal_text", "relabel_method", "segment", "schema"),
    *("uid", "base_uid"),
)
_FACTS = f"""
select {", ".join(f"left(t.{name}, {_LETTERS}) as {name}" for name in _TEXTS)},
       t.row0, t.length, t.policy_version, t.seed, t."return", t.success, t.attempts[:1000] as attempts, t.terminated,
       t.truncated, t.episode, t.chunk, t.first_step, t.epsilon, t.t_start, t.t_end, t.t_commit, t.base_offset,
       list_transform(map_entries(t.tags)[:100], e -> [left(e.key, 200), left(e.value, {_LETTERS})]) as tags,
       b.segment as base_segment, b.row0 + t.base_offset as base_row0, b.chunk as base_chunk,
       s.columns as stored
from (from trajectories where {{which}}) t
left join trajectories b on b.uid = t.base_uid left join segments s on s.segment = t.segment
order by t.chunk
"""
_SUMMED = ("length", "return")
_OF_LAST = ("policy_version", "success", "terminated", "truncated", "t_end", "t_commit", "tags")
_KEPT = 64  # trajectories whose place is remembered
_OPEN_FILES = 16
_T = TypeVar("_T")


@dataclass(frozen=True)
class StoredTrajectory:
    """A trajectory's row of the table `trajectories`, its schema, and the places of its columns.

    Columns in `stored` are in the file of `segment` from `row0` on; the other columns of an overlay are in the file of
    its base. For an episode in pieces, `facts` describe the whole, and `pieces` has the row of each piece; row 0 of a
    piece is the last row of the piece before.
    """

    facts: dict[str, Any]
    schema: Schema
    pieces: tuple[dict[str, Any], ...] = ()

    @property
    def uids(self) -> list[str]:
        """The uids of its pieces, or its own."""
        return [piece["uid"] for piece in self.pieces] or [self.uid]

    @property
    def uid(self) -> str:
        return str(self.facts["uid"])

    @property
    def length(self) -> int:
        """T, the number of actions."""
        return int(self.facts["length"])

    def start_of(self, uid: str) -> int:
        """Count the rows before a piece."""
        return sum(piece["length"] for piece in self.pieces[: self.uids.index(uid)])

    @property
    def changed(self) -> list[str]:
        """The columns that an overlay stores; none of an original."""
        if self.facts["base_uid"] is None:
            return []
        return [column.name for column in self.schema.columns if column.name in self.facts["stored"]]


class StepReader:
    """Random access to steps. Calls may come from several threads."""

    def __init__(self, lake: Lake) -> None:
        self.lake = lake
        self._files = OpenSegments(lake, limit=_OPEN_FILES, scattered=True)
        self._known: OrderedDict[str, StoredTrajectory] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, uid: str) -> StoredTrajectory:
        """Locate a trajectory. InputMissing if the lake does not have it."""
        if not is_uid(uid):
            raise UsageError("a uid has 32 hex digits")
        with self._lock:
            if (known := self._known.get(uid)) is not None:
                return known
        own = self._facts(f"uid = '{uid}'")
        if not own:
            raise InputMissing(f"lake '{self.lake.name}' has no trajectory {uid}", hint="it may have expired")
        facts, pieces = own[0], []
        if facts["episode"] != uid:
            pieces = self._facts(f"episode = (select episode from trajectories where uid = '{uid}')")
            pieces = _select_around(pieces, facts["chunk"])
            facts = _join(uid, pieces)
        if facts.pop("base_chunk"):
            facts["base_offset"] += self.find(facts["base_uid"]).start_of(facts["base_uid"])
        found = StoredTrajectory(facts, self.lake.schema(facts["schema"]), tuple(pieces))
        with self._lock:
            self._known[uid] = found
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return found

    def _facts(self, which: str) -> list[dict[str, Any]]:
        names, rows = catalog.query(self.lake, _FACTS.format(which=which))
        return [dict(zip(names, row, strict=True)) for row in rows]

    def rows(self, uid: str, name: str, start: int, stop: int) -> np.ndarray:
        """Read rows [start, stop) of a column (rows, *shape)."""
        return self._retry(uid, lambda found: self._read(found, name, start, stop))

    def _retry(self, uid: str, read: Callable[[StoredTrajectory], _T]) -> _T:
        """Read from a trajectory, a second time if its file was rewritten meanwhile."""
        try:
            return read(self.find(uid))
        except FileNotFoundError:
            with self._lock:
                self._known.pop(uid, None)
            return read(self.find(uid))

    def _read(self, found: StoredTrajectory, name: str, start: int, stop: int) -> np.ndarray:
        if not found.pieces:
            return self._read_piece(found.facts, found, name, start, stop)
        parts, begin = [], 0
        for number, piece in enumerate(found.pieces, 1):
            # The row where two pieces meet is that of the later one, which is not truncated there.
            end = begin + piece["length"] + (number == len(found.pieces))
            first, last = max(start, begin), min(stop, end)
            if first < last:
                parts.append(self._read_piece(piece, found, name, first - begin, last - begin))
            begin = end
        return np.concatenate(parts) if parts else self._read_piece(found.pieces[0], found, name, 0, 0)

    def _read_piece(
        self, facts: dict[str, Any], found: StoredTrajectory, name: str, start: int, stop: int
    ) -> np.ndarray:
        own = facts["base_uid"] is None or name in facts["stored"]
        segment, row0 = (facts["segment"], facts["row0"]) if own else (facts["base_segment"], facts["base_row0"])
        if segment is None:
            raise InputMissing(f"the trajectory that {found.uid} derives from is no longer in the lake")
        with self._lock:
            file = self._files.open(segment, found.schema.id)
            return file.read_rows(name, row0 + start, row0 + stop)


def _join(uid: str, pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the rows of pieces into the row of their episode, under the `uid` of one of them."""
    first, last = pieces[0], pieces[-1]
    facts = {**first, "uid": uid, **{name: last[name] for name in _OF_LAST}}
    facts |= {name: sum(piece[name] for piece in pieces) for name in _SUMMED}
    facts["attempts"] = [won for piece in pieces for won in piece["attempts"] or ()][:1000]
    facts["epsilon"] = sum(piece["epsilon"] * piece["length"] for piece in pieces) / facts["length"]
    return facts


def _select_around(pieces: list[dict[str, Any]], chunk: int) -> list[dict[str, Any]]:
    """Select the consecutive pieces around number `chunk`; a gap ends them."""
    numbers = {piece["chunk"]: piece for piece in pieces}
    first = last = chunk
    while first - 1 in numbers:
        first -= 1
    while last + 1 in numbers:
        last += 1
    return [numbers[number] for number in range(first, last + 1)]
