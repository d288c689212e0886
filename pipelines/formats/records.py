"""What our own exports say of a trajectory and of its spaces, read again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from pipelines.errors import IntegrityError
from pipelines.files.json import Form, fits
from pipelines.files.malformed import MALFORMED
from pipelines.formats.base import as_tags
from pipelines.lake.spaces import Spaces
from pipelines.lake.trajectory import TrajectoryInfo

_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_KEPT = (
    *("env", "task", "policy_id", "policy_version", "seed", "success", "epsilon", "goal_text", "t_start", "t_end"),
    *("history", "history_index"),
)


class _TrajectoryRecord(Form):
    """The fields of a trajectory's record that are read."""

    uid: str | None = None
    env: str | None = None
    task: str | None = None
    policy_id: str | None = None
    policy_version: _Int64 | None = None
    seed: _Int64 | None = None
    success: bool | None = None
    epsilon: _Finite | None = None
    goal_text: str | None = None
    t_start: _Finite | None = None
    t_end: _Finite | None = None
    history: str | None = None
    history_index: Annotated[int, Field(ge=0, lt=2**32 - 1)] | None = None
    attempts: list[bool] | tuple[bool, ...] | None = None
    tags: dict[str, str] | None = None


def read_info(record: Mapping[str, Any], *, source: str, tags: Mapping[str, str]) -> TrajectoryInfo:
    """Convert a row of the table `trajectories`, for a trajectory that comes back; `uid` becomes the tag `from_uid`.

    It is new where it goes: collector, uid and times of storage are its own there.
    """
    if not fits(dict(record), _TrajectoryRecord):
        raise ValueError("what it says of a trajectory has values of wrong types")
    known = {name: record[name] for name in _KEPT if record.get(name) is not None}
    own = {**dict(record.get("tags") or {}), **as_tags({"from_uid": record.get("uid")}), **tags}
    return TrajectoryInfo(**known, attempts=tuple(record.get("attempts") or ()), source=source, tags=own)


def read_spaces(text: Any, *, what: str) -> Spaces:
    """Read spaces from the JSON of an export. IntegrityError if it is damaged."""
    try:
        return Spaces.from_json(json.loads(text))
    except MALFORMED as error:
        raise IntegrityError(f"{what}: what it says of its spaces is damaged", hint="export it again") from error


def as_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row to JSON's types: uids to texts, tags to an object."""
    found = {name: value.hex() if isinstance(value, bytes) else value for name, value in row.items()}
    return {**found, "tags": dict(row["tags"] or ())}
