"""What a run is doing, or how it ended: from its locks and from what its last stage recorded."""

from __future__ import annotations

import calendar
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pipelines.files.locks import LockHolder, holder

_RunStatus = Literal["running", "finished", "interrupted", "failed"]
_LOCKS = ("run", "train", "collect")  # `run` holds all three
_OUTCOMES: Mapping[str, _RunStatus] = {"done": "finished", "interrupted": "interrupted", "failed": "failed"}
_KILLED = "it ended without a record, as after kill -9"
_LONGEST = 500


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of a run. `stage` is the one that is running or ran last, `pid` and `host` are those of its process.

    `started` and `ended` are seconds since the epoch, None if unknown. `reason` says why it failed or was interrupted.
    """

    status: _RunStatus
    stage: str = ""
    pid: int | None = None
    host: str = ""
    started: float | None = None
    ended: float | None = None
    reason: str = ""


def find_running(path: Path) -> tuple[str, LockHolder] | None:
    """Find the stage that a process is running in the run at `path`, and that process; None if there is none."""
    for stage in _LOCKS:
        if (found := holder(path / f".{stage}.lock")) is not None:
            return stage, found
    return None


def state_of(path: Path, record: Mapping[str, Any]) -> RunState:
    """Determine the state of the run at `path`, whose run.json is `record`: running, or how its last stage ended."""

    def text(value: Any) -> str:
        return value[:_LONGEST] if isinstance(value, str) else ""

    stages = record.get("stages")
    entries: dict[str, Mapping[str, Any]] = {"": {}}
    if isinstance(stages, Mapping):
        entries |= {str(name): entry for name, entry in stages.items() if isinstance(entry, Mapping)}
    stage, last = max(entries.items(), key=lambda item: _parse_time(item[1].get("time")) or 0.0)
    started = _parse_time(last.get("time"))
    if (now := find_running(path)) is not None:
        return replace(describe_running(*now), started=started)
    status = _OUTCOMES.get(text(last.get("status")), "interrupted")
    reason = text(last.get("error")) if status != "finished" else ""
    pid, hardware = last.get("pid"), record.get("hardware")
    return RunState(
        status=status,
        stage=stage,
        pid=pid if isinstance(pid, int) else None,
        host=text(hardware.get("host")) if isinstance(hardware, Mapping) else "",
        started=started,
        ended=_parse_time(last.get("ended")),
        reason=reason or (_KILLED if status == "interrupted" and stage and "status" not in last else ""),
    )


def describe_running(stage: str, process: LockHolder) -> RunState:
    """Describe a run in which `process` runs `stage`."""
    return RunState(status="running", stage=stage, pid=process.pid, host=process.host)


def _parse_time(text: Any) -> float | None:
    """Parse a time as run.json has it, 2026-11-23T01:23:41+0000."""
    try:
        parsed = time.strptime(text, "%Y-%m-%dT%H:%M:%S%z")
        return float(calendar.timegm(parsed) - (parsed.tm_gmtoff or 0))
    except (TypeError, ValueError, OverflowError):
        return None
