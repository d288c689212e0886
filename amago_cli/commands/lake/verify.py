"""`amago lake verify`."""

from __future__ import annotations

from typing import Any

from amago_cli.options import Common, LakeArgument, reader


@reader
def verify(common: Common, lake: LakeArgument) -> Any:
    """Read every segment and compare its checksums; exit 4 if one is corrupt. Files no lake wrote are listed.

    What dead collectors have logged is sealed first.

    Example: amago lake verify runs/cartpole
    """
    from pipelines.errors import IntegrityError
    from pipelines.lake import verify as engine
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result, Table

    opened = Lake.open(lake)
    common.concerns(lake=opened.name)
    with common.listening() as listener:
        opened.salvage(listener=listener)
        checked = engine.verify(opened, listener)
    corrupt = [str(segment) for segment in checked.corrupt]
    result = Result(
        command="lake verify",
        lake=opened.name,
        metrics={
            "segments_checked": checked.segments_checked,
            "trajectories": checked.trajectories,
            "corrupt": corrupt,
            "foreign": list(checked.foreign),
            "damaged_tombstones": list(checked.tombstones),
        },
        tables=[
            Table(title=title, columns=columns, rows=rows)
            for title, columns, rows in (
                ("corrupt", ("segment", "why"), [(found.segment, found.reason) for found in checked.corrupt]),
                ("not of this lake", ("file",), [(path,) for path in checked.foreign]),
            )
            if rows
        ],
        seconds=common.invocation.seconds,
    )
    problems = list(checked.tombstones)
    if corrupt:
        number = f"{len(corrupt)} corrupt segment{'s' if len(corrupt) > 1 else ''}"
        problems.insert(0, f"{number} in lake '{opened.name}': {', '.join(corrupt)}")
    if problems:
        error = IntegrityError("; ".join(problems))
        error.result = result
        raise error
    return result
