"""`amago verify`."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import Common, reader


@reader
def verify(
    common: Common,
    bundle: Annotated[
        str,
        typer.Argument(
            metavar="BUNDLE",
            help="Directory that `amago export` wrote, zoo:NAME or hf://ORG/NAME.",
            autocompletion=completion.bundles,
        ),
    ],
) -> Any:
    """Verify an exported policy: its checksums, and that every form answers the recorded steps as the policy did.

    Exit 4 if a file was altered or a form acts otherwise. Nothing in the bundle is executed; with --trust, policy.pt2
    and policy.aoti.pt2 are opened too. Where amago is not installed, `python BUNDLE/policy.py` does the same for
    policy.onnx.

    Example: amago verify runs/short/export
    """
    from pipelines.config.places import find_bundle
    from pipelines.errors import InputMissing, IntegrityError
    from pipelines.stages.result import Result, Table

    started = time.monotonic()
    directory = find_bundle(bundle)
    if directory is None:
        raise InputMissing(f"no policy bundle at '{bundle}'", hint="make one with: amago export RUN")
    with common.listening():
        from pipelines.export.verification import verify as engine

        found = engine(directory, trust=common.trust)
    columns = ("form", "difference", "greedy equal", "sampled equal", "")
    rows: list[list[str]] = []
    for form, agreement in found.forms.items():
        shares = (f"{share:.2%}" for share in (agreement.equal_greedy, agreement.equal_sampled))
        state = "holds" if agreement.holds else "DOES NOT HOLD"
        rows.append([form, f"{agreement.greatest_difference:.1e}", *shares, state])
    rows += [[form, "", "", "", f"not tried: {reason}"] for form, reason in found.untried.items()]
    result = Result(
        command="verify",
        status="done" if found.holds else "failed",
        metrics={
            "update": found.update,
            "files": found.files,
            "forms": {form: {**vars(each), "holds": each.holds} for form, each in found.forms.items()},
            "untried": dict(found.untried),
        },
        tables=[Table(title="Forms", columns=columns, rows=rows)],
        seconds=time.monotonic() - started,
    )
    if not found.holds:
        failed = IntegrityError(f"a form of '{bundle}' does not act as the policy did", hint="export it again")
        failed.result = result
        raise failed
    return result
