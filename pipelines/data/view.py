"""A view: the trajectories that a trainer may draw from, as a numpy table of 36 bytes per trajectory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from pipelines.data.histories import HISTORY
from pipelines.errors import InputMissing, IntegrityError, UsageError
from pipelines.events import Listener, Notice, silent
from pipelines.lake.footer import Footer, hash_names, read_footer
from pipelines.lake.live import Findings, LiveTable, Segment
from pipelines.lake.schema import Schema
from pipelines.lake.store import Lake
from pipelines.lake.uids import positions

ROW = np.dtype(
    [
        ("segment", "u4"),  # location of the trajectory's own columns
        ("length", "u4"),  # actions; rows are one more
        ("first_step", "u4"),  # time of row 0 in the episode, of which the trajectory may be a piece
        ("row0", "u8"),
        ("base_row0", "u8"),
        ("base", "u4"),  # location of its other columns: another segment for an overlay
        ("weight", "f4"),
    ]
)
TASK = ("task", "u4")  # number of its environment and task, in order of appearance
_NO_PIECES = -1  # version of a table whose neighbours were not looked for
PRIORITY = (("priority", "f4"), ("measured", "?"))  # 0 until the sampler gives it one


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Trajectories of a lake to draw from, and how often: SQL over its `trajectories` table."""

    where: str = ""
    weight: str = ""
    evaluate: Callable[[np.ndarray], np.ndarray] | None = None
    """Maps uids (n,) "S16" to relative weights (n,), 0 if not selected; None: all equal."""


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
    same draws follow. `version` changes with the table or its weights. `extra` are fields of the table in addition to
    those of `ROW`: `TASK`, `PRIORITY`.
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
    ) -> None:
        self.lake, self.verify = lake, verify
        self.schema: Schema = lake.schema(schema_id)
        self.selection = selection or Selection()
        self.version = 0
        self._dtype = np.dtype([*ROW.descr, *extra])
        self._listener = listener
        self._clear()

    def _clear(self) -> None:
        self.live = LiveTable(self.lake, self._listener)
        self.tasks: dict[tuple[str, str], int] = {}
        self._moved: set[int] = set()  # changed segments, not applied yet
        self._unselected = True  # the table has changed since the selection was evaluated
        self.num_steps = 0
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
        """Environment steps put into the lake so far, expired ones included; overlays repeat steps and do not count."""
        collected = self.table["base"] == self.table["segment"]
        return int(self.table["length"][collected].sum()) + self.live.log.steps.total()

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
        begin = table["first_step"][rows].astype(np.int64)
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

    def refresh(self, findings: Findings | None = None) -> int:
        """Apply the lake's additions, moves and removals; return the number of new trajectories of this view.
        `findings`: those of another process (None: look).

        The selection is evaluated once if anything changed, and at the first refresh.
        """
        before = self.version
        self._unselected |= not self._taken
        try:
            found = self.live.refresh() if findings is None else self.live.repeat(findings)
            self._moved.update(n for n in found.changed if n < len(self._taken))
            if self._moved:
                self._move(sorted(self._moved))
            added = self._take()
        finally:
            self._unselected |= self.version != before
        if self._unselected:
            self._select()
        return added

    def set_weights(self, weights: np.ndarray) -> None:
        """Set relative weights (num_trajectories,) >= 0. UsageError for an invalid weight."""
        with np.errstate(over="ignore"):
            self.table["weight"] = weights
        if not (np.isfinite(self.table["weight"]) & (self.table["weight"] >= 0)).all():
            raise UsageError(
                f"lake '{self.lake.name}': a weight is negative, or not a number that a draw can use",
                hint="--weight must give finite numbers of 0 or more",
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
        self.version += 1
        text = f"{reason}; its {int(lost.sum())} trajectories are passed over"
        self._listener(Notice(text=text, level="warning"))

    def _reads(self, ids: Collection[str]) -> np.ndarray:
        """Return (num_trajectories,) bool: which are in one of these segments, or in overlays of them."""
        numbers = [segment.number for segment in self._taken if segment.id in ids]
        return np.isin(self.table["segment"], numbers) | np.isin(self.table["base"], numbers)

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

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Rebuild the view of `snapshot`, wherever its trajectories are now. InputMissing for another lake or schema; a
        Notice if trajectories are gone."""
        if (snapshot["id"], snapshot["schema"]) != (self.lake.id, self.schema.id):
            raise InputMissing(f"lake '{self.lake.name}' is not the one that was drawn from before")
        self._clear()
        self.live.restore(snapshot["segments"])
        self._take()
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
        if self.selection.evaluate is not None:
            self.set_weights(self.selection.evaluate(self.uids()))
        self._unselected = False

    def _take(self) -> int:
        before = self._used
        for segment in self.live.segments[len(self._taken) :]:
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
        rows["weight"] = 1.0
        for name in ("length", "first_step", "row0", "base_row0", "base"):
            rows[name] = getattr(segment, name)
        if TASK[0] in (self._dtype.names or ()):
            rows["task"] = self._task_numbers(segment)
        if HISTORY[0][0] in (self._dtype.names or ()):
            self._describe_histories(segment, rows)
        return rows

    def _append(self, rows: np.ndarray) -> None:
        needed = self._used + len(rows)
        if needed > len(self._table):
            table = np.zeros(max(needed, 2 * len(self._table)), dtype=self._dtype)
            table[: self._used] = self.table
            self._table = table
        self._table[self._used : needed] = rows
        self._used = needed
        self.num_steps += int(rows["length"].sum())
        self.version += bool(len(rows))

    def _move(self, changed: Sequence[int]) -> None:
        """Rebuild the rows of these segments; a live trajectory keeps its per-trajectory fields, matched by uid."""
        known, numbers = np.ascontiguousarray(self.table["segment"]), np.array(changed)  # in order, like all segments
        starts, stops = (np.searchsorted(known, numbers, side=side).tolist() for side in ("left", "right"))
        segments = [self.live.segments[number] for number in changed]
        # May fail, so it comes first.
        fresh = [self._rows(new) if new.schema_id == self.schema.id else None for new in segments]
        self._moved.clear()
        pieces, done = [], 0
        for number, new, rows, start, stop in zip(changed, segments, fresh, starts, stops, strict=True):
            old = self._taken[number]
            self._taken[number] = new
            self._file_of[number] = self._file(new)
            if rows is None:
                continue
            before = self.table[start:stop]
            place = positions(old.uids, new.uids)
            for name in set(self._dtype.names or ()) - (set(ROW.names or ()) - {"weight"}):
                rows[name] = np.where(place >= 0, before[name][place], rows[name]) if len(before) else rows[name]
            pieces += [self.table[done:start], rows]
            done = stop
        table = np.concatenate([*pieces, self.table[done:]])
        self._table, self._used = table, len(table)
        self.num_steps = int(table["length"].sum())
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
        """Read the fields `HISTORY` from the footer; of an unreadable one, none has a history."""
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
