"""A description of a lake and its state for people and scripts, from its index and a few listings; and a search for
identical experience.

The cost of a description follows the number of segments and collectors, not that of steps; trajectories are counted by
SQL. Collectors that played the same environment by the same policy with the same seed have stored identical experience
under different ids: merged or mixed, it counts twice.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.config.policy_files import list_checkpoints
from pipelines.errors import AmagoError
from pipelines.events import Listener, Notice, silent
from pipelines.lake import collectors
from pipelines.lake.folders import list_all
from pipelines.lake.log import read_log
from pipelines.lake.sql import catalog
from pipelines.lake.sql import query as sql

if TYPE_CHECKING:
    from pipelines.lake.store import Lake


MOST = 100  # listed tasks and policies, those with the most trajectories first
_SIZES = ((1 << 20, "below 1 MiB"), (16 << 20, "1 to 16 MiB"), (64 << 20, "16 to 64 MiB"), (256 << 20, "64 to 256 MiB"))

_COUNTS = f"""{catalog.TOTALS}
       (select coalesce(sum(expired), 0)::bigint from segments) as expired_trajectories,
       (select count(*) from (select distinct env, task from trajectories)) as task_count
"""
# Means are over complete episodes: a piece has no return of its own.
_TASKS = f"""
select env, task, sum(chunks)::bigint as trajectories, count(*) filter (complete) as episodes,
       sum(length)::bigint as steps, min(length) filter (complete) as length_min,
       avg(length) filter (complete) as length_mean, max(length) filter (complete) as length_max,
       avg("return") filter (complete) as return_mean, min("return") filter (complete) as return_min,
       max("return") filter (complete) as return_max, avg(success::int) filter (complete) as success_mean
from episodes group by env, task order by trajectories desc, env, task limit {MOST}
"""
_SOURCES = """
select env, source, policy_id, relabel_method, sum(chunks)::bigint as trajectories,
       count(*) filter (complete) as episodes, sum(length)::bigint as steps,
       avg("return") filter (complete) as return_mean, avg(success::int) filter (complete) as success_mean
from episodes group by all order by env, source, policy_id, relabel_method
"""
_COLLECTORS = """
select collector, count(*) as trajectories, sum(length)::bigint as steps, max(t_commit) as last_commit,
       max(policy_version) as policy_version
from trajectories where base_uid is null group by collector order by last_commit desc, collector
"""
_POLICIES = f"""
select policy_id, any_value(collector) as collector, count(*) as trajectories,
       count(distinct policy_version) as versions, min(policy_version) as oldest_version,
       max(policy_version) as newest_version
