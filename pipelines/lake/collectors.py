"""Records of the collectors that filled a lake, one file `collectors/NAME.json` each. Lineage is built on them.

    collector   the name in its trajectories
    run         its run directory: {"path" as given, "absolute", "id"}; null without a run
    env, seed   the settings of its environment
    horizon     the episode length limit; null if unknown
    behaviour   its policy and exploration; null for `amago run`, whose run directory says more
    learner     the settings of its learners; null for other policies
    started     when its first process started (seconds since the epoch)
    policies    policy id -> the run directory it came from ({"path", "absolute"}), null if it did not come from a run
    opponents   of a game: opponent -> the run directory it came from, likewise
    processes   {"host", "pid", "argv", "started", "versions"} of its processes, the newest last

These files only describe where data came from; the lake can be read without them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import pyarrow as pa
from pydantic import Field

from pipelines.config.run_directory import RunDirectory
from pipelines.events import Listener, Notice, silent
from pipelines.files.atomic import explain_errors
from pipelines.files.json import Form, parse_object
from pipelines.files.locks import hold_exclusively
from pipelines.lake.arrow import table_of_objects
from pipelines.lake.storage import connect

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
    """The fields that are read from a collector's file."""

    collector: str
    run: _RunPlace | None = None
    env: dict[str, Any] = Field(default_factory=dict)
    seed: int | None = None
    learner: dict[str, Any] | None = None
    started: float | None = None
    policies: dict[str, _RunPlace | None] = Field(default_factory=dict)
    opponents: dict[str, _RunPlace | None] = Field(default_factory=dict)
    processes: list[_ProcessRecord] = Field(default_factory=list)


def hold_name(lake: Path | str, collector: str) -> AbstractContextManager[None]:
    """Hold the name of a collector in a lake that need not exist yet; Locked if another process fills it under that
    name."""
    busy = f"lake '{lake}' is being filled with '{collector}'"
    return hold_exclusively(connect(lake).local / f".{quote(collector, safe='')}.lock", what=busy)


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
    learner: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """Record the start of a process of `collector`; returns the record. Only one process at a time may have that name.
    StageFailed if the record cannot be written.
    """
    known = read(lake, collector) or {"collector": collector, "started": process["started"], "policies": {}}
    processes = [*known.get("processes", []), dict(process)][-_MOST_PROCESSES:]
    facts = {"run": run, "env": dict(env), "seed": seed, "horizon": horizon, "behaviour": behaviour}
    facts["learner"] = learner
    return write(lake, {**known, **facts, "processes": processes})


def warn_of_repetition(lake: Lake, collector: str, about: Mapping[str, Any], listener: Listener = silent) -> None:
    """Warn if `collector`, which is about to start as `about` says (the arguments of `register`), will play what
    another one has played: the same environment in the same way with the same seed. It is found by the records alone,
    and only when the collector is new; of a known one, a process of another host is named, which may still be running.
    """
    known = read(lake, collector)
    if known is not None:
        last = (known.get("processes") or [{}])[-1]
        if (host := last.get("host")) and host != about["process"]["host"]:
            text = (
                f"collector '{collector}' was last filled by pid {last.get('pid')} on {host}; if that still runs, both "
                "play the same episodes: give one of them another --seed"
            )
            listener(Notice(stage="collect", text=text, level="warning"))
        return
    facts = {name: about[name] for name in ("env", "seed", "behaviour")}
    for name, record in read_all(lake).items():
        if {key: record.get(key) for key in facts} == facts and not name.startswith(f"{collector}."):
            text = (
                f"'{name}' has played the same environment with seed {about['seed']} in lake '{lake.name}': the same "
                "episodes would be there twice; give another --seed"
            )
            listener(Notice(stage="collect", text=text, level="warning"))
            return


def add_policy(
    lake: Lake,
    record: Mapping[str, Any],
    policy_id: str,
    run: Mapping[str, Any] | None,
    *,
    among: Literal["policies", "opponents"] = "policies",
) -> Mapping[str, Any]:
    """Record that a policy acts for the collector of `record`, or against it; returns the new record."""
    known = record.get(among, {})
    if policy_id in known and known[policy_id] == run:
        return record
    return write(lake, {**record, among: {**known, policy_id: run}})


def read(lake: Lake, collector: str) -> dict[str, Any] | None:
    """Read a collector's record; None if it cannot be read."""
    try:
        return parse_object(lake.storage.read(f"{FOLDER}/{quote(collector, safe='')}.json"), _CollectorRecord)
    except OSError:
        return None


def read_all(lake: Lake) -> dict[str, dict[str, Any]]:
    """Read the records of all collectors by name."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(lake.storage.names(FOLDER)):
        if name.endswith(".json") and not name.startswith("."):
            with contextlib.suppress(OSError):
                record = parse_object(lake.storage.read(f"{FOLDER}/{name}"), _CollectorRecord)
                if record is not None:
                    found[record["collector"]] = record
    return found


def table(lake: Lake) -> pa.Table:
    """List a row for every collector: `collector`, `run` (its directory), `run_id`, `env`, `seed`, `started`, of its
    newest process `host`, `pid` and `process_started`, and the number of `processes`.
    """
    rows = []
    for name, record in read_all(lake).items():
        run, processes = record.get("run") or {}, record.get("processes") or [{}]
        row = {"collector": name, "run": run.get("absolute"), "run_id": run.get("id")}
        row |= {"env": record.get("env", {}).get("name"), "seed": record.get("seed"), "started": record.get("started")}
        row |= {"host": processes[-1].get("host"), "pid": processes[-1].get("pid")}
        rows.append(row | {"process_started": processes[-1].get("started"), "processes": len(processes)})
    return table_of_objects(rows, _COLUMNS)


def digest(facts: Mapping[str, Any]) -> str:
    """Hash `facts` to eight characters, for a collector's name."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:8]


def place(path: Path) -> dict[str, str]:
    """Describe a directory as given and as an absolute path."""
    return {"path": str(path), "absolute": str(Path(path).resolve())}


def write(lake: Lake, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the record of a collector; returns it. StageFailed if it cannot be written."""
    key = f"{FOLDER}/{quote(record['collector'], safe='')}.json"
    with explain_errors(f"write '{lake.storage.url(key)}'"):
        lake.storage.write(key, (json.dumps(record, indent=1, default=str) + "\n").encode())
    return record


def find_run(policy_id: str, recorded: Any, *known: Path | None) -> RunDirectory | None:
    """Find the run that a policy came from: where the record of a collector says (`recorded`), or a known run."""
    places = [Path(recorded[key]) for key in ("absolute", "path")] if isinstance(recorded, Mapping) else []
    for place in (*places, *known):
        run = RunDirectory(place) if place is not None else None
        if run is not None and run.exists() and run.identity == policy_id:
            return run
    return None
