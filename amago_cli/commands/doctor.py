"""`amago doctor`."""

from __future__ import annotations

from typing import Any

from amago_cli.options import Common, reader


@reader
def doctor(common: Common) -> Any:
    """Check this machine and this installation; exit 1 if amago cannot work here.

    Example: amago doctor
    """
    from amago_cli import checkup
    from pipelines.errors import StageFailed
    from pipelines.stages.result import Result, Table

    findings = list(checkup.find_problems())
    rows = [(finding.subject, finding.status, finding.detail) for finding in findings]
    result = Result(
        command="doctor",
        metrics={finding.subject: {"status": finding.status, "detail": finding.detail} for finding in findings},
        tables=(Table(title="this installation", columns=("subject", "status", "detail"), rows=rows),),
    )
    broken = [finding.subject for finding in findings if finding.status == checkup.BROKEN]
    if broken:
        error = StageFailed(f"amago cannot work here: {', '.join(broken)}", hint="see the table above")
        error.result = result
        raise error
    return result
