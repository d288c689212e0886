"""Reading whole trajectories by uid, overlays applied."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pipelines.errors import InputMissing
from pipelines.events import Listener, silent
from pipelines.lake.follower import Follower, Segment
from pipelines.lake.footer import hex_uids, info_of, read_footer
from pipelines.lake.maintenance.integrity import Checked
from pipelines.lake.segment import SegmentFile, open_segment
from pipelines.lake.trajectory import Trajectory, TrajectoryInfo
from pipelines.lake.uids import place_of

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

OPEN_FILES = 64


class Reader:
    """Random access to the trajectories of a lake. An unknown uid refreshes once before InputMissing.

    `verify`: the checksums of a file are compared when it is read for the first time.
    """

    def __init__(self, lake: Lake, *, listener: Listener = silent, verify: bool = False) -> None:
        self.lake = lake
        self.follower = Follower(lake, listener)
        self._files: OrderedDict[str, SegmentFile] = OrderedDict()
        self._checked = Checked(wanted=verify)
        self._tables: OrderedDict[str, tuple[pa.Table, dict[str, int]]] = OrderedDict()
        self._known: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def refresh(self) -> None:
        """Take in what is new in the lake, what was rewritten and what has died."""
        before = len(self.follower.segments)
        if self.follower.refresh().changed or len(self.follower.segments) > before:
            self._known = None

    def uids(self) -> list[str]:
        """Every live trajectory, in the lake's order."""
        self.refresh()
        return [uid for segment in self.follower.segments for uid in hex_uids(segment.uids)]

    def lives(self, uid: str) -> bool:
        """Whether there is such a trajectory now."""
        self.refresh()
        return self._find(uid) is not None

    def locate(self, uid: str) -> tuple[Segment, int]:
        """The segment of a trajectory and its place in it."""
        found = self._find(uid)
        if found is None:
            self.refresh()
            found = self._find(uid)
        if found is None:
            raise InputMissing(f"lake '{self.lake.name}' has no trajectory {uid}")
        return found

    def _find(self, uid: str) -> tuple[Segment, int] | None:
        """Looked up in arrays: 24 bytes a trajectory, sorted anew when something changed."""
        if self._known is None:
            segments = self.follower.segments
            uids = np.concatenate([np.zeros(0, "S16"), *(segment.uids for segment in segments)])
            first = np.cumsum([0, *(len(segment.uids) for segment in segments)])
            order = np.argsort(uids)
            self._known = uids[order], order, first
        uids, order, first = self._known
        place = place_of(uids, uid)
        if place is None:
            return None
        number = int(np.searchsorted(first, order[place], side="right")) - 1
        return self.follower.segments[number], int(order[place] - first[number])

    def file(self, number: int) -> SegmentFile:
        """The mapped file in which the trajectories of a segment lie; the last few stay open."""
        segment = self.follower.segments[number]
        if segment.file not in self._files:
            columns = self.lake.schema(segment.schema_id).columns
            check = self._checked.check(segment.file)
            self._files[segment.file] = open_segment(self.lake.storage, segment.file, columns, check=check)
            while len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)
        self._files.move_to_end(segment.file)
        return self._files[segment.file]

    def info(self, uid: str) -> TrajectoryInfo:
        return info_of(self.row(uid))

    def read(self, uid: str) -> Trajectory:
        """A copy of a trajectory. IntegrityError when its segment is damaged."""
        try:
            return self._read(uid)
        except FileNotFoundError:  # rewritten and swept since the last look
            self.refresh()
            return self._read(uid)

    def row(self, uid: str) -> Mapping[str, Any]:
        """The trajectory's row in the footer of its segment."""
        segment, _ = self.locate(uid)
        if segment.file not in self._tables:
            footer = read_footer(self.lake.storage, segment.file)
            places = {uid: i for i, uid in enumerate(hex_uids(footer.uids()))}
            self._tables[segment.file] = footer.trajectories, places
            while len(self._tables) > OPEN_FILES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(segment.file)
        table, places = self._tables[segment.file]
        return table.slice(places[uid], 1).to_pylist()[0]

    def _read(self, uid: str) -> Trajectory:
        segment, place = self.locate(uid)
        rows = int(segment.length[place]) + 1
        own, start = self.file(segment.number), int(segment.row0[place])
        base, base_start = own, start
        if segment.bases is not None:
            base, base_start = self.file(int(segment.bases[0][place])), int(segment.bases[1][place])
        columns: dict[str, np.ndarray] = {}
        for column in self.lake.schema(segment.schema_id).columns:
            file, row = (own, start) if column.name in segment.columns else (base, base_start)
            columns[column.name] = file.read_rows(column.name, row, row + rows)
        return Trajectory(columns=columns, info=self.info(uid), uid=uid)


def read(lake: Lake, uid: str) -> Trajectory:
    """One trajectory by its uid. InputMissing if the lake has none such."""
    return Reader(lake).read(uid)


def trajectories(lake: Lake, where: str | None = None, *, listener: Listener = silent) -> Iterator[Trajectory]:
    """The trajectories that are live now, one at a time, but for those that expire before it is their turn; `where`
    is a SQL predicate over the `trajectories` table.
    """
    reader = Reader(lake, listener=listener)
    uids = reader.uids()
    if where is not None:
        from pipelines.lake.sql.selection import select

        chosen = set(hex_uids(select(lake, where, listener=listener).uids))
        uids = [uid for uid in uids if uid in chosen]
    for uid in uids:
        try:
            trajectory = reader.read(uid)
        except InputMissing:
            continue
        yield trajectory
