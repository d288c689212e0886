"""Identity of a collector: its name, how it acts, and the steps that it has stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings
from pipelines.lake import collectors
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.lake.tombstones import expired_steps


def collector_name(settings: Settings, directory: RunDirectory | None = None) -> str:
    """Return the name under which steps are stored and counted: a different one for each environment, policy and
    exploration. A run has one environment; what it collects at random, or as a chain, bears its own name.
    """
    how = behaviour(settings)
    if directory is None:
        digest = collectors.digest({"env": settings.env.model_dump(mode="json"), **how})
        return f"{settings.env.name}-{settings.seed}-{digest}"
    plain = how == behaviour(Settings())
    return directory.identity if plain else f"{directory.identity}-{collectors.digest(how)}"


def behaviour(settings: Settings) -> dict[str, Any]:
    """Return how a collector outside a chain chooses its actions, as plain data."""
    wanted = settings.collect
    path, at, checkpoint = wanted.policy.partition("@")
    policy = f"{Path(path).resolve()}{at}{checkpoint}" if RunDirectory(path).exists() else wanted.policy
    return {
        "policy": "" if wanted.follow else "random" if policy == "auto" else policy,
        "follow": str(Path(wanted.follow).resolve()) if wanted.follow else "",
        "greedy": wanted.greedy,
        "exploration": settings.exploration.model_dump(mode="json") if wanted.explore is True else None,
        "action_mask": settings.agent.action_mask,
    }


def stored_steps(lake: Lake, collector: str) -> int:
    """Steps that `collector` has put into the lake, logs of dead writers included, and what has expired since."""
    lake.salvage()
    quoted = collector.replace("'", "''")
    where = f"collector = '{quoted}' and base_uid is null"
    while True:
        expired = expired_steps(lake.storage)[collector]
        _, rows = query(lake, f"select coalesce(sum(length), 0) from trajectories where {where}")
        if expired_steps(lake.storage)[collector] == expired:  # else some moved from one count to the other
            return int(rows[0][0]) + expired
