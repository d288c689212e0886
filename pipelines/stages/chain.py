"""run: chain stages, epoch by epoch, in one process with environments, model and data view kept alive.

Targets are cumulative and counted from what exists (steps in the lake, updates of the newest checkpoint), so a
chain that was killed goes on by the same command: what is done is skipped. `chain.json` only remembers which
one-off stages (relabel, evaluate, export) were passed.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipelines.config.atomic import write_atomically
from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings, StageSettings
from pipelines.errors import UsageError
from pipelines.events import Listener, Notice, silent
from pipelines.stages.result import Result
from pipelines.stages.workshop import Workshop


@dataclass(frozen=True)
class Step:
    """One stage of one epoch; `target` is the cumulative count at which a collect or train is done."""

    epoch: int
    place: int
    settings: Settings
    entry: StageSettings
    target: int


def run(settings: Settings, *, run: Path, listener: Listener = silent, fresh: bool = False) -> Result:
    """Run every stage of every epoch that is not done yet. UsageError if the recipe has no stages."""
    if not settings.stages:
        raise UsageError("the recipe has no stages", hint="add [[stages]] entries; see amago examples quickstart")
    directory = RunDirectory(run)
    started = time.monotonic()
    with directory.lock("run", "collect", "train"):
        directory.record("run", settings, fresh=fresh)
        if fresh:
            _erase(directory)
        steps = list(plan(settings))
        ledger = _Ledger(directory.path / "chain.json")
        done_before = ledger.passed
        if done_before >= len(steps):
            with Workshop(settings, directory) as shop:
                return shop.summary(seconds=time.monotonic() - started, status="skipped")
        with Workshop(settings, directory) as shop:
            for number, step in enumerate(steps):
                if number < done_before:
                    continue
                listener(Notice(text=f"epoch {step.epoch + 1}/{settings.epochs}: {step.entry.stage}", level="debug"))
                shop.perform(step.entry.stage, step.settings, target=step.target, listener=listener)
                ledger.advance(number + 1)
            return shop.summary(seconds=time.monotonic() - started, status="done")


def plan(settings: Settings) -> Iterator[Step]:
    """Every stage of every epoch, in order, with cumulative targets."""
    totals = {"collect": 0, "train": 0}
    for epoch in range(settings.epochs):
        for place, entry in enumerate(settings.stages):
            if not is_due(entry, epoch, settings.epochs):
                continue
            stage_settings = settings.for_stage(entry)
            if entry.stage in totals:
                totals[entry.stage] += getattr(stage_settings, entry.stage).steps
            yield Step(epoch, place, stage_settings, entry, totals.get(entry.stage, 0))


def is_due(entry: StageSettings, epoch: int, epochs: int) -> bool:
    """Whether `entry` runs in `epoch` (0-based) of `epochs`."""
    start = entry.start_epoch if entry.start_epoch >= 0 else epochs + entry.start_epoch
    if epoch < start or (entry.stop_epoch is not None and epoch >= entry.stop_epoch):
        return False
    return (epoch - start) % entry.every == 0


class _Ledger:
    """How many steps of the plan are passed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.passed = json.loads(path.read_text())["passed"] if path.is_file() else 0

    def advance(self, passed: int) -> None:
        self.passed = passed
        write_atomically(self.path, json.dumps({"passed": passed}))


def _erase(directory: RunDirectory) -> None:
    for product in (directory.lake, directory.checkpoints, directory.evaluations, directory.path / "export"):
        shutil.rmtree(product, ignore_errors=True)
    for file in (directory.metrics_path, directory.path / "chain.json"):
        file.unlink(missing_ok=True)
