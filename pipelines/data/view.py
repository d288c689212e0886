"""A view: the trajectories a trainer may draw from, as a numpy table of 32 bytes a trajectory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pipelines.errors import InputMissing
from pipelines.events import Listener, Notice, silent
from pipelines.lake.follower import Follower
from pipelines.lake.schema import Schema
from pipelines.lake.store import Lake

ROW = np.dtype(
    [
        ("segment", "u4"),  # where the trajectory's own columns lie
        ("length", "u4"),  # actions; rows are one more
        ("row0", "u8"),
        ("base_row0", "u8"),
        ("base", "u4"),  # where its other columns lie: another segment for an overlay
        ("weight", "f4"),
    ]
)


class View:
    """Live trajectories of one schema, in the order in which they were seen; `uids` restricts it to some.

    `refresh` adds what is new. `snapshot` and `restore` rebuild the same table in another process, so that
    the same draws follow. `version` changes with the table or its weights.
    """

    def __init__(
        self, lake: Lake, schema_id: str, *, uids: Iterable[str] | None = None, listener: Listener = silent
    ) -> None:
        self.lake = lake
        self.schema: Schema = lake.schema(schema_id)
        self._chosen = None if uids is None else np.array([bytes.fromhex(u) for u in uids], dtype="S16")
        self._listener = listener
        self._clear()

    def _clear(self) -> None:
        self.follower = Follower(self.lake, self._listener)
        self._table = np.zeros(64, dtype=ROW)
        self._used = 0
        self._taken = 0
        self._dropped: list[str] = []
        self.num_steps = 0
        self.version = 0

    @property
    def table(self) -> np.ndarray:
        """(num_trajectories,) of `ROW`; read it, and change weights by `set_weights`."""
        return self._table[: self._used]

    @property
    def num_trajectories(self) -> int:
        return self._used

    def refresh(self) -> int:
        """Take in what is new in the lake; returns the number of new trajectories of this view."""
        self.follower.refresh()
        return self._take()

    def set_weights(self, weights: np.ndarray) -> None:
        """Relative weights (num_trajectories,) >= 0; what is added later has weight 1."""
        self.table["weight"] = weights
        self.version += 1

    def drop(self, number: int, reason: str) -> None:
        """Draw no more from a segment of the follower (nor from overlays of it): it cannot be read."""
        lost = (self.table["segment"] == number) | (self.table["base"] == number)
        self.table["weight"][lost] = 0.0
        self.version += 1
        self._dropped.append(self.follower.segments[number].id)
        text = f"{reason}; its {int(lost.sum())} trajectories are passed over"
        self._listener(Notice(text=text, level="warning"))

    def snapshot(self) -> dict[str, Any]:
        """What `restore` needs, as JSON carries it: the segments in the order in which they were seen."""
        return {
            "lake": self.lake.id,
            "schema": self.schema.id,
            "segments": [segment.id for segment in self.follower.segments],
            "dropped": list(self._dropped),
            "trajectories": self._used,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Become the view of `snapshot` again. InputMissing for another lake or schema; a Notice if segments
        are gone.
        """
        if (snapshot["lake"], snapshot["schema"]) != (self.lake.id, self.schema.id):
            raise InputMissing(f"lake '{self.lake.name}' is not the one that was drawn from before")
        self._clear()
        self.follower.restore(snapshot["segments"])
        self._take()
        for segment in self.follower.segments:
            if segment.id in snapshot["dropped"]:
                self.drop(segment.number, f"segment '{segment.id}' could not be read before")
        if self._used != snapshot["trajectories"]:
            text = (
                f"lake '{self.lake.name}' has {self._used} of the {snapshot['trajectories']} trajectories "
                "that were drawn from before: what follows is not a repetition"
            )
            self._listener(Notice(text=text, level="warning"))

    def _take(self) -> int:
        before = self._used
        for segment in self.follower.segments[self._taken :]:
            if segment.schema_id != self.schema.id:
                continue
            chosen = slice(None) if self._chosen is None else np.isin(segment.uids, self._chosen)
            rows = np.zeros(len(segment.uids[chosen]), dtype=ROW)
            rows["segment"] = segment.number
            rows["weight"] = 1.0
            for name in ("length", "row0", "base_row0", "base"):
                rows[name] = getattr(segment, name)[chosen]
            self._append(rows)
        self._taken = len(self.follower.segments)
        return self._used - before

    def _append(self, rows: np.ndarray) -> None:
        needed = self._used + len(rows)
        if needed > len(self._table):
            table = np.zeros(max(needed, 2 * len(self._table)), dtype=ROW)
            table[: self._used] = self.table
            self._table = table
        self._table[self._used : needed] = rows
        self._used = needed
        self.num_steps += int(rows["length"].sum())
        self.version += bool(len(rows))
