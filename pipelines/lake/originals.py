"""Reading many original trajectories at a time: those of a segment, as columns laid one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from pipelines.errors import StageFailed
from pipelines.events import Listener, silent
from pipelines.lake.follower import Segment
from pipelines.lake.footer import read_footer, uid_array
from pipelines.lake.reading import Reader
from pipelines.lake.segment import SegmentFile
from pipelines.lake.uids import positions

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

LOOKS = 5  # for a segment whose file is rewritten and removed meanwhile


@dataclass(frozen=True)
class Portion:
    """Trajectories of the segment `id`: their rows of its footer, their `uids` (n,) "S16", the first `row0` (n,) and
    the number `rows` (n,) of the rows of each in `file`. It stays readable whatever becomes of the file.
    """

    id: str
    file: SegmentFile
    table: pa.Table
    uids: np.ndarray
    row0: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.uids)

    def envs(self) -> tuple[list[str], np.ndarray]:
        """Names of environments, and which of them each trajectory is from (n,)."""
        names = self.table["env"].combine_chunks().dictionary_encode()
        return names.dictionary.to_pylist(), names.indices.to_numpy()

    def only(self, which: np.ndarray) -> Portion:
        """Some of them; `which` (m,) whole numbers in order."""
        if len(which) == len(self):
            return self
        table = self.table.take(pa.array(which))
        return replace(self, table=table, uids=self.uids[which], row0=self.row0[which], rows=self.rows[which])

    def chunks(self, names: Sequence[str], most: int) -> Iterator[Portion]:
        """One after the other, as many at a time as have about `most` bytes in these columns, one at least."""
        step_bytes = sum(c.step_bytes for c in self.file.schema_columns if c.name in names)
        ends = np.cumsum(self.rows * step_bytes)
        first = done = 0
        while first < len(ends):
            stop = max(first + 1, int(np.searchsorted(ends, done + most, side="right")))
            yield self.only(np.arange(first, stop))
            first, done = stop, int(ends[stop - 1])

    def columns(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """(R, ...) each: views of the file where the trajectories lie together in it."""
        starts, stops = self.row0, self.row0 + self.rows
        breaks = np.flatnonzero(starts[1:] != stops[:-1]) + 1
        spans = list(zip(starts[[0, *breaks]].tolist(), stops[[*(breaks - 1), -1]].tolist(), strict=True))
        found = {}
        for name in names:
            values = self.file.columns.get(name)
            parts = [self.file.read_rows(name, a, b) if values is None else values[a:b] for a, b in spans]
            found[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return found


class Originals:
    """The live trajectories of a lake that derive from no other, as of the last `refresh`."""

    def __init__(self, lake: Lake, *, listener: Listener = silent) -> None:
        self._lake, self._reader = lake, Reader(lake, listener=listener)
        self._reader.refresh()

    def segments(self) -> list[Segment]:
        """Those that hold originals."""
        return [segment for segment in self._reader.follower.segments if not segment.is_overlay]

    def derived(self) -> np.ndarray:
        """(n,) "S16" uids of the others, sorted."""
        overlays = [segment.uids for segment in self._reader.follower.segments if segment.is_overlay]
        return np.sort(np.concatenate([np.zeros(0, "S16"), *overlays]))

    def portion(self, number: int, uids: np.ndarray) -> Portion | None:
        """Those of `uids` that live, of the segment `number`, in the order in which they lie in its file; None if none
        does.
        """
        for _ in range(LOOKS):
            segment = self._reader.follower.segments[number]
            live = uids[positions(segment.uids, uids) >= 0]
            if not len(live):
                return None
            try:
                file, footer = self._reader.file(number), read_footer(self._lake.storage, segment.file)
            except FileNotFoundError:  # rewritten and swept since the last look
                self._reader.refresh()
                continue
            table = footer.trajectories.take(pa.array(np.sort(positions(footer.uids(), live))))
            row0, rows = table["row0"].to_numpy(), table["length"].to_numpy() + 1
            return Portion(segment.id, file, table, uid_array(table["uid"]), row0, rows)
        raise StageFailed(f"files of lake '{self._lake.name}' vanish while they are read", hint="repeat the command")
