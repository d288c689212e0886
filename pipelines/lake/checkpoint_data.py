"""The data record of a checkpoint: the segments of each lake in the order in which training saw them.

It also records how many had been seen at which update, so the view of a checkpoint that was not kept is known from a
later one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from pipelines.config.checkpoint_place import numbers
from pipelines.config.run_directory import RunDirectory
from pipelines.errors import InputMissing, IntegrityError, UsageError
from pipelines.files.json import Form, read_object
from pipelines.lake.store import Lake


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
