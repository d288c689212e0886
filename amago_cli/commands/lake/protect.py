"""`amago lake protect`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import Common, LakeArgument, reader


@reader
def protect(
    common: Common,
    lake: LakeArgument,
    snapshot: Annotated[
        str | None,
        typer.Option(
            "--snapshot",
            metavar="RUN[@CHECKPOINT]",
            help="Keep the trajectories that this checkpoint could sample.",
            autocompletion=completion.runs_at_checkpoints,
        ),
    ] = None,
    whole: Annotated[bool, typer.Option("--all", help="Keep everything, including future additions.")] = False,
    off: Annotated[
        str | None, typer.Option("--off", metavar="NAME", help="Remove a protection, by its name in the list.")
    ] = None,
) -> Any:
    """Protect a lake, or the trajectories of a checkpoint, from expiring; without an option, list protections.

    Neither `amago lake expire` nor a collector's limits touch what is protected. Compaction may move it; the checkpoint
    still samples the same, byte for byte.

    Example: amago lake protect runs/cartpole --snapshot runs/cartpole@best
    """

    from pipelines.config.run_directory import RunDirectory
    from pipelines.errors import InputMissing, UsageError
    from pipelines.lake import log as engine
    from pipelines.lake.lineage import read_snapshots, split
    from pipelines.lake.log import list_protections
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result, Table

    if sum((snapshot is not None, whole, off is not None)) > 1:
        raise UsageError("--all, --snapshot and --off exclude each other", hint="give one of them")
    opened = Lake(lake)
    common.concerns(lake=opened.name)
    if whole:
        engine.protect(opened)
    elif off is not None:
        engine.unprotect(opened, off)
    elif snapshot is not None:
        path, which = split(snapshot)
        directory = RunDirectory(path)
        update, _, snapshots = read_snapshots(directory, which)
        ids = [id for found in snapshots if found["id"] == opened.id for id in found["segments"]]
        if not ids:
            raise InputMissing(
                f"checkpoint {update} of run '{path}' was not trained on lake '{opened.name}'",
                hint=f"see what it was trained on: amago lake lineage {path}@{update}",
            )
        engine.protect(opened, dict.fromkeys(ids), name=f"{directory.path.resolve().name}@{update}")
    found = list_protections(opened.storage)
    rows = [
        (kept.name, "everything" if kept.is_whole else f"the trajectories of {len(kept.segments)} segments")
        for kept in found
    ]
    return Result(
        command="lake protect",
        lake=opened.name,
        metrics={"protected": {protection.name: len(protection.segments) for protection in found}},
        tables=[Table(title="protected", columns=("name", "scope"), rows=rows or [("nothing", "")])],
        seconds=common.invocation.seconds if whole or off or snapshot else 0.0,
    )
