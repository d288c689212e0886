"""`amago lake compact`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from amago_cli.options import Common, DryRun, LakeArgument, reader
from amago_cli.quantities import parse_seconds, parse_size


@reader
def compact(
    common: Common,
    lake: LakeArgument,
    small: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE", parser=parse_size, help="Merge segments below this size. [default: half of --target]"
        ),
    ] = None,
    target: Annotated[
        int,
        typer.Option(
            metavar="SIZE",
            parser=parse_size,
            help="Size of merged segments. Merging takes up to three times this memory and 0.1 KB a trajectory.",
        ),
    ] = "128MiB",  # type: ignore[assignment]
    settle: Annotated[
        float,
        typer.Option(
            metavar="AGE", parser=parse_seconds, help="Leave younger segments alone while a collector writes."
        ),
    ] = "30s",  # type: ignore[assignment]
    grace: Annotated[
        float, typer.Option(metavar="AGE", parser=parse_seconds, help="How long to keep files that were replaced.")
    ] = "600s",  # type: ignore[assignment]
    dry_run: DryRun = False,
) -> Any:
    """Merge small segments into large ones, and rewrite segments of which half has expired.

    Collectors and trainers can keep running: the trajectories stay the same, and a checkpoint can still draw what it
    drew before. Damaged segments are not touched. Replaced files are removed after a grace period, by this command or a
    later one. Collectors also compact the lakes that they write to (lake.compact).

    Example: amago lake compact runs/quickstart
    """
    from pipelines.lake.maintenance import compaction as engine
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result, Table

    small = max(target // 2, 1) if small is None else small
    rules = engine.CompactionRules(small_bytes=small, target_bytes=target, settle_seconds=settle)
    opened = Lake(lake)
    common.concerns(lake=opened.name)
    with common.listening() as listener:
        done = engine.compact(opened, rules, grace_seconds=grace, dry_run=dry_run, listener=listener)
    removed = {"removed": done.swept.segments, "waiting": done.swept.waiting} if done.swept else {}
    return Result(
        command="lake compact",
        status="done" if done.runs or (done.swept and done.swept.segments) else "skipped",
        lake=opened.name,
        metrics={
            "segments_before": done.segments[0],
            "segments_after": done.segments[1],
            "bytes_before": done.bytes[0],
            "bytes_after": done.bytes[1],
            "rewritten": sum(len(run) for run in done.runs),
            "trajectories": done.trajectories,
            **removed,
            "dry_run": dry_run,
        },
        tables=[
            Table(
                title="merged" if not dry_run else "to merge",
                columns=("segments", "first", "last"),
                rows=[(len(run), run[0], run[-1]) for run in done.runs],
            )
        ]
        if done.runs
        else [],
        seconds=common.invocation.seconds,
    )
