"""`amago lake verify`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amago_cli.options import Common, LakeArgument, reader

if TYPE_CHECKING:
    from pipelines.lake.maintenance.verify import RepairResult, VerifyReport
    from pipelines.stages.result import Table


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

    The logs of collectors that were killed are sealed first. --repair writes the intact trajectories of a damaged
    segment to a new one, moves its file to quarantine/ and lists the trajectories that are lost. If the lake's log is
    damaged, it restarts the log with what can be read: what the rest removed is live again, as far as it is there.

    Example: amago lake verify runs/cartpole
    """
    from pipelines.errors import IntegrityError
    from pipelines.lake.maintenance import verify as engine
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result

    opened = Lake(lake)
    common.concerns(lake=opened.name)
    repaired: RepairResult | None = None
    with common.listening() as listener:
        opened.salvage(listener=listener)
        checked = engine.verify(opened, listener)
        if repair:
            repaired = engine.repair(opened, checked, listener=listener)
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
            **({} if repaired is None else _figures(repaired)),
        },
        tables=_tables(checked, repaired),
        seconds=common.invocation.seconds,
    )
    problems = [*_problems(checked, repaired, opened.name), *_missing(checked, opened.name)]
    problems += [f"{text}; --repair restarts the log without it" for text in checked.log] if repaired is None else []
    if problems:
        error = IntegrityError("; ".join(problems))
        error.result = result
        raise error
    return result


def _figures(repaired: RepairResult) -> dict[str, Any]:
    return {
        "repaired": [{"segment": id, "into": into} for id, into in repaired.segments.items()],
        "lost": list(repaired.lost),
        "orphans": list(repaired.orphans),
        "unknown": list(repaired.unknown),
    }


def _tables(checked: VerifyReport, repaired: RepairResult | None) -> list[Table]:
    from pipelines.stages.result import Table

    made = [] if repaired is None else [(id, into or "nothing") for id, into in repaired.segments.items()]
    lost = [] if repaired is None else [(uid,) for uid in (*repaired.lost, *repaired.orphans)]
    parts: Sequence[tuple[str, Sequence[str], Sequence[Sequence[Any]]]] = (
        ("corrupt", ("segment", "why"), [(found.segment, found.reason) for found in checked.corrupt]),
        ("missing", ("segment", "trajectories"), list(checked.missing.items())),
        ("repaired", ("segment", "recovered into"), made),
        ("lost, or derived from a lost trajectory", ("uid",), lost),
        ("not of this lake", ("file",), [(path,) for path in checked.foreign]),
    )
    return [Table(title=title, columns=columns, rows=rows) for title, columns, rows in parts if rows]


def _missing(checked: VerifyReport, name: str) -> list[str]:
    problems = []
    if checked.missing:
        count = sum(checked.missing.values())
        problems.append(f"lake '{name}' lacks {', '.join(checked.missing)} ({count} trajectories): restore from a copy")
    if checked.logs:
        problems.append(
            f"logged trajectories are lost: {', '.join(checked.logs)} could not be read completely; "
            "remove the file to verify without it"
        )
    return problems


def _problems(checked: VerifyReport, repaired: RepairResult | None, name: str) -> list[str]:
    if repaired is None:
        corrupt = [str(segment) for segment in checked.corrupt]
        if not corrupt:
            return []
        number = f"{len(corrupt)} corrupt segment{'s' if len(corrupt) > 1 else ''}"
        return [f"{number} in lake '{name}': {', '.join(corrupt)}; --repair recovers the intact trajectories"]
    problems = []
    if repaired.lost:
        count = len(repaired.lost)
        problems.append(f"{count} trajector{'ies are' if count > 1 else 'y is'} lost in lake '{name}'")
    if repaired.unknown:
        problems.append(f"the content of {', '.join(repaired.unknown)} is unknown")
    return problems
