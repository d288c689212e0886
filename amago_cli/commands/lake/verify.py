"""`amago lake verify`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amago_cli.options import Common, LakeArgument, reader

if TYPE_CHECKING:
    from pipelines.lake.maintenance.verify import RepairResult, VerifyReport


@reader
def verify(
    common: Common,
    lake: LakeArgument,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Recover the intact trajectories of damaged segments; exit 4 if any are lost."),
    ] = False,
) -> Any:
    """Verify the checksums of every segment; exit 4 if one is corrupt. Unknown files are listed.

    A warning names collectors that have played identical episodes. The logs of collectors that were killed are sealed
    first. --repair writes the intact trajectories of a damaged segment to a new one, moves its file to quarantine/ and
    lists the trajectories that are lost. If the lake's log is damaged, it restarts the log with what can be read: what
    the rest removed is live again, as far as it is there.

    Example: amago lake verify runs/cartpole
    """
    from pipelines.errors import IntegrityError
    from pipelines.lake.maintenance import verify as engine
    from pipelines.lake.sql.describing import find_duplicates
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result, Table

    opened = Lake(lake)
    common.concerns(lake=opened.name)
    repaired: RepairResult | None = None
    with common.listening() as listener:
        opened.salvage(listener=listener)
        checked = engine.verify(opened, listener)
        for each in find_duplicates([opened]):
            listener(each.as_notice())
        if repair:
            repaired = engine.repair(opened, checked, listener=listener)
    figures: dict[str, Any] = {}
    recovered: list[tuple[str, ...]] = []
    lost: list[tuple[str, ...]] = []
    if repaired is not None:
        figures = {
            "repaired": [{"segment": id, "into": into} for id, into in repaired.segments.items()],
            "lost": list(repaired.lost),
            "orphans": list(repaired.orphans),
            "unknown": list(repaired.unknown),
        }
        recovered = [(id, into or "nothing") for id, into in repaired.segments.items()]
        lost = [(uid,) for uid in (*repaired.lost, *repaired.orphans)]
    parts: Sequence[tuple[str, Sequence[str], Sequence[Sequence[Any]]]] = (
        ("corrupt", ("segment", "why"), [(found.segment, found.reason) for found in checked.corrupt]),
        ("missing", ("segment", "trajectories"), list(checked.missing.items())),
        ("repaired", ("segment", "recovered into"), recovered),
        ("lost, or derived from a lost trajectory", ("uid",), lost),
        ("not of this lake", ("file",), [(path,) for path in checked.foreign]),
    )
    result = Result(
        command="lake verify",
        lake=opened.name,
        metrics={
            "segments_checked": checked.segments_checked,
            "trajectories": checked.trajectories,
            "corrupt": [str(segment) for segment in checked.corrupt],
            "missing": list(checked.missing),
            "damaged_logs": list(checked.logs),
            "foreign": list(checked.foreign),
            "damaged_log": list(checked.log),
            **figures,
        },
        tables=[Table(title=title, columns=columns, rows=rows) for title, columns, rows in parts if rows],
        seconds=common.invocation.seconds,
    )
    if problems := list(_describe_problems(checked, repaired, opened.name)):
        error = IntegrityError("; ".join(problems))
        error.result = result
        raise error
    return result


def _describe_problems(checked: VerifyReport, repaired: RepairResult | None, name: str) -> Iterator[str]:
    """Yield a sentence for each kind of damage that is left, and what to do about it."""
    if repaired is None and checked.corrupt:
        corrupt = [str(segment) for segment in checked.corrupt]
        number = f"{len(corrupt)} corrupt segment{'s' if len(corrupt) > 1 else ''}"
        yield f"{number} in lake '{name}': {', '.join(corrupt)}; --repair recovers the intact trajectories"
    if repaired is not None and repaired.lost:
        count = len(repaired.lost)
        yield f"{count} trajector{'ies are' if count > 1 else 'y is'} lost in lake '{name}'"
    if repaired is not None and repaired.unknown:
        yield f"the content of {', '.join(repaired.unknown)} is unknown"
    if checked.missing:
        count = sum(checked.missing.values())
        yield f"lake '{name}' lacks {', '.join(checked.missing)} ({count} trajectories): restore from a copy"
    if checked.logs:
        logs = ", ".join(checked.logs)
        yield (
            f"logged trajectories are lost: {logs} could not be read completely; remove the file to verify without it"
        )
    for text in checked.log if repaired is None else ():
        yield f"{text}; --repair restarts the log without it"
