"""Who filled a lake: `collectors/NAME.json`, a file for every collector, from which lineage goes on.

    collector   what its trajectories are marked with
    run         its run directory: {"path" as given, "absolute", "id"}; null for one without a run
    env, seed   the settings of its environment
    horizon     most steps of an episode there; null where no limit is known
    behaviour   its policy and exploration; null for a chain, whose run says more
    started     when its first process began (seconds since the epoch)
    policies    policy id -> the run directory it came from ({"path", "absolute"}), null for one that is not a run
    processes   {"host", "pid", "argv", "started", "versions"} of its processes, the newest last

A lake can be read without these files: they say where it came from, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pyarrow as pa
from pydantic import Field

from pipelines.files.atomic import explained
from pipelines.files.json import Form, parse_object
from pipelines.lake.sql import records

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

FOLDER = "collectors"
_MOST_PROCESSES = 32
_COLUMNS = {
    **dict.fromkeys(("collector", "run", "run_id", "env", "host"), pa.string()),
    **dict.fromkeys(("seed", "pid", "processes"), pa.int64()),
    **dict.fromkeys(("started", "process_started"), pa.float64()),
}


class _RunPlace(Form):
    """A run's directory."""

    path: str
    absolute: str
    id: str | None = None


class _ProcessRecord(Form):
    """A process of a collector."""

    host: str | None = None
    pid: int | None = None
    started: float | None = None


class _CollectorRecord(Form):
    """What is read of a collector's file."""

    collector: str
    run: _RunPlace | None = None
    env: dict[str, Any] = Field(default_factory=dict)
    seed: int | None = None
    started: float | None = None
    policies: dict[str, _RunPlace | None] = Field(default_factory=dict)
    processes: list[_ProcessRecord] = Field(default_factory=list)


def register(
    lake: Lake,
    collector: str,
    *,
    run: Mapping[str, Any] | None,
    env: Mapping[str, Any],
    seed: int,
    process: Mapping[str, Any],
    horizon: int | None = None,
    behaviour: Mapping[str, Any] | None = None,
) -> None:
    """A process of `collector` begins. Only one at a time may bear that name. StageFailed when it cannot be written."""
    known = read(lake, collector) or {"collector": collector, "started": process["started"], "policies": {}}
    processes = [*known.get("processes", []), dict(process)][-_MOST_PROCESSES:]
    facts = {"run": run, "env": dict(env), "seed": seed, "horizon": horizon, "behaviour": behaviour}
    write(lake, {**known, **facts, "processes": processes})


def add_policy(lake: Lake, collector: str, policy_id: str, run: Mapping[str, Any] | None) -> None:
    """A policy acts for `collector` from now on."""
    known = read(lake, collector) or {"collector": collector}
    policies = known.get("policies", {})
    if policy_id not in policies or policies[policy_id] != run:
        write(lake, {**known, "policies": {**policies, policy_id: run}})


def read(lake: Lake, collector: str) -> dict[str, Any] | None:
    """What a collector said of itself; None if nothing can be read."""
    try:
        return parse_object(lake.storage.read(_key(collector)), _CollectorRecord)
    except OSError:
        return None


def read_all(lake: Lake) -> dict[str, dict[str, Any]]:
    """Every collector that said something of itself, by name."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(lake.storage.names(FOLDER)):
        if not name.endswith(".json") or name.startswith("."):
            continue
        try:
            record = parse_object(lake.storage.read(f"{FOLDER}/{name}"), _CollectorRecord)
        except OSError:
            continue
        if record is not None:
            found[record["collector"]] = record
    return found


def table(lake: Lake) -> pa.Table:
    """A row for every collector: `collector`, `run` (its directory), `run_id`, `env`, `seed`, `started`, and of its
    newest process `host`, `pid`, `process_started`; `processes` counts those.
    """
    rows = []
    for name, record in read_all(lake).items():
        run, processes = record.get("run") or {}, record.get("processes") or [{}]
        rows.append(
            {
                "collector": name,
                "run": run.get("absolute"),
                "run_id": run.get("id"),
                "env": record.get("env", {}).get("name"),
                "seed": record.get("seed"),
                "started": record.get("started"),
                "host": processes[-1].get("host"),
                "pid": processes[-1].get("pid"),
                "process_started": processes[-1].get("started"),
                "processes": len(processes),
            }
        )
    return records.table(rows, _COLUMNS)


def digest(facts: Mapping[str, Any]) -> str:
    """Return eight characters that differ for different `facts`, to be a part of a collector's name."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:8]


def place(path: Path) -> dict[str, str]:
    """A directory as given and as it is found from anywhere on this host."""
    return {"path": str(path), "absolute": str(Path(path).resolve())}


def write(lake: Lake, record: Mapping[str, Any]) -> None:
    """Replace what is known of the collector of `record`. StageFailed when it cannot be written."""
    key = _key(record["collector"])
    with explained(f"write '{lake.storage.url(key)}'"):
        lake.storage.write(key, (json.dumps(record, indent=1, default=str) + "\n").encode())


def _key(collector: str) -> str:
    return f"{FOLDER}/{quote(collector, safe='')}.json"
