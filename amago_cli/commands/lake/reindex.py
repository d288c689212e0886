"""`amago lake reindex`."""

from __future__ import annotations

from typing import Any

from amago_cli.options import Common, LakeArgument, reader


@reader
def reindex(common: Common, lake: LakeArgument) -> Any:
    """Rebuild the SQL index of a lake from its segments.

    Example: amago lake reindex runs/cartpole
    """
    from pipelines.lake.sql import catalog
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result

    opened = Lake(lake)
    common.concerns(lake=opened.name)
    with common.listening() as listener:
        opened.salvage(listener=listener)
        catalog.rebuild(opened, listener=listener)
        found = catalog.summary(opened, listener=listener)
    counts = {name: found[name] for name in ("trajectories", "steps", "overlays", "segments", "bytes")}
    return Result(command="lake reindex", lake=opened.name, metrics=counts, seconds=common.invocation.seconds)
