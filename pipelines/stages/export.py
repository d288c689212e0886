"""export: write a policy bundle, or trajectories for other tools."""

from __future__ import annotations

import time
from pathlib import Path

from pipelines.config.lakes import refuse_scheme
from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings
from pipelines.errors import InputMissing, UsageError
from pipelines.events import Listener, silent
from pipelines.export.policy_bundle import write_bundle
from pipelines.formats import export as datasets
from pipelines.formats.make import exporter
from pipelines.lake.footer import hex_uids
from pipelines.lake.reading import Reader
from pipelines.lake.store import Lake
from pipelines.learning import checkpoint as checkpoints
from pipelines.stages.result import Result

POLICY = "safetensors"  # the policy format; all others are for trajectories


def run(settings: Settings, *, run: Path, listener: Listener = silent) -> Result:
    """Export to `export.to` in the format `export.format`: the policy bundle of a checkpoint (default: RUN/export,
    replacing an older one), or the trajectories of the run's lake, see `dataset`."""
    if settings.export.format != POLICY:
        return dataset(settings, lake=run, listener=listener)
    started = time.monotonic()
    refuse_scheme(settings.export.to, what="give a directory")
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


def dataset(settings: Settings, *, lake: Path | str, listener: Listener = silent) -> Result:
    """Export the trajectories of a lake that match `export.where`; `export.to` defaults to the folder `dataset` in the
    lake's run. InputMissing if there are none."""
    wanted, started = settings.export, time.monotonic()
    refuse_scheme(wanted.to, what="give a directory")
    exporter(wanted.format)
    store = Lake.open(lake)
    store.salvage(listener=listener)
    to = Path(wanted.to) if wanted.to else default_folder(store)
    uids = Reader(store, listener=listener).uids()
    if wanted.where.strip():
        from pipelines.lake.sql.selection import select

        chosen = set(hex_uids(select(store, wanted.where, listener=listener).uids))
        uids = [uid for uid in uids if uid in chosen]
    if not uids:
        what = "no trajectory that matches" if wanted.where.strip() else "no trajectories"
        raise InputMissing(f"lake '{store.name}' has {what}")
    said = {"author": wanted.author, "description": wanted.description}
    about = {"lake": store.id, "where": wanted.where, **{name: text for name, text in said.items() if text}}
    done = datasets.export(store, uids, to, form=wanted.format, about=about, listener=listener)
    return Result(
        command="export",
        status="done" if done.written else "skipped",
        lake=store.name,
        metrics={
            "trajectories": done.trajectories,
            "steps": done.steps,
            "written": done.written,
            "bytes": done.bytes,
        },
        outputs=[to],
        seconds=time.monotonic() - started,
    )


def default_folder(lake: Lake) -> Path:
    """Return the default folder of a dataset, in the lake's run. UsageError if the lake does not belong to a run."""
    if lake.run is None or not RunDirectory(lake.run).exists():
        raise UsageError(f"lake '{lake.name}' lies in no run's directory", hint="say where to write: --to DIR")
    return lake.path.parent / "dataset"
