"""`amago lake info`."""

from __future__ import annotations

from typing import Any

from amago_cli.options import Common, LakeArgument, reader


@reader
def info(common: Common, lake: LakeArgument) -> Any:
    """Describe a lake: how much is in it, from which environments and policies, with which columns.

    Example: amago lake info runs/gym-CartPole-v1
    """
    from amago_cli.lakes import overview
    from pipelines.lake.catalog import query
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result, Table

    opened = Lake.open(lake)
    common.concerns(lake=opened.name)
    facts = overview(opened.name)
    names, sources = query(opened, _SOURCES)
    schemas = opened.schemas()
    columns = [
        (schema_id[:8], column.name, column.dtype, str(tuple(column.shape)), column.role)
        for schema_id, schema in schemas.items()
        for column in schema.columns
    ]
    return Result(
        command="lake info",
        lake=opened.name,
        metrics={**{name: facts[name] for name in _FIGURES}, "id": opened.id, "schemas": list(schemas)},
        tables=(
            Table(title="sources", columns=names, rows=sources),
            Table(
                title="columns of a step",
                columns=("schema", "column", "dtype", "shape", "role"),
                rows=columns,
            ),
        ),
    )


_FIGURES = ("trajectories", "steps", "overlays", "segments", "bytes")
_SOURCES = """
select env, source, policy_id, relabel_method, count(*) as trajectories, sum(length) as steps,
       avg("return") as return_mean, avg(success::int) as success_mean
from trajectories group by all order by all
"""
