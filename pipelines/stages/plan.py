"""Plan of a chain: the stages of every epoch with their targets, the lakes that training samples from, and the ledger
of the completed steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipelines.config.places import locate_lake, parse_share
from pipelines.config.settings import Settings, StageSettings
from pipelines.data.mixture import Share
from pipelines.errors import IntegrityError
from pipelines.events import Listener, silent
from pipelines.files.atomic import write_atomically
from pipelines.files.json import read_object
from pipelines.lake.schema import Schema
from pipelines.lake.store import Lake
from pipelines.rollout.environment import collect_steps
from pipelines.stages.forecast import Work
from pipelines.stages.train import Source, refuse_twice


@dataclass(frozen=True)
class PlannedStage:
    """One stage of one epoch; `target` is the cumulative count that completes a collect or train. `is_final`: it is the
    chain's last evaluation, whose scores are those of the run."""

    epoch: int
    place: int
    settings: Settings
    entry: StageSettings
    target: int
    is_final: bool = False

    @property
    def work(self) -> Work:
        """The amount of work, for the estimate of the time left."""
        stage, table = self.entry.stage, getattr(self.settings, self.entry.stage, None)
        if stage == "collect":
            return Work(self.epoch, self.place, stage, collect_steps(self.settings.collect))
        amount = getattr(table, "episodes" if stage == "evaluate" else "steps", 1)
        return Work(self.epoch, self.place, stage, amount)


def plan(settings: Settings) -> list[PlannedStage]:
    """Plan every stage of every epoch, in order, with cumulative targets and lake weights.

    Unless the recipe says otherwise, evaluations after the first update choose the best checkpoint, on tasks for
    training; what they choose says little about other tasks, so the last update is evaluated on tasks for testing, too.
    """
    steps = list(_list_stages(settings))
    last = max((place for place, step in enumerate(steps) if step.entry.stage == "evaluate"), default=None)
    if last is None:
        return steps
    step, wanted = steps[last], steps[last].settings.evaluate
    if wanted.split == "auto" and wanted.task_split == "train":
        steps[last] = replace(step, settings=_with_evaluate(step.settings, label="", require="", video=0))
        last += 1
        steps.insert(last, replace(step, settings=_with_evaluate(step.settings, mark_best=False)))
    steps[last] = replace(steps[last], is_final=True)
    return steps


def _with_evaluate(settings: Settings, **changes: Any) -> Settings:
    return settings.model_copy(update={"evaluate": settings.evaluate.model_copy(update=changes)})


def _list_stages(settings: Settings) -> Iterator[PlannedStage]:
    totals, chooser = {"collect": 0, "train": 0}, _find_chooser(settings)
    dues = [[e for e in range(settings.epochs) if is_due(entry, e, settings.epochs)] for entry in settings.stages]
    numbers = [{epoch: number for number, epoch in enumerate(due)} for due in dues]
    for epoch in range(settings.epochs):
        for place, entry in enumerate(settings.stages):
            if epoch not in numbers[place]:
                continue
            stage_settings = settings.for_stage(entry)
            if entry.stage in totals:
                is_collect, train = entry.stage == "collect", stage_settings.train
                totals[entry.stage] += collect_steps(stage_settings.collect) if is_collect else train.steps
            if entry.stage == "evaluate" and stage_settings.evaluate.mark_best == "auto":
                chooses = place == chooser and totals["train"] > 0
                stage_settings = _with_evaluate(stage_settings, mark_best=chooses)
            train = stage_settings.train
            if entry.stage == "train" and train.lakes and not train.anneal_steps:  # weights move over epochs
                progress = numbers[place][epoch] / max(len(numbers[place]) - 1, 1)
                lakes = (
                    f"{lake}:{Share(weight, weight if last is None else last).at(progress):.12g}"
                    for lake, weight, last in map(parse_share, train.lakes)
                )
                train = train.model_copy(update={"lakes": tuple(lakes)})
                stage_settings = stage_settings.model_copy(update={"train": train})
            yield PlannedStage(epoch, place, stage_settings, entry, totals.get(entry.stage, 0))


def _find_chooser(settings: Settings) -> int | None:
    """Find the entry that chooses the best checkpoint where the recipe leaves that open, by its place: the first that
    evaluates the newest one on tasks that may be used for it. Scores of two entries could not be compared."""
    evaluations = {
        place: settings.for_stage(entry).evaluate
        for place, entry in enumerate(settings.stages)
        if entry.stage == "evaluate" and entry.stop_epoch is None
    }
    if any(wanted.mark_best is True for wanted in evaluations.values()):
        return None
    fit = (
        place
        for place, wanted in evaluations.items()
        if wanted.mark_best == "auto" and wanted.checkpoint == "latest" and wanted.split != "test"
    )
    return next(fit, None)


def is_due(entry: StageSettings, epoch: int, epochs: int) -> bool:
    """Check whether `entry` runs in `epoch` (0-based) of `epochs`."""
    start = entry.start_epoch if entry.start_epoch >= 0 else epochs + entry.start_epoch
    if epoch < start or (entry.stop_epoch is not None and epoch >= entry.stop_epoch):
        return False
    # Results are those of the last update, however many epochs there are.
    is_last = entry.stage == "evaluate" and entry.stop_epoch is None and epoch == epochs - 1
    return is_last or (epoch - start) % entry.every == 0


def list_sources(settings: Settings, run: Path) -> list[Source]:
    """List the lakes that a chain's train stage samples from: those of `train.lakes`, otherwise all that the chain
    fills."""
    texts: Sequence[str] = settings.train.lakes
    if not texts:
        filling = {"ingest": settings.source.lake, "collect": ""}
        filled = [filling[entry.stage] for entry in settings.stages if entry.stage in filling]
        return [Source(place) for place in dict.fromkeys(locate_lake(text, run) for text in filled or [""])]
    return [Source(locate_lake(place, run), weight, last) for place, weight, last in map(parse_share, texts)]


def open_in_chain(
    places: Sequence[Path | str], schema: Schema, *, own: Path, listener: Listener = silent
) -> list[Lake]:
    """Open the lakes of a chain's mixtures; the run's own may still be empty."""
    lakes = []
    for place in places:
        lake = Lake(place) if place != own or len(places) == 1 else Lake.open_or_create(place)
        lake.require_schema(schema)
        if place == own:
            lake.register(schema)
        else:
            lake.salvage(listener=listener)
        lakes.append(lake)
    refuse_twice(lakes)
    return lakes


class ChainLedger:
    """chain.json: number of completed steps of the plan, and the seconds that the parts of its stages took so far."""

    def __init__(self, path: Path) -> None:
        self.path, self.passed = path, 0
        self._seconds: dict[str, float] = {}
        if path.exists():
            stored = read_object(path) or {}
            passed, seconds = stored.get("passed"), stored.get("seconds")
            if not isinstance(passed, int):
                raise IntegrityError(f"'{path}' is damaged", hint="restore it from a copy, or start over with --fresh")
            self.passed = passed
            known = seconds.items() if isinstance(seconds, dict) else ()
            self._seconds = {name: float(spent) for name, spent in known if isinstance(spent, int | float)}

    def advance(self, spent: Mapping[str, float]) -> None:
        """Record one more completed step, and the seconds that its parts took."""
        self.passed += 1
        for name, seconds in spent.items():
            self._seconds[name] = round(self._seconds.get(name, 0.0) + seconds, 3)
        write_atomically(self.path, json.dumps({"passed": self.passed, "seconds": self._seconds}))
