"""A view: the trajectories that a trainer may draw from, as a numpy table of 16 bytes per trajectory. Lakes with pieces
of episodes, overlays, or files of more than 2^32 rows need more fields."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from pipelines.errors import InputMissing, IntegrityError, Interrupted, UsageError
from pipelines.events import Event, Listener, Notice, silent
from pipelines.lake.footer import Footer, hash_names, read_footer
from pipelines.lake.live import Findings, LiveTable, Segment
from pipelines.lake.schema import Schema
from pipelines.lake.sql.sandbox import LimitReached
from pipelines.lake.store import Lake
from pipelines.lake.uids import positions

ROW = np.dtype(
    [
        ("segment", "u4"),  # location of the trajectory's own columns
        ("length", "u4"),  # actions; rows are one more
        ("row0", "u4"),  # or u8, once a row of a file needs it
        ("weight", "f4"),
    ]
)
# Time of row 0 in the episode, of which the trajectory may be a piece. The table has this field once there are pieces;
# see `first_steps`.
PIECE = ("first_step", "u4")
# Location of a trajectory's other columns, in another segment for an overlay. The table has these fields once there are
# overlays; see `bases` and `base_rows`.
BASE = (("base", "u4"), ("base_row0", "u4"))
_WIDE = {"row0": "u8", "base_row0": "u8"}
TASK = ("task", "u4")  # number of its environment and task, in order of appearance
# A number for the learning history (0: none), the episode's place in it, the episode's return.
HISTORY = (("history", "u8"), ("history_index", "u4"), ("return", "f4"))
_NO_PIECES = -1  # version of a table whose neighbours were not looked for
PRIORITY = (("priority", "f4"), ("measured", "?"))  # 0 until the sampler gives it one


def bases(table: np.ndarray) -> np.ndarray:
    """Return the segment numbers (n,) of the columns that overlays leave out, of rows of a view's table."""
    return table["base" if "base" in (table.dtype.names or ()) else "segment"]


def base_rows(table: np.ndarray) -> np.ndarray:
    """Return the first rows (n,) in these segments."""
    return table["base_row0" if "base_row0" in (table.dtype.names or ()) else "row0"]


def first_steps(table: np.ndarray) -> np.ndarray:
    """Return the times (n,) of row 0 in their episodes."""
    has_pieces = PIECE[0] in (table.dtype.names or ())
    return table[PIECE[0]] if has_pieces else np.broadcast_to(np.uint32(0), len(table))


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Trajectories of a lake to draw from, and how often: SQL over its `trajectories` table."""

    where: str = ""
    weight: str = ""
    evaluate: Callable[[np.ndarray], np.ndarray] | None = None
    """Maps uids (n,) "S16" to relative weights (n,), 0 if not selected; None: all equal."""
    extend: Callable[[Sequence[Any]], np.ndarray | None] | None = None
    """Maps Arrow tables by `TRAJECTORIES`, of n trajectories that are new, to their weights (n,); None where the
    weights of others may have changed, too. Without it, everything is evaluated after each change."""
    beside: Callable[[np.ndarray, Listener], np.ndarray] | None = None
    """Does what `evaluate` does, in a thread beside the caller; a listener that raises stops it. Without it, the caller
    waits."""


class _SelectionThread:
    """An evaluation of the uids (n,) beside the caller, which takes seconds in a large lake. Rows of the table `asked`
    (n,) are the places of its trajectories in `uids`, -1 for later ones; later rows may be missing at the end.
    """

    def __init__(self, evaluate: Callable[[np.ndarray, Listener], np.ndarray], uids: np.ndarray) -> None:
        self.asked = np.arange(len(uids))
        self.notices: list[Notice] = []
        self._weights: np.ndarray | None = None
        self._error: Exception | None = None
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, args=(evaluate, uids), name="selection", daemon=True)
        self._thread.start()

    def _run(self, evaluate: Callable[[np.ndarray, Listener], np.ndarray], uids: np.ndarray) -> None:
        try:
            self._weights = evaluate(uids, self._listen)
        except Exception as error:  # raised where the result is taken
            self._error = error

    def _listen(self, event: Event) -> None:
        if self._cancelled:
            raise Interrupted("the selection is no longer needed")
        if isinstance(event, Notice):
            self.notices.append(event)

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> np.ndarray:
        """Wait for the weights (n,), or the error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._weights is not None
        return self._weights

    def cancel(self) -> None:
        self._cancelled = True
        self._thread.join()


