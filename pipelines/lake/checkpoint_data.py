"""The data record of a checkpoint: the segments of each lake in the order in which training saw them.

It also records how many had been seen at which update, so the view of a checkpoint that was not kept is known from a
later one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from pipelines.config.checkpoint_place import numbers
from pipelines.config.run_directory import RunDirectory
from pipelines.errors import AmagoError, InputMissing, IntegrityError, UsageError
from pipelines.files.json import Form, read_object
from pipelines.lake.live import LiveTable
from pipelines.lake.sql.selection import select
from pipelines.lake.store import Lake
from pipelines.lake.uids import positions


class Snapshot(Form):
    """The record of one lake."""

    id: str
    name: str
    schema_id: str = Field(alias="schema")
    where: str
    weight: str
    segments: list[str]
    dropped: list[str]
    trajectories: int
    history: list[Annotated[list[int], Field(min_length=2, max_length=2)]]


class Data(Form):
    """The record of all lakes."""

    lakes: list[Snapshot]


class _DrawnRecord(Form):
    """The fields of checkpoint.json that lineage reads."""

    update: int
    data: Data | None = None


def read_snapshots(directory: RunDirectory, which: str) -> tuple[int, int, list[dict[str, Any]]]:
    """Return the update asked for, the checkpoint whose record covers it, and the snapshots as of that update."""
    known = numbers(directory.checkpoints)
    if not known:
        raise InputMissing(
            f"no checkpoint in '{directory.checkpoints}'", hint="lineage begins at a checkpoint: amago train"
        )
    if which == "latest":
        update = known[-1]
    elif which == "best":
        record = read_object(directory.checkpoints / "best" / "checkpoint.json", _DrawnRecord)
        if record is None:
            raise InputMissing(f"no best checkpoint in '{directory.checkpoints}'", hint="name an update, or latest")
        update = int(record["update"])
    elif which.isdigit():
        update = int(which)
    else:
        raise UsageError(f"'{which}' is not a checkpoint", hint="give RUN@latest, RUN@best or RUN@UPDATE")
    told_by = next((number for number in known if number >= update), None)
    if told_by is None:
        raise InputMissing(f"run '{directory.path}' has no update {update} yet", hint=f"its newest is {known[-1]}")
    path = directory.checkpoints / f"{told_by:06d}"
    record = read_object(path / "checkpoint.json", _DrawnRecord)
    if record is None:
        raise IntegrityError(f"checkpoint '{path}' is damaged", hint="name another one")
    lakes = (record.get("data") or {"lakes": []})["lakes"]
    return update, told_by, [_as_of(snapshot, update) for snapshot in lakes]


def _as_of(snapshot: Mapping[str, Any], update: int) -> dict[str, Any]:
    """Cut a snapshot to what could be drawn for the first `update` updates."""
    seen = max((int(count) for at, count in snapshot["history"] if at <= update), default=0)
    return {**snapshot, "segments": list(snapshot["segments"])[:seen]}


def find_lake(snapshot: Mapping[str, Any], directory: RunDirectory, given: Sequence[str | Path]) -> Lake:
    """Find the lake of a snapshot by its id: where the user says, where the run says it was, or the run's own."""
    id, name = snapshot["id"], snapshot["name"]
    recorded = [lake["lake"] for lake in directory.load_record().get("lakes", ()) if lake["id"] == id]
    for place in (*given, *recorded, name, directory.lake):
        lake = Lake.find(place) if place else None
        if lake is not None and lake.id == id:
            return lake
    was = next((f"at '{place}'" for place in (*recorded, name) if place), "here")
    raise InputMissing(
        f"the lake that run '{directory.path}' drew from is not {was} any more (its id is {id})",
        hint="say where it is: --lake LAKE",
    )


_MOST_RUNS = 200  # of one directory


class TrainingHistory:
    """The runs that trained on a lake: its own, its neighbours in the directory of runs, and `more`.

    Calls may come from several threads.
    """

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
