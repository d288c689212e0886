"""`amago export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from amago_cli.options import Checkpoint, Common, RunArgument, stage


@stage
def export(
    common: Common,
    run: RunArgument,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Directory to write; default: RUN/export.")
    ] = None,
    bundle: Annotated[
        str | None, typer.Option("--format", metavar="NAME", help="Form of the weights: safetensors.")
    ] = None,
    checkpoint: Checkpoint = None,
) -> Any:
    """Write a policy bundle that acts step by step, without the lake or the run.

    Example: amago export runs/quickstart --to exports/quickstart
    """
    from amago_cli.configuration import Request, preview
    from pipelines.config.run_directory import RunDirectory

    named = {
        "export.to": None if to is None else str(to),
        "export.format": bundle,
        "export.checkpoint": checkpoint,
    }
    common.concerns(run=run)
    settings = Request(common, named).settings(RunDirectory.open(run).load_document())
    if common.dry_run:
        return preview(common, settings, writes={"bundle": Path(settings.export.to or run / "export")})
    with common.listening() as listener:
        from pipelines.stages import export as engine

        return engine.run(settings, run=run, listener=listener)
