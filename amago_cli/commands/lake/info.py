"""`amago lake info`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from amago_cli.options import Common, LakeArgument, reader

if TYPE_CHECKING:
    from pipelines.stages.result import Table

_SHOWN = 20  # rows of a table; JSON has more


@reader
def info(common: Common, lake: LakeArgument) -> Any:
    """Describe a lake: tasks, sources, collectors, policy versions, bytes per step, expiry, protection.

    A warning names collectors that have played identical episodes.

    Example: amago lake info runs/gym-CartPole-v1
    """
    from pipelines.lake.sql.describing import describe, find_duplicates
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result

    opened = Lake(lake)
    common.concerns(lake=opened.name)
    with common.listening() as listener:
        found = describe(opened, listener=listener)
        for each in find_duplicates([opened]):
            listener(each.as_notice())
    return Result(command="lake info", lake=opened.name, metrics=found, tables=_tables(found))


def _tables(found: Mapping[str, Any]) -> Sequence[Table]:
    from pipelines.events import duration
    from pipelines.stages.result import Table

    def ago(seconds: float | None) -> str | None:
        return None if seconds is None else f"{duration(seconds)} ago"

    def table(title: str, name: str, columns: Mapping[str, str | Callable[[Any], Any]]) -> Table | None:
        rows = [row for row in found[name] if row.get("segments") != 0]
        if not rows:
            return None
        if len(rows) > _SHOWN:
            title = f"{title} (the {_SHOWN} with the most trajectories)"
        cells = [[of(row) if callable(of) else row[of] for of in columns.values()] for row in rows[:_SHOWN]]
        return Table(title=title, columns=list(columns), rows=cells)

    tables = (
        table(
            f"tasks: {found['task_count']:,}",
            "tasks",
            {
                **{name: name for name in ("env", "task", "trajectories", "episodes", "steps")},
                "length": lambda row: (
                    f"{row['length_min']:,} .. {row['length_mean']:,.1f} .. {row['length_max']:,}"
                    if row["episodes"]
                    else None
                ),
                "return": "return_mean",
                "success": "success_mean",
            },
        ),
        table(
            "sources",
            "sources",
            {
                name: name
                for name in ("env", "source", "policy_id", "relabel_method", "trajectories", "episodes", "steps")
            }
            | {"return": "return_mean", "success": "success_mean"},
        ),
        table(
            "collectors",
            "collectors",
            {
                **{name: name for name in ("collector", "trajectories", "steps")},
                "last commit": lambda row: ago(row["seconds_since_commit"]),
                **{name: name for name in ("run", "host", "pid")},
            },
        ),
        table(
            "policies that acted",
            "policies",
            {
                **{name: name for name in ("policy_id", "trajectories", "versions")},
                "newest": "newest_version",
                "newest checkpoint": "newest_checkpoint",
                "updates behind": "lag",
            },
        ),
        table(
            "segments",
            "stored",
            {
                "schema": lambda row: row["schema"][:8],
                **{name: name for name in ("kind", "segments", "rows", "bytes")},
                "bytes a row": "bytes_per_step",
            },
        ),
        table("segments by size", "segment_sizes", {name: name for name in ("size", "segments", "bytes")}),
        table(
            "columns of a step",
            "columns",
            {
                "schema": lambda row: row["schema"][:8],
                **{name: name for name in ("column", "dtype")},
                "shape": lambda row: str(tuple(row["shape"])),
                "role": "role",
                "bytes": "bytes",
                "stored": "stored_bytes",
            },
        ),
        table(
            "protected",
            "protections",
            {
                "name": "name",
                "since": lambda row: time.strftime("%Y-%m-%d %H:%M", time.localtime(row["time"])),
                "segments": lambda row: row["segments"] or "all",
            },
        ),
    )
    return [each for each in tables if each is not None]
