"""What our own exports say of a trajectory and of its spaces, read again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipelines.errors import IntegrityError
from pipelines.lake.spaces import Spaces
from pipelines.lake.trajectory import TrajectoryInfo
from pipelines.sources.base import texts

_KEPT = ("env", "task", "policy_id", "policy_version", "seed", "success", "epsilon", "goal_text", "t_start", "t_end")


def info_of(record: Mapping[str, Any], *, source: str, tags: Mapping[str, str]) -> TrajectoryInfo:
    """What a row of the table `trajectories` says, for a trajectory that comes back; `uid` becomes the tag `from_uid`.

    It is new where it goes: collector, uid and times of storage are its own there.
    """
    known = {name: record[name] for name in _KEPT if record.get(name) is not None}
    own = {**dict(record.get("tags") or {}), **texts({"from_uid": record.get("uid")}), **tags}
    return TrajectoryInfo(**known, attempts=tuple(record.get("attempts") or ()), source=source, tags=own)


def spaces_of(text: Any, *, what: str) -> Spaces:
    """Spaces from the JSON of an export. IntegrityError if it is damaged."""
    try:
        return Spaces.from_json(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{what}: what it says of its spaces is damaged", hint="export it again") from error
