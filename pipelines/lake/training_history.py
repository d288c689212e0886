"""Which updates of a run could draw a given trajectory, as the run's newest checkpoint records."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.config.checkpoint_place import numbers
from pipelines.config.run_directory import RunDirectory
from pipelines.errors import AmagoError
from pipelines.lake.checkpoint_data import read_snapshots
from pipelines.lake.live import LiveTable
from pipelines.lake.sql.selection import select
from pipelines.lake.store import Lake
from pipelines.lake.uids import positions

_MOST_RUNS = 200  # of one directory


class TrainingHistory:
    """The runs that trained on a lake: its own, those beside it, and `more`. Calls may come from several threads."""

    def __init__(self, lake: Lake, more: tuple[Path, ...] = ()) -> None:
        self._lake, self._more = lake, more
        self._tables: dict[tuple[Path, int], LiveTable] = {}
        self._lock = threading.Lock()

    def updates(self, uid: str, segment: str) -> list[dict[str, Any]]:
        """Return `run`, `first` (the update from which on the trajectory could be drawn) and `checkpoints` (those that
        are kept from there on) for each run that trained on it. `segment`: where the trajectory is now.
        """
        found = []
        for directory in self._runs():
            try:
                _, newest, snapshots = read_snapshots(directory, "latest")
                snapshot = next(each for each in snapshots if each["id"] == self._lake.id)
                first = self._first(directory, newest, snapshot, uid, segment)
            except (AmagoError, StopIteration, OSError):
                continue
            if first is not None:
                kept = [update for update in numbers(directory.checkpoints) if update >= first]
                found.append({"run": str(directory.path), "first": first, "checkpoints": kept})
        return found

    def _runs(self) -> Iterator[RunDirectory]:
        own = self._lake.run
        beside = []
        if own is not None and own.parent.is_dir():
            beside = sorted(path for path in own.parent.iterdir() if path.is_dir())[:_MOST_RUNS]
        seen: set[Path] = set()
        for path in (*([own] if own else []), *self._more, *beside):
            place = path.resolve()
            if place not in seen and RunDirectory(path).exists():
                seen.add(place)
                yield RunDirectory(path)

    def _first(
        self, directory: RunDirectory, newest: int, snapshot: Mapping[str, Any], uid: str, segment: str
    ) -> int | None:
        """Return the first update whose view had the trajectory; None if none had."""
        segments: list[str] = snapshot["segments"]
        if segment not in segments:  # rewritten since
            segment = self._original(directory, newest, snapshot, uid) or ""
        if segment not in segments or segment in snapshot["dropped"]:
            return None
        count = segments.index(segment) + 1
        first = min((int(at) for at, seen in snapshot["history"] if seen >= count), default=None)
        if first is None or not snapshot["where"].strip():
            return first
        where = f"(\n{snapshot['where']}\n) and uid = '{uid}'"
        return first if len(select(self._lake, where).uids) else None

    def _original(self, directory: RunDirectory, newest: int, snapshot: Mapping[str, Any], uid: str) -> str | None:
        """Return the id of the segment in which the run saw a trajectory that was rewritten since."""
        with self._lock:
            key = (directory.path, newest)
            if key not in self._tables:
                self._tables.clear()
                table = LiveTable(self._lake)
                table.restore(snapshot["segments"])
                self._tables[key] = table
            wanted = np.array([bytes.fromhex(uid)], dtype="S16")
            for each in self._tables[key].segments:
                if positions(each.uids, wanted)[0] >= 0:
                    return each.id
        return None
