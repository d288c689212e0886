"""run: chain stages, epoch by epoch, in one process with environments, model and data view kept alive.

Targets are cumulative and counted from what exists (steps in the lake, updates of the newest checkpoint), so a
chain that was killed goes on by the same command: what is done is skipped. `chain.json` only remembers which
one-off stages (relabel, evaluate, export) were passed.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings, StageSettings
from pipelines.errors import IntegrityError, UsageError
from pipelines.events import Listener, silent
from pipelines.files.atomic import write_atomically
from pipelines.files.json import read_object
from pipelines.formats.make import open_importer
from pipelines.stages import evaluate
from pipelines.stages.context import with_stored_window, with_window
from pipelines.stages.environment import collect_steps, make_env, with_actors
from pipelines.stages.forecast import Forecast, Work
from pipelines.stages.lakes import require_mixtures, weighed
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
    if settings.collect.follow:
        raise UsageError("a chain acts with its own agent", hint="leave out collect.follow, or use amago collect")
    directory = RunDirectory(run)
    require_mixtures(settings, run)
    started, spaces, horizon = time.monotonic(), None, None
    with directory.lock("run", "collect", "train"):
        if settings.env.name:
            collects = [collect_steps(step.settings) for step in plan(settings) if step.entry.stage == "collect"]
            settings = with_actors(settings, None if fresh else directory.load_document(), collects=collects)
        if not fresh:
            settings = with_stored_window(settings, directory.load_document())
        directory.refuse_changes("run", settings, fresh=fresh)
        if settings.env.name:
            with contextlib.closing(make_env(settings, actors=1, seed=0)) as env:
                env.reset()  # it can be made, and begin: before anything is written or removed
                spaces, horizon = env.spec.spaces, env.spec.horizon
                for entry in settings.stages:
                    if entry.stage == "evaluate":
                        evaluate.require_metrics(settings.for_stage(entry), env.spec)
        if any(entry.stage == "ingest" for entry in settings.stages):
            open_importer(settings.source, spaces=spaces, horizon=horizon, listener=listener).close()  # likewise
        settings = with_window(settings, horizon, listener)
        if fresh:
            _erase(directory)
        directory.record("run", settings, fresh=fresh)
        steps = list(plan(settings))
        ledger = _Ledger(directory.path / "chain.json")
        done_before = ledger.passed
        if done_before >= len(steps):
            with Workshop(settings, directory) as shop:
                return shop.summary(seconds=time.monotonic() - started, status="skipped")
        forecast = Forecast([_work(step) for step in steps], epochs=settings.epochs, done=done_before)
        tell = forecast.listening(listener)
        with Workshop(settings, directory) as shop:
            for number, step in enumerate(steps):
                if number < done_before:
                    continue
                shop.perform(step.entry.stage, step.settings, target=step.target, listener=tell)
                forecast.finish()
                ledger.advance(number + 1)
            return shop.summary(seconds=time.monotonic() - started, status="done")


def plan(settings: Settings) -> Iterator[Step]:
    """Every stage of every epoch, in order, with cumulative targets and the weights of its lakes."""
    totals = {"collect": 0, "train": 0}
    dues = [[e for e in range(settings.epochs) if is_due(entry, e, settings.epochs)] for entry in settings.stages]
    numbers = [{epoch: number for number, epoch in enumerate(due)} for due in dues]
    for epoch in range(settings.epochs):
        for place, entry in enumerate(settings.stages):
            if epoch not in numbers[place]:
                continue
            stage_settings = settings.for_stage(entry)
            if entry.stage in totals:
                steps = collect_steps(stage_settings) if entry.stage == "collect" else stage_settings.train.steps
                totals[entry.stage] += steps
            if entry.stage == "train":
                progress = numbers[place][epoch] / max(len(numbers[place]) - 1, 1)
                stage_settings = weighed(stage_settings, progress)
            yield Step(epoch, place, stage_settings, entry, totals.get(entry.stage, 0))


def is_due(entry: StageSettings, epoch: int, epochs: int) -> bool:
    """Whether `entry` runs in `epoch` (0-based) of `epochs`."""
    start = entry.start_epoch if entry.start_epoch >= 0 else epochs + entry.start_epoch
    if epoch < start or (entry.stop_epoch is not None and epoch >= entry.stop_epoch):
        return False
    return (epoch - start) % entry.every == 0


def _work(step: Step) -> Work:
    """Return the amount of work in `step`, for the estimate of the time left."""
    if step.entry.stage == "collect":
        return Work(step.epoch, step.place, "collect", collect_steps(step.settings))
    table = getattr(step.settings, step.entry.stage, None)
    amount = getattr(table, "episodes" if step.entry.stage == "evaluate" else "steps", 1)
    return Work(step.epoch, step.place, step.entry.stage, amount)


class _Ledger:
    """How many steps of the plan are passed."""

    def __init__(self, path: Path) -> None:
        self.path, self.passed = path, 0
        if path.exists():
            passed = (read_object(path) or {}).get("passed")
            if not isinstance(passed, int):
                raise IntegrityError(f"'{path}' is damaged", hint="restore it from a copy, or start anew with --fresh")
            self.passed = passed

    def advance(self, passed: int) -> None:
        self.passed = passed
        write_atomically(self.path, json.dumps({"passed": passed}))


def _erase(directory: RunDirectory) -> None:
    own = ("lake", "offline", "checkpoints", "evaluations", "export")
    for product in (directory.path / name for name in own):
        shutil.rmtree(product, ignore_errors=True)
    for file in (directory.metrics_path, directory.path / "chain.json"):
        file.unlink(missing_ok=True)
