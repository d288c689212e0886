"""`amago lake expire`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from amago_cli.options import Common, DryRun, LakeArgument, reader
from amago_cli.quantities import parse_positive, parse_seconds, parse_size


@reader
def expire(
    common: Common,
    lake: LakeArgument,
    max_steps: Annotated[
        int | None,
        typer.Option("--max-steps", metavar="N", parser=parse_positive, help="Keep at most N steps, the newest."),
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option("--max-bytes", metavar="SIZE", parser=parse_size, help="Keep at most SIZE, e.g. 10GB.")
    ] = None,
    max_trajectories: Annotated[
        int | None,
        typer.Option(
            "--max-trajectories", metavar="N", parser=parse_positive, help="Keep at most N trajectories, the newest."
        ),
    ] = None,
    max_age: Annotated[
        float | None,
        typer.Option(
            "--max-age", metavar="AGE", parser=parse_seconds, help="Expire trajectories older than AGE, e.g. 7d."
        ),
    ] = None,
    where: Annotated[
        str, typer.Option("--where", metavar="SQL", help="Count and expire only trajectories that match.")
    ] = "",
    grace: Annotated[
        float, typer.Option(metavar="AGE", parser=parse_seconds, help="How long to keep files of expired trajectories.")
    ] = "600s",  # type: ignore[assignment]
    purge: Annotated[
        bool,
        typer.Option("--purge", help="Also delete the bytes of everything that has expired, without a grace period."),
    ] = False,
    dry_run: DryRun = False,
) -> Any:
    """Expire trajectories: the oldest until the rest fits a limit, those older than an age, or those that SQL selects.

    Limits count steps and trajectories without overlays, which expire with the trajectories that they derive from.
    --where alone expires everything that matches; with a limit, the limit applies to the matching trajectories. Expired
    trajectories are invisible at once. A file is removed after the grace period if all its trajectories have expired;
    `amago lake compact` reclaims the space of the others. --purge leaves nothing of them on the disk: it rewrites every
    segment that holds some, at once. Copies and exports of the lake, and backups of its store, keep theirs.

    A protected lake is refused; trajectories of protected snapshots are kept (see: amago lake protect --help).

    Example: amago lake expire runs/cartpole --max-steps 1000000 --dry-run
    """
    from pipelines.errors import StageFailed
    from pipelines.lake.maintenance import compaction
    from pipelines.lake.maintenance import retention as engine
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result, Table

    limits = engine.RetentionLimits(
        max_steps=max_steps or 0,
        max_trajectories=max_trajectories or 0,
        max_bytes=max_bytes or 0,
        max_age=max_age or 0.0,
        where=where,
    )
    opened = Lake(lake)
    common.concerns(lake=opened.name)
    with common.listening() as listener:
        done = engine.expire(opened, limits, grace_seconds=grace, dry_run=dry_run, listener=listener)
        purged = compaction.purge(opened, listener=listener) if purge and not dry_run else None
    if purged is not None and purged.waiting:
        raise StageFailed(
            f"{purged.waiting} segments of lake '{opened.name}' still hold bytes of expired trajectories",
            hint="a damaged one: amago lake verify --repair; a running collector's: repeat this once it has ended",
        )
    going = done.plan.going
    rows = [
        {
            "segment": part.file.id,
            "trajectories": part.trajectories,
            "of": int(part.file.alive.sum()),
            "steps": part.steps,
            "bytes": round(part.bytes),
            "overlay": part.file.is_overlay,
            "whole": part.is_whole,
        }
        for part in going
    ]
    return Result(
        command="lake expire",
        status="done" if going or (purged and purged.segments) else "skipped",
        lake=opened.name,
        metrics={
            "trajectories": sum(part.trajectories for part in going if not part.file.is_overlay),
            "overlays": sum(part.trajectories for part in going if part.file.is_overlay),
            "steps": sum(part.steps for part in going if not part.file.is_overlay),
            "bytes": round(sum(part.bytes for part in going)),
            "segments": sum(part.is_whole for part in going),
            "protected": done.plan.protected,
            **({"purged_segments": purged.segments, "purged_bytes": purged.bytes} if purged else {}),
            **{f"{name}_left": value for name, value in done.left.items()},
            "expired": rows,
            "dry_run": dry_run,
        },
        tables=[
            Table(
                title="would expire" if dry_run else "expired",
                columns=tuple(rows[0]),
                rows=[tuple(row.values()) for row in rows],
            )
        ]
        if rows
        else [],
        seconds=common.invocation.seconds,
    )
