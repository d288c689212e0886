"""export: a policy to deploy."""

from __future__ import annotations

import time
from pathlib import Path

from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings
from pipelines.events import Listener, silent
from pipelines.export.policy_bundle import write_bundle
from pipelines.stages.result import Result
from pipelines.training import checkpoint as checkpoints


def run(settings: Settings, *, run: Path, listener: Listener = silent) -> Result:
    """Write the policy bundle of a checkpoint to `export.to` (default: RUN/export), replacing an older one there."""
    started = time.monotonic()
    directory = RunDirectory.open(run)
    checkpoint = checkpoints.load(directory.checkpoints, settings.export.checkpoint)
    to = Path(settings.export.to) if settings.export.to else directory.path / "export"
    size = write_bundle(checkpoint.acting, checkpoint.record, to)
    return Result(
        command="export",
        run=run,
        metrics={"update": checkpoint.update, "bytes": size},
        outputs=[to],
        seconds=time.monotonic() - started,
    )