class ViewFindings(NamedTuple):
    """What refreshes of a view have found, for other processes to repeat: changes of the live set, and the `weights`
    (n,) of the rows of the table from `first` on."""

    live: Findings
    first: int
    weights: np.ndarray


@dataclass(frozen=True)
class Neighbours:
    """Of pieces of episodes, rows of a view's table (n,) int64: the piece before, the piece after (-1: there is none
    here, or the trajectory is a whole episode), and the first piece that is here."""

    before: np.ndarray
    after: np.ndarray
    first: np.ndarray

    def episode(self, row: int) -> list[int]:
        """Return the rows of all consecutive pieces of the episode of which `row` is one, in order."""
        found = [int(self.first[row])]
        while (following := int(self.after[found[-1]])) >= 0:
            found.append(following)
        return found


class View:
    """Live trajectories of one schema, in the order in which they were first seen.

    `refresh` adds new ones, finds moved ones and removes expired ones; the order of the rest stays. Trajectories
    outside `selection` have weight 0. `snapshot` and `restore` rebuild the same table in another process, so that the
    same draws follow. `version` changes with the table or its weights. New trajectories have weight 0 until they are
    selected: at once, or at a later refresh where the selection is evaluated `beside` the caller. `extra` are fields of
    the table in addition to those of `ROW`: `TASK`, `PRIORITY`. A `fixed` view has only what `restore` gives it.
    """

    def __init__(
        self,
        lake: Lake,
        schema_id: str,
        *,
        selection: Selection | None = None,
        extra: tuple[tuple[str, str], ...] = (),
        listener: Listener = silent,
        verify: bool = False,
        fixed: bool = False,
    ) -> None:
        self.lake, self.verify, self.fixed = lake, verify, fixed
        self.schema: Schema = lake.schema(schema_id)
        self.selection = selection or Selection()
        self.version = 0
        self._dtype = np.dtype([*ROW.descr, *extra])
        self._listener = listener
        self._running: _SelectionThread | None = None
        self._clear()

    def _clear(self) -> None:
        self.cancel()
        self.live = LiveTable(self.lake, self._listener, admitted=() if self.fixed else None)
        self.tasks: dict[tuple[str, str], int] = {}
        self._moved: set[int] = set()  # changed segments, not applied yet
        self._unselected = True  # the table has changed since the selection was evaluated
        self._selected = 0  # segments whose trajectories the selection has seen
        self._told = 0  # rows whose weights were among the findings
        self.num_steps = self._collected = 0  # all steps; those of trajectories that are no overlays
        self._table = np.zeros(64, dtype=self._dtype)
        self._used = 0
        self._taken: list[Segment] = []
        self._dropped: list[str] = []
        self._last_footer: tuple[str, Footer] | None = None
        self._files: dict[str, int] = {}
        self._file_of = np.zeros(64, dtype=np.int64)
        self._places = np.zeros(0, dtype=np.uint64)
        self.moves = 0
        self.version += 1
        self._neighbours: tuple[int, Neighbours | None] = _NO_PIECES, None

    @property
    def table(self) -> np.ndarray:
        """(num_trajectories,) of `ROW` and the extra fields, read-only: change weights by `set_weights`."""
        return self._table[: self._used]

    @property
    def segments(self) -> Sequence[Segment]:
        """Segments of the table's trajectories, by number."""
        return self._taken

    @property
    def num_trajectories(self) -> int:
        return self._used

    @property
    def file_of(self) -> np.ndarray:
        """File index of each segment of the live set."""
        return self._file_of[: len(self._taken)]

    @property
    def files(self) -> Sequence[str]:
        """Ids of the segments whose files hold the trajectories, by file index; of earlier ones too."""
        return list(self._files)

    def file_places(self) -> np.ndarray:
        """Return a random number (num_files,) uint64 for each file, the same in every process."""
        new = list(self._files)[len(self._places) :]
        hashes = b"".join(blake2b(name.encode(), digest_size=8).digest() for name in new)
        self._places = np.concatenate([self._places, np.frombuffer(hashes, dtype="<u8")])
        return self._places

    @property
    def collected_steps(self) -> int:
        """Environment steps put into the lake so far, expired ones included; overlays repeat steps and do not count. Of
        a fixed view, those of its trajectories."""
        return self._collected + (0 if self.fixed else self.live.log.steps.total())

    def uids(self) -> np.ndarray:
        """Return uids (num_trajectories,) "S16", in the table's order."""
        mine = [segment.uids for segment in self._taken if segment.schema_id == self.schema.id]
        return np.concatenate(mine) if mine else np.zeros(0, dtype="S16")

    @property
    def neighbours(self) -> Neighbours | None:
        """The pieces of the same episodes; None if there are no pieces. Sorts all pieces after each change of the
        table."""
        if self._neighbours[0] != self.version:
            self._neighbours = self.version, self._find_neighbours()
        return self._neighbours[1]

    def _find_neighbours(self) -> Neighbours | None:
        mine = [segment for segment in self._taken if segment.schema_id == self.schema.id]
        if all(segment.episode is None for segment in mine):
            return None
        found = [np.zeros(len(s.uids), "u8") if s.episode is None else s.episode for s in mine]
        episode, table = np.concatenate(found), self.table
        rows = np.flatnonzero(episode)
        begin = first_steps(table)[rows].astype(np.int64)
        order = np.lexsort((begin, episode[rows]))
        rows, begin = rows[order], begin[order]
        end = begin + table["length"][rows]
        meet = (episode[rows[1:]] == episode[rows[:-1]]) & (begin[1:] == end[:-1])
        before, after = np.full((2, len(table)), -1)
        before[rows[1:][meet]], after[rows[:-1][meet]] = rows[:-1][meet], rows[1:][meet]
        first = np.where(before >= 0, before, np.arange(len(table)))
        while (first[first] != first).any():
            first = first[first]
        return Neighbours(before, after, first)

    def refresh(self, findings: ViewFindings | None = None) -> int:
        """Apply the lake's additions, moves and removals; return the number of new trajectories of this view.
        `findings`: those of another process, weights included (None: look, and select).

        The selection is evaluated once if anything changed, and at the first refresh.
        """
        before = self.version
        self._unselected |= not self._taken
        try:
            found = self.live.refresh() if findings is None else self.live.repeat(findings.live)
            self._moved.update(n for n in found.changed if n < len(self._taken))
            if self._moved:
                self._move(sorted(self._moved))
            added = self._take()
        finally:
            self._unselected |= self.version != before
        if findings is not None and findings.first + len(findings.weights) == self._used:
            self.set_weights(findings.weights, first=findings.first)
            self._selected, self._unselected = len(self._taken), False
        else:
            self._update_selection()
        return added

    def collect_findings(self) -> ViewFindings:
        """Collect what was found since the last call."""
        first, self._told = self._told, self._used
        return ViewFindings(self.live.collect_findings(), first, self.table["weight"][first:].copy())

    def set_weights(self, weights: np.ndarray, *, first: int = 0) -> None:
        """Set relative weights >= 0 of the rows of the table from `first` on. UsageError for an invalid weight."""
        with np.errstate(over="ignore"):
            given = np.asarray(weights).astype(np.float32)
        self.table["weight"][first:] = given
        self._told = min(self._told, first)
        if not (np.isfinite(given) & (given >= 0)).all():
            raise UsageError(
                f"lake '{self.lake.name}': a weight is negative, not a number, or above {np.finfo(np.float32).max:.1e}",
                hint="--weight must give numbers of 0 or more, e.g. divided by the largest of them",
            )
        if self._dropped:
            self.table["weight"][self._reads(self._dropped)] = 0.0
        self.version += 1

    def lose(self, number: int, reason: str) -> None:
        """Handle a read failure of segment `number` of the live set: find its trajectories' new place, else stop
        drawing from it (and from overlays of it), with a Notice."""
        segment, moves = self._taken[number], self.moves
        self.live.look_back()
        self.refresh()
        if self._taken[number].file == segment.file and self.moves == moves:
            self._drop(segment.id, reason)

    def _drop(self, segment: str, reason: str) -> None:
        self._dropped.append(segment)
        lost = self._reads([segment])
        self.table["weight"][lost] = 0.0
        self._told = 0
        self.version += 1
        text = f"{reason}; its {int(lost.sum())} trajectories are passed over"
        self._listener(Notice(text=text, level="warning"))

    def _reads(self, ids: Collection[str]) -> np.ndarray:
        """Return (num_trajectories,) bool: which are in one of these segments, or in overlays of them."""
        numbers = [segment.number for segment in self._taken if segment.id in ids]
        return np.isin(self.table["segment"], numbers) | np.isin(bases(self.table), numbers)

    def snapshot(self) -> dict[str, Any]:
        """Return the input of `restore`, JSON-serialisable: the segments in the order in which they were seen."""
        return {
            "id": self.lake.id,
            "name": self.lake.name,
            "schema": self.schema.id,
            "where": self.selection.where,
            "weight": self.selection.weight,
            "segments": [segment.id for segment in self._taken],
            "dropped": list(self._dropped),
            "trajectories": self._used,
        }

    def restore(self, snapshot: Mapping[str, Any], *, whole: bool = False) -> None:
        """Rebuild the view of `snapshot`, wherever its trajectories are now. InputMissing for another lake or schema; a
        Notice if trajectories are gone, or InputMissing if it must be `whole`."""
        if (snapshot["id"], snapshot["schema"]) != (self.lake.id, self.schema.id):
            raise InputMissing(f"lake '{self.lake.name}' is not the one that was drawn from before")
        self._clear()
        if self.fixed:
            self.live.admitted = frozenset(snapshot["segments"])
        self.live.restore(snapshot["segments"])
        self._take()
        if whole and self._used != snapshot["trajectories"]:
            gone, count = snapshot["trajectories"] - self._used, snapshot["trajectories"]
            raise InputMissing(f"lake '{self.lake.name}' no longer has {gone} of its {count} trajectories")
        self._select()
        for id in snapshot["dropped"]:
            if self._reads([id]).any():
                self._drop(id, f"segment '{id}' of lake '{self.lake.name}' could not be read before")
        if self._used != snapshot["trajectories"]:
            text = (
                f"lake '{self.lake.name}' has {self._used} of the {snapshot['trajectories']} trajectories "
                "that were drawn from before: the resumed run will not be bit-identical"
            )
            self._listener(Notice(text=text, level="warning"))

    def _select(self) -> None:
        """Evaluate the selection for all trajectories, while the caller waits."""
        self.cancel()
        if self.selection.evaluate is not None:
            self.set_weights(self.selection.evaluate(self.uids()))
        self._selected, self._unselected = len(self._taken), False

    def _update_selection(self) -> None:
        """Evaluate the selection after a change: for what is new where that is enough, else for all trajectories,
        beside the caller if there are weights to draw by meanwhile."""
        if self._running is not None and self._running.is_done:
            self._finish_selecting(self._running)
        if not self._unselected or self._running is not None:
            return
        new = self._taken[self._selected :] if self._selected else None
        if new is not None and (weights := self._weigh_new(new)) is not None:
            if len(weights):
                self.set_weights(weights, first=self._used - len(weights))
            self._selected, self._unselected = len(self._taken), False
        elif new is not None and self.selection.beside is not None and self.table["weight"].any():
            self._selected, self._unselected = len(self._taken), False
            self._running = _SelectionThread(self.selection.beside, self.uids())
        else:
            self._select()

    def _weigh_new(self, segments: Sequence[Segment]) -> np.ndarray | None:
        """Return the weights of the trajectories of new segments, as far as they are of this schema; None if they do
        not follow from their own rows."""
        rows: list[Any] = []
        if self.selection.extend is None:
            return None
        for segment in segments:
            if segment.schema_id == self.schema.id and len(segment.uids):
                try:
                    footer = self._footer(segment.file)
                except (FileNotFoundError, IntegrityError):  # rewritten since: the index finds out
                    return None
                place = positions(footer.uids(), segment.uids)
                rows.append(footer.trajectories.take(place))
        self._last_footer = None
        return self.selection.extend(rows)

    def _finish_selecting(self, running: _SelectionThread) -> None:
        """Apply weights that were evaluated beside the caller. After a limit, the old ones stay in use."""
        self._running = None
        for notice in running.notices:
            self._listener(notice)
        try:
            found = running.result()
        except LimitReached as error:
            text = f"{error}; trajectories are drawn by the weights from before, and new ones not yet"
            self._listener(Notice(text=text, level="warning"))
            return
        weights, asked = self.table["weight"].copy(), running.asked
        weights[: len(asked)] = np.where(asked >= 0, np.append(found, 0.0)[asked], 0.0)
        self.set_weights(weights)

    def cancel(self) -> None:
        """Stop an evaluation of the selection that runs beside the caller; the next refresh repeats it."""
        if self._running is not None:
            self._running.cancel()
            self._running, self._unselected = None, True

    def _take(self) -> int:
        before = self._used
        new = self.live.segments[len(self._taken) :]
        self._add_fields(new)
        self._reserve(sum(len(segment.uids) for segment in new if segment.schema_id == self.schema.id))
        for segment in new:
            # May fail, so it comes first.
            rows = self._rows(segment) if segment.schema_id == self.schema.id else None
            if len(self._taken) == len(self._file_of):
                self._file_of = np.concatenate([self._file_of, np.zeros_like(self._file_of)])
            self._file_of[len(self._taken)] = self._file(segment)
            self._taken.append(segment)
            if rows is not None:
                self._append(rows)
        self._last_footer = None
        return self._used - before

    def _file(self, segment: Segment) -> int:
        return self._files.setdefault(segment.file, len(self._files))

    def _rows(self, segment: Segment) -> np.ndarray:
        rows = np.zeros(len(segment.uids), dtype=self._dtype)
        rows["segment"] = segment.number
        rows["weight"] = self.selection.evaluate is None
        for name in {"length", "first_step", "row0", "base_row0", "base"}.intersection(self._dtype.names or ()):
            if (values := getattr(segment, name)) is not None:
                rows[name] = values
        if TASK[0] in (self._dtype.names or ()):
            rows["task"] = self._task_numbers(segment)
        if HISTORY[0][0] in (self._dtype.names or ()):
            self._describe_histories(segment, rows)
        return rows

    def _add_fields(self, segments: Sequence[Segment]) -> None:
        """Add the fields to the table that segments of this schema need, and widen those that are too narrow."""
        fields = {name: self._dtype[name].str for name in self._dtype.names or ()}
        for segment in segments:
            if segment.schema_id == self.schema.id:
                fields |= dict(BASE) if segment.is_overlay and BASE[0][0] not in fields else {}
                fields |= dict([PIECE]) if segment.first_step is not None else {}
                rows = {"row0": segment.row0, "base_row0": segment.base_row0}
                fields |= {name: _WIDE[name] for name in rows.keys() & fields if rows[name].dtype.itemsize > 4}
        dtype = np.dtype([*fields.items()])
        if dtype == self._dtype:
            return
        table = np.zeros(len(self._table), dtype=dtype)
        for name in self._dtype.names or ():
            table[name] = self._table[name]
        if BASE[0][0] in fields and BASE[0][0] not in (self._dtype.names or ()):  # nothing is an overlay yet
            table["base"], table["base_row0"] = table["segment"], table["row0"]
        self._dtype, self._table = dtype, table

    def _reserve(self, count: int) -> None:
        """Make room for so many further trajectories."""
        needed = self._used + count
        if needed > len(self._table):
            # Pages that were never written take no memory; copying 20 million rows takes most of a second.
            table = np.zeros(2 * needed, dtype=self._dtype)
            table[: self._used] = self.table
            self._table = table

    def _append(self, rows: np.ndarray) -> None:
        self._table[self._used : self._used + len(rows)] = rows
        self._used += len(rows)
        self.num_steps += int(rows["length"].sum())
        self._collected += _count_original_steps(rows)
        self.version += bool(len(rows))

    def _move(self, changed: Sequence[int]) -> None:
        """Rebuild the rows of these segments; a live trajectory keeps its per-trajectory fields, matched by uid."""
        known, numbers = np.ascontiguousarray(self.table["segment"]), np.array(changed)  # in order, like all segments
        starts, stops = (np.searchsorted(known, numbers, side=side).tolist() for side in ("left", "right"))
        segments = [self.live.segments[number] for number in changed]
        self._add_fields(segments)
        # May fail, so it comes first.
        fresh = [self._rows(new) if new.schema_id == self.schema.id else None for new in segments]
        self._moved.clear()
        running = self._running
        if running is not None:
            asked = np.append(running.asked, np.full(self._used - len(running.asked), -1))
        pieces, places, done = [], [], 0
        for number, new, rows, start, stop in zip(changed, segments, fresh, starts, stops, strict=True):
            old = self._taken[number]
            self._taken[number] = new
            self._file_of[number] = self._file(new)
            if rows is None:
                continue
            before = self.table[start:stop]
            place = positions(old.uids, new.uids)
            for name in set(self._dtype.names or ()) - ({*(ROW.names or ()), *dict([PIECE, *BASE])} - {"weight"}):
                rows[name] = np.where(place >= 0, before[name][place], rows[name]) if len(before) else rows[name]
            pieces += [self.table[done:start], rows]
            if running is not None:
                known = np.append(asked[start:stop], -1)  # the last one for a place of -1
                places += [asked[done:start], known[place]]
            done = stop
        if running is not None:
            running.asked = np.concatenate([*places, asked[done:]])
        table = np.concatenate([*pieces, self.table[done:]])
        self._table, self._used, self._told = table, len(table), 0
        self.num_steps, self._collected = int(table["length"].sum()), _count_original_steps(table)
        self.moves += 1
        self.version += 1

    def _task_numbers(self, segment: Segment) -> np.ndarray:
        """Return (n,) numbers of environment and task, read from the footer; of an unreadable one, that of ("", "")."""
        numbers = np.full(len(segment.uids), self._task_number("", ""))
        try:
            footer = self._footer(segment.file)
        except (FileNotFoundError, IntegrityError):
            return numbers
        table = footer.trajectories
        names = zip(table["env"].to_pylist(), table["task"].to_pylist(), strict=True)
        known = np.array([self._task_number(env or "", task or "") for env, task in names])
        place = positions(footer.uids(), segment.uids)
        return np.where(place >= 0, known[place], numbers)

    def _describe_histories(self, segment: Segment, rows: np.ndarray) -> None:
        """Read the fields `HISTORY` from the footer. If it cannot be read, no trajectory counts as one of a history."""
        try:
            footer = self._footer(segment.file)
        except (FileNotFoundError, IntegrityError):
            return
        numbers = hash_names(footer.trajectories["history"])
        if numbers is None:
            return
        place = positions(footer.uids(), segment.uids)
        index, returns = (footer.trajectories[name].fill_null(0).to_numpy() for name in ("history_index", "return"))
        for name, values in zip((name for name, _ in HISTORY), (numbers, index, returns), strict=True):
            rows[name] = np.where(place >= 0, values[place], 0)

    def _footer(self, file: str) -> Footer:
        if self._last_footer is None or self._last_footer[0] != file:
            self._last_footer = file, read_footer(self.lake.storage, file)
        return self._last_footer[1]

    def _task_number(self, env: str, task: str) -> int:
        return self.tasks.setdefault((env, task), len(self.tasks))


def _count_original_steps(rows: np.ndarray) -> int:
    return int(rows["length"][bases(rows) == rows["segment"]].sum())
