"""What a checkpoint drew from: the segments of each lake in the order in which they were seen, read from its record.

A run's later checkpoint tells when how many had been seen, so that the view of a checkpoint that is not kept any more
is known too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from pipelines.config.run_directory import RunDirectory
from pipelines.errors import InputMissing, IntegrityError, UsageError
from pipelines.files.json import Form, read_object
from pipelines.lake.store import Lake

_NUMBER = re.compile(r"\d{6,}")


class Snapshot(Form):
    """What a checkpoint says of a lake that it drew from."""

    id: str = ""
    lake: str = ""
    name: str | None = None
    schema_id: str = Field(alias="schema")
    where: str | None = None
    weight: str | None = None
    segments: list[str]
    dropped: list[str] = Field(default_factory=list)
    trajectories: int = 0
    history: list[Annotated[list[int], Field(min_length=2, max_length=2)]] = Field(default_factory=list)


class Data(Form):
    """What a checkpoint says of all that it drew from."""

    lakes: list[Snapshot] = Field(default_factory=list)
    view: Snapshot | None = None
    sampler: dict[str, Any] = Field(default_factory=dict)


class DrawnRecord(Form):
    """What lineage reads of checkpoint.json."""

    update: int
    data: Data | None = None


def read_snapshots(directory: RunDirectory, which: str) -> tuple[int, int, list[dict[str, Any]]]:
    """The update asked for, the checkpoint that tells of it, and what had been seen of each lake by then."""
    known = kept_updates(directory)
    if not known:
        raise InputMissing(
            f"no checkpoint in '{directory.checkpoints}'", hint="lineage begins at a checkpoint: amago train"
        )
    if which == "latest":
        update = known[-1]
    elif which == "best":
        record = read_object(directory.checkpoints / "best" / "checkpoint.json", DrawnRecord)
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
    record = read_object(path / "checkpoint.json", DrawnRecord)
    if record is None:
        raise IntegrityError(f"checkpoint '{path}' is damaged", hint="name another one")
    data = record.get("data") or {}
    old = [data["view"]] if "view" in data else []
    snapshots = [_as_of(snapshot, update, told_by) for snapshot in data.get("lakes", old)]
    if any(snapshot is None for snapshot in snapshots):
        raise InputMissing(
            f"no checkpoint {update} in '{directory.checkpoints}', and later ones do not tell when they saw what",
            hint=f"there are: {', '.join(map(str, known))}",
        )
    return update, told_by, [snapshot for snapshot in snapshots if snapshot is not None]


def _as_of(snapshot: Mapping[str, Any], update: int, told_by: int) -> dict[str, Any] | None:
    """A snapshot cut to what could be drawn for the first `update` updates; None if that is not known."""
    history = snapshot.get("history")
    if not history:
        return dict(snapshot) if update == told_by else None
    seen = max((int(count) for at, count in history if at < update), default=0)
    return {**snapshot, "segments": list(snapshot["segments"])[:seen]}


def kept_updates(directory: RunDirectory) -> list[int]:
    """Updates of the run's checkpoints, ascending."""
    names = (path.parent.name for path in directory.checkpoints.glob("*/checkpoint.json"))
    return sorted(int(name) for name in names if _NUMBER.fullmatch(name))


def find_lake(snapshot: Mapping[str, Any], directory: RunDirectory, given: Sequence[str | Path]) -> Lake:
    """The lake of a snapshot: where the user says, where the run says it was, or the run's own; by its id."""
    id, name = lake_id(snapshot), snapshot.get("name")
    told = [lake["lake"] for lake in directory.load_record().get("lakes", ()) if lake["id"] == id]
    for place in (*given, *told, name, directory.lake):
        lake = Lake.find(place) if place else None
        if lake is not None and lake.id == id:
            return lake
    was = next((f"at '{place}'" for place in (*told, name) if place), "here")
    raise InputMissing(
        f"the lake that run '{directory.path}' drew from is not {was} any more (its id is {id})",
        hint="say where it is: --lake LAKE",
    )


def lake_id(snapshot: Mapping[str, Any]) -> str:
    """The lake's id; checkpoints of before several lakes could be drawn from have it under another key."""
    return str(snapshot["id"] if "id" in snapshot else snapshot["lake"])
