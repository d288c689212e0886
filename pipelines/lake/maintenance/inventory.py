"""What a lake holds file by file, as maintenance needs it: ages, sizes, and what is dead in them.

A refresh costs what is new: a footer is read once, and what is live is compared again only where something moved
or died.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from pipelines.errors import AmagoError
from pipelines.events import Listener, silent
from pipelines.lake.follower import Follower
from pipelines.lake.footer import Footer, read_footer, uid_array
from pipelines.lake.segment import stored_bytes
from pipelines.lake.uids import positions

if TYPE_CHECKING:
    from pipelines.lake.store import Lake


@dataclass(frozen=True, eq=False)
class File:
    """A segment's file with n trajectories, dead ones among them: `alive` (n,) bool.

    `uids` (n,) "S16"; `steps` (n,) int64, actions; `times` (n,) float64, when each was first committed; `collectors`
    (n,) their names. Of an overlay: `base_ids` (n,) names of the bases' segments, `base_uids` (n,) "S16". `replaces`:
    first trajectory and number of those that come from a segment of another id.
    """

    id: str
    kind: tuple[str, bool, tuple[str, ...]]
    bytes: int
    replaces: Mapping[str, tuple[int, int]]
    uids: np.ndarray
    steps: np.ndarray
    times: np.ndarray
    collectors: np.ndarray
    base_ids: np.ndarray
    base_uids: np.ndarray
    alive: np.ndarray

    @property
    def is_overlay(self) -> bool:
        return self.kind[1]

    @property
    def names(self) -> tuple[str, ...]:
        """Its id and those of all that it was rewritten from."""
        return (self.id, *self.replaces)

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
        """(n,) bool: which trajectories come from the segments `ids`, whatever was rewritten since."""
        found = np.full(len(self.uids), self.id in ids)
        for old, (first, count) in self.replaces.items():
            if old in ids:
                found[first : first + count] = True
        return found


@dataclass
class Inventory:
    """The files of a lake that are not hidden as a whole, by id. `hidden` says what is."""

    lake: Lake
    listener: Listener = silent
    files: dict[str, File] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.follower = Follower(self.lake, self.listener)
        self.hidden = self.follower.hidden
        self._lying: dict[str, set[int]] = {}  # file -> places of the follower's segments whose trajectories it has
        self._file_of: list[str] = []

    def refresh(self) -> None:
        """Take in what is new, what moved and what died."""
        segments, before = self.follower.segments, len(self.follower.segments)
        changed = self.follower.refresh().changed
        touched: set[str] = set()
        for number in (*changed, *range(before, len(segments))):
            file = segments[number].file
            if number < before:
                touched.add(self._file_of[number])
                self._lying[self._file_of[number]].discard(number)
                self._file_of[number] = file
            else:
                self._file_of.append(file)
            self._lying.setdefault(file, set()).add(number)
            touched.add(file)
        for id in sorted(touched):
            self._look(id)

    def lies_in(self, id: str) -> File | None:
        """The file that has the trajectories of segment `id` now; None if they are out of sight."""
        return self.files.get(self.follower.lies_in(id))

    def _look(self, id: str) -> None:
        numbers = self._lying.get(id)
        if not numbers or self.hidden.hides(id):
            self.files.pop(id, None)
            return
        uids = np.sort(np.concatenate([self.follower.segments[number].uids for number in numbers]))
        try:
            file = self.files.get(id) or _describe(id, self.lake, read_footer(self.lake.storage, id))
        except (FileNotFoundError, AmagoError):  # gone or damaged since the follower read it
            self.files.pop(id, None)
            return
        self.files[id] = replace(file, alive=positions(uids, file.uids, np.arange(len(uids))) >= 0)


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
        base_ids=np.array(table["base_segment"].to_pylist() if overlay else [], dtype=object),
        base_uids=uid_array(table["base_uid"]) if overlay else np.zeros(0, "S16"),
        alive=np.zeros(table.num_rows, dtype=bool),
    )
