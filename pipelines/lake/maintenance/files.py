"""The files of a lake with their ages, sizes and live trajectories, for maintenance.

A refresh costs as much as there is new: a footer is read once, and liveness is computed again only for files of which
something was moved or removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from pipelines.errors import AmagoError
from pipelines.events import Listener, silent
from pipelines.lake.folders import COPIED, is_rewritten, written_by
from pipelines.lake.footer import Footer, read_footer, uid_array
from pipelines.lake.live import LiveTable
from pipelines.lake.segment import stored_bytes
from pipelines.lake.uids import positions

if TYPE_CHECKING:
    from pipelines.lake.store import Lake


@dataclass(frozen=True, eq=False)
class File:
    """A segment's file with n trajectories, of which `alive` (n,) bool are live.

    `uids` (n,) "S16"; `steps` (n,) int64, actions; `times` (n,) float64, when each was first committed; `collectors`
    (n,) their names; `episodes` as of `Footer.episodes`. For an overlay: `base_ids` (n,) names of the bases' segments,
    `base_uids` (n,) "S16". `replaces`: index of the first trajectory and number of those that come from a segment of
    another id.
    """

    id: str
    kind: tuple[str, bool, tuple[str, ...]]
    bytes: int
    replaces: Mapping[str, tuple[int, int]]
    uids: np.ndarray
    steps: np.ndarray
    times: np.ndarray
    collectors: np.ndarray
    episodes: np.ndarray | None
    base_ids: np.ndarray
    base_uids: np.ndarray
    alive: np.ndarray

    @property
    def is_overlay(self) -> bool:
        return self.kind[1]

    @property
    def row_bytes(self) -> np.ndarray:
        """(n,) float64: the share of each trajectory in the file's bytes, by its rows."""
        rows = (self.steps + 1).astype(np.float64)
        return rows * (self.bytes / max(rows.sum(), 1.0))

    @cached_property
    def live_bytes(self) -> float:
        return float(self.row_bytes[self.alive].sum())

    @cached_property
    def live_steps(self) -> int:
        return int(self.steps[self.alive].sum())

    def named(self, ids: Collection[str]) -> np.ndarray:
        """Return (n,) bool: which trajectories come from the segments `ids`, also through rewriting."""
        found = np.full(len(self.uids), self.id in ids)
        for old, (first, count) in self.replaces.items():
            if old in ids:
                found[first : first + count] = True
        return found


@dataclass
class FileTable:
    """The files of a lake that are not removed as a whole, by id; `log` is the lake's. `only`: which segments to look
    at, by id."""

    lake: Lake
    listener: Listener = silent
    only: Callable[[str], bool] = lambda id: True
    files: dict[str, File] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.live = LiveTable(self.lake, self.listener, self.only, reads_log=True)
        self.log = self.live.log

    def refresh(self) -> None:
        """Pick up files that were added, rewritten or removed."""
        segments, before = self.live.segments, len(self.live.segments)
        changed = self.live.refresh().changed
        touched = {segments[number].file for number in (*changed, *range(before, len(segments)))}
        for id in sorted(touched | (self.files.keys() - self.live.files.keys())):
            self._look(id)

    def file_of(self, id: str) -> File | None:
        """Return the file that holds the trajectories of segment `id` now; None if they are removed."""
        return self.files.get(self.live.file_of(id))

    def _look(self, id: str) -> None:
        numbers = self.live.files.get(id)
        if not numbers or self.log.hides(id):
            self.files.pop(id, None)
            return
        uids = np.sort(np.concatenate([self.live.segments[number].uids for number in numbers]))
        try:
            file = self.files.get(id) or _describe(id, self.lake, read_footer(self.lake.storage, id))
        except (FileNotFoundError, AmagoError):  # gone or damaged since it was listed
            self.files.pop(id, None)
            return
        self.files[id] = replace(file, alive=positions(uids, file.uids, np.arange(len(uids))) >= 0)


def live_steps(lake: Lake, label: str) -> Counter[str]:
    """Count the live steps of each collector, overlays apart, in the segments of writers whose names begin with `label`
    and in those rewritten or copied from others. Footers of other segments are not read."""

    def may_count(id: str) -> bool:
        writer, _, is_overlay = written_by(id)
        return not is_overlay and (is_rewritten(id) or writer.startswith((label, f"{COPIED}.")))

    table, found = FileTable(lake, only=may_count), Counter[str]()
    table.refresh()
    for file in table.files.values():
        for name, steps in zip(file.collectors[file.alive], file.steps[file.alive].tolist(), strict=True):
            found[name] += steps
    return found


def _describe(id: str, lake: Lake, footer: Footer) -> File:
    table = footer.trajectories
    overlay = footer.is_overlay
    return File(
        id=id,
        kind=(footer.header["schema"], overlay, footer.columns),
        bytes=stored_bytes(lake.storage, id),
        replaces={old: footer.part(old) for old in footer.replaces},
        uids=footer.uids(),
        steps=table["length"].to_numpy(),
        times=table["t_commit"].to_numpy(),
        collectors=np.array([str(name or "") for name in table["collector"].to_pylist()], dtype=object),
        episodes=footer.episodes(),
        base_ids=np.array(table["base_segment"].to_pylist() if overlay else [], dtype=object),
        base_uids=uid_array(table["base_uid"]) if overlay else np.zeros(0, "S16"),
        alive=np.zeros(table.num_rows, dtype=bool),
    )