from trajectories where base_uid is null group by policy_id order by trajectories desc, policy_id limit {MOST}
"""
_STORED = """
select schema, kind, count(*) as segments, sum(rows)::bigint as rows, sum(bytes)::bigint as bytes
from segments group by schema, kind order by schema, kind desc
"""
_BY_SIZE = "select bytes from segments"


def describe(lake: Lake, *, listener: Listener = silent) -> dict[str, Any]:
    """Describe the lake at this moment: single figures and, under `tasks`, `sources`, `collectors`, `policies`,
    `columns`, `stored`, `segment_sizes` and `protections`, lists of rows (dictionaries with the same keys).
    """
    now = time.time()
    with catalog.open_index(lake, listener) as connection:

        def ask(text: str) -> list[dict[str, Any]]:
            names, rows = sql.answer(connection, lake, listener, text)
            return [dict(zip(names, row, strict=True)) for row in rows]

        (counts,) = ask(_COUNTS)
        tasks, sources, filling, policies = ask(_TASKS), ask(_SOURCES), ask(_COLLECTORS), ask(_POLICIES)
        stored = ask(_STORED)
        sizes = [row["bytes"] for row in ask(_BY_SIZE)]
    recorded, log = collectors.read_all(lake), read_log(lake.storage)
    for row in filling:
        record = recorded.get(row["collector"], {})
        place, processes = record.get("run"), record.get("processes") or [{}]
        row["seconds_since_commit"] = None if row["last_commit"] is None else max(0.0, now - row["last_commit"])
        row["run"] = place["path"] if place else None
        row |= {name: processes[-1].get(name) for name in ("host", "pid")}
        row["processes"] = len(record.get("processes", []))
    for row in policies:
        origin = recorded.get(row.pop("collector"), {}).get("policies", {}).get(row["policy_id"])
        newest = None
        for places in ((origin,), (None, lake.run)):
            with contextlib.suppress(AmagoError):  # a damaged record of a run: unknown
                if (run := collectors.find_run(row["policy_id"], *places)) is not None:
                    newest = max(list_checkpoints(run.checkpoints), default=None)
                    break
        row["newest_checkpoint"] = newest
        row["lag"] = None if newest is None or row["newest_version"] < 0 else newest - row["newest_version"]
    by_size, low = [], 0
    for high, name in (*_SIZES, (1 << 63, "256 MiB and more")):
        inside = [size for size in sizes if low <= size < high]
        by_size.append({"size": name, "segments": len(inside), "bytes": sum(inside)})
        low = high
    for row in stored:
        row["bytes_per_step"] = row["bytes"] / row["rows"] if row["rows"] else None
    steps = [row for row in stored if row["kind"] == "steps"]
    rows = sum(row["rows"] for row in steps)
    return {
        **counts,
        "id": lake.id,
        "schemas": list(lake.schemas()),
        "bytes_per_step": sum(row["bytes"] for row in steps) / rows if rows else None,
        "superseded_or_expired_segments": len(list_all(lake.storage)) - counts["segments"],
        "log_entries": len(log.names),
        "quarantined": len(log.quarantined),
        "logs": sum(1 for _ in (lake.local / "wal").glob("*.wal")),
        "protected": any(protection.is_whole for protection in log.protected.values()),
        "tasks": tasks,
        "sources": sources,
        "collectors": filling,
        "policies": policies,
        "columns": _describe_columns(lake, steps),
        "stored": stored,
        "segment_sizes": by_size,
        "protections": [{"name": p.name, "time": p.time, "segments": len(p.segments)} for p in log.protected.values()],
    }


def _describe_columns(lake: Lake, stored: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """List the columns of every schema with their bytes a step: in memory, and as stored (for wide columns, which are
    compressed, their share of what the segments take beyond the plain ones).
    """
    found = []
    for schema_id, schema in lake.schemas().items():
        row = next((row for row in stored if row["schema"] == schema_id), None)
        wide = sum(column.step_bytes for column in schema.columns if column.is_blob)
        plain = schema.step_bytes - wide
        beyond = max(0.0, row["bytes_per_step"] - plain) if row and row["rows"] else None
        for column in schema.columns:
            share = None if beyond is None else beyond * column.step_bytes / max(wide, 1)
            about = {"column": column.name, "dtype": column.dtype, "shape": list(column.shape), "role": column.role}
            stored_bytes = share if column.is_blob else float(column.step_bytes)
            found.append({"schema": schema_id, **about, "bytes": column.step_bytes, "stored_bytes": stored_bytes})
    return found


@dataclass(frozen=True)
class DuplicateExperience:
    """`trajectories` that two collectors have both stored, each its own; `first` and `second` name them."""

    trajectories: int
    first: str
    second: str
    seed: int

    def as_notice(self) -> Notice:
        """Word the warning for the user."""
        text = (
            f"{self.trajectories:,} trajectories are there twice: {self.first} and {self.second} played the same "
            f"episodes (seed {self.seed}); collect with another --seed, or leave one out with --where"
        )
        return Notice(text=text, level="warning")


def find_duplicates(lakes: Sequence[Lake]) -> list[DuplicateExperience]:
    """Find identical trajectories of different collectors within `lakes`, compared by their checksums.

    Only collectors of the same environment and seed are compared, so lakes without such a pair cost nothing.
    """
    groups: dict[str, list[tuple[Lake, str, int]]] = defaultdict(list)
    for lake in lakes:
        for name, record in collectors.read_all(lake).items():
            if isinstance(seed := record.get("seed"), int):
                env = {key: value for key, value in (record.get("env") or {}).items() if key != "source"}
                groups[collectors.digest({"env": env, "seed": seed})].append((lake, name, seed))
    found = []
    for members in groups.values():
        contents = []
        for lake, name, _ in members if len(members) > 1 else ():
            quoted = name.replace("'", "''")
            sql = f"select crc, length from trajectories where collector = '{quoted}' and base_uid is null"
            contents.append(Counter((crc, length) for crc, length in catalog.query(lake, sql)[1]))
        for place, (lake, name, seed) in enumerate(members[: len(contents)]):
            for other in range(place):
                shared = (contents[place] & contents[other]).total()
                if shared:
                    where = [f" in '{each.name}'" if len(lakes) > 1 else "" for each in (members[other][0], lake)]
                    names = f"'{members[other][1]}'{where[0]}", f"'{name}'{where[1]}"
                    found.append(DuplicateExperience(shared, *names, seed))
    return found
