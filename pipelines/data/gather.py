"""Copying windows out of mapped segments.

The windows of a batch are ordered by file. Where several lie in one file, one `take` of all their rows is the
fastest copy there is in numpy; where a file has few, plain slices are.
"""

from __future__ import annotations

import sys
from collections import OrderedDict

import numpy as np

from pipelines.data.batch import Batch
from pipelines.data.view import View
from pipelines.errors import IntegrityError
from pipelines.lake.blob import BlobCache
from pipelines.lake.segment import SegmentFile, open_segment

OPEN_FILES = 256
TAKE_FROM = 4  # windows in one file from which on a gather beats slices


class SegmentLost(Exception):
    """Segment `number` of the view's follower can no longer be read."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


class Gatherer:
    """Reads windows of `rows` rows of a view. Keeps the last 256 segments mapped."""

    def __init__(self, view: View, rows: int) -> None:
        self._view, self._rows = view, rows
        self._files: OrderedDict[str, SegmentFile] = OrderedDict()
        self._follower = view.follower
        self._cache = BlobCache()
        self._pool: list[dict[str, np.ndarray]] = []
        self._steps = np.arange(rows)

    def gather(self, chosen: np.ndarray, start: np.ndarray) -> Batch:
        """Windows that begin at row `start` of the trajectories `chosen` (rows of the view's table)."""
        if self._follower is not self._view.follower:
            self._files.clear()
            self._follower = self._view.follower
        table = self._view.table[chosen]
        order = np.lexsort((table["row0"] + start.astype(np.uint64), table["segment"]))
        table, start = table[order], start[order]
        lengths = np.minimum(table["length"].astype(np.int64) + 1 - start, self._rows)
        out = self._buffers(len(order))
        edges = np.flatnonzero(np.diff(table["segment"], prepend=-1, append=-1))
        for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            self._gather_segment(table[a:b], start[a:b], {name: buffer[a:b] for name, buffer in out.items()})
        for i in np.flatnonzero(lengths < self._rows).tolist():
            for buffer in out.values():
                buffer[i, lengths[i] :] = 0
        return Batch(columns={name: buffer[:] for name, buffer in out.items()}, lengths=lengths, start=start)

    def _gather_segment(self, table: np.ndarray, start: np.ndarray, out: dict[str, np.ndarray]) -> None:
        segment = self._follower.segments[int(table["segment"][0])]
        own = {name: out[name] for name in segment.columns}
        self._copy(segment.number, table["row0"].astype(np.int64) + start, own)
        if not segment.is_overlay:
            return
        rest = [name for name in out if name not in own]
        for base in np.unique(table["base"]).tolist():
            places = np.flatnonzero(table["base"] == base)
            parts = {name: np.empty((len(places), *out[name].shape[1:]), out[name].dtype) for name in rest}
            self._copy(base, table["base_row0"][places].astype(np.int64) + start[places], parts)
            for name in rest:
                out[name][places] = parts[name]

    def _copy(self, number: int, rows: np.ndarray, out: dict[str, np.ndarray]) -> None:
        """Rows [r, r + window) of a file for every r in `rows`; past the file's end anything is left."""
        try:
            self._copy_from(self._file(number), rows, out)
        except (IntegrityError, FileNotFoundError) as error:
            self._files.pop(self._follower.segments[number].file, None)
            raise SegmentLost(number, str(error)) from error

    def _copy_from(self, file: SegmentFile, rows: np.ndarray, out: dict[str, np.ndarray]) -> None:
        gathered = len(rows) >= TAKE_FROM
        index = rows[:, None] + self._steps if gathered else np.zeros(0, dtype=np.int64)
        bounds = [] if gathered else [(i, r, min(r + self._rows, file.rows)) for i, r in enumerate(rows.tolist())]
        for name, target in out.items():
            source = file.columns.get(name)
            if source is None:
                for i, r in enumerate(rows.tolist()):
                    stop = min(r + self._rows, file.rows)
                    file.copy_rows(name, r, stop, target[i, : stop - r])
            elif gathered:
                np.take(source, index, axis=0, out=target, mode="clip")
            else:
                for i, r, stop in bounds:
                    target[i, : stop - r] = source[r:stop]

    def _file(self, number: int) -> SegmentFile:
        id = self._follower.segments[number].file
        if id not in self._files:
            storage, columns = self._view.lake.storage, self._view.schema.columns
            self._files[id] = open_segment(storage, id, columns, scattered=True, cache=self._cache)
            while len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)
        self._files.move_to_end(id)
        return self._files[id]

    def _buffers(self, size: int) -> dict[str, np.ndarray]:
        """Arrays (size, rows, *shape) that nobody holds: fresh pages cost as much as the copy into them."""
        for buffers in self._pool:
            if all(len(b) == size and sys.getrefcount(b) <= _HELD for b in buffers.values()):
                return buffers
        buffers = {c.name: np.empty((size, self._rows, *c.shape), dtype=c.dtype) for c in self._view.schema.columns}
        self._pool = [*self._pool[-3:], buffers]
        return buffers


def _held() -> int:
    """References that a loop over a dictionary's own values counts for an array nobody else has."""
    buffers = {"x": np.empty(1)}
    return max(sys.getrefcount(b) if len(b) else 0 for b in buffers.values())


_HELD = _held()
