"""Plan of a chain: the stages of every epoch with their targets, and the lakes that training samples from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.config.lakes import located, parse_share
from pipelines.config.settings import Settings, StageSettings
from pipelines.data.mixture import Share
from pipelines.events import Listener, silent
from pipelines.lake.schema import Schema
from pipelines.lake.store import Lake
from pipelines.stages.environment import collect_steps
from pipelines.stages.forecast import Work
from pipelines.stages.train import Source, refuse_twice, require_shares


@dataclass(frozen=True)
class PlannedStage:
    """One stage of one epoch; `target` is the cumulative count that completes a collect or train."""

    epoch: int
    place: int
    settings: Settings
    entry: StageSettings
    target: int


def plan(settings: Settings) -> Iterator[PlannedStage]:
    """Return every stage of every epoch, in order, with cumulative targets and lake weights."""
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
            yield PlannedStage(epoch, place, stage_settings, entry, totals.get(entry.stage, 0))


def is_due(entry: StageSettings, epoch: int, epochs: int) -> bool:
    """Return whether `entry` runs in `epoch` (0-based) of `epochs`."""
    start = entry.start_epoch if entry.start_epoch >= 0 else epochs + entry.start_epoch
    if epoch < start or (entry.stop_epoch is not None and epoch >= entry.stop_epoch):
        return False
    return (epoch - start) % entry.every == 0


def work_of(step: PlannedStage) -> Work:
    """Return the amount of work in `step`, for the estimate of the time left."""
    if step.entry.stage == "collect":
        return Work(step.epoch, step.place, "collect", collect_steps(step.settings))
    table = getattr(step.settings, step.entry.stage, None)
    amount = getattr(table, "episodes" if step.entry.stage == "evaluate" else "steps", 1)
    return Work(step.epoch, step.place, step.entry.stage, amount)


def in_chain(settings: Settings, run: Path) -> list[Source]:
    """Return the lakes that a chain's train stage samples from: those of `train.lakes`, otherwise all that the chain
    fills."""
    texts: Sequence[str] = settings.train.lakes
    if not texts:
        filling = {"ingest": settings.source.lake, "collect": ""}
        filled = [filling[entry.stage] for entry in settings.stages if entry.stage in filling]
        return [Source(place) for place in dict.fromkeys(located(text, run) for text in filled or [""])]
    return [Source(located(place, run), weight, last) for place, weight, last in map(parse_share, texts)]


def weighed(settings: Settings, progress: float) -> Settings:
    """Return the settings of an epoch of a chain, with annealed lake weights evaluated at `progress` (0 to 1), unless
    they are annealed over updates."""
    train = settings.train
    if train.anneal_steps or not train.lakes:
        return settings
    found = [
        (place, Share(weight, weight if last is None else last))
        for place, weight, last in map(parse_share, train.lakes)
    ]
    lakes = tuple(f"{place}:{share.at(progress):.12g}" for place, share in found)
    return settings.model_copy(update={"train": train.model_copy(update={"lakes": lakes})})


def places_in_chain(settings: Settings, run: Path) -> list[Path | str]:
    """Return every lake that a train stage of the chain samples from, in order."""
    stages = [settings.for_stage(entry) for entry in settings.stages if entry.stage == "train"]
    return list(dict.fromkeys(source.place for stage in stages for source in in_chain(stage, run)))


def require_mixtures(settings: Settings, run: Path) -> None:
    """Raise UsageError if a train stage of the chain would have nothing to sample."""
    for entry in settings.stages:
        if entry.stage == "train":
            require_shares(in_chain(settings.for_stage(entry), run), None)


def open_in_chain(
    places: Sequence[Path | str], schema: Schema, *, own: Path, listener: Listener = silent
) -> list[Lake]:
    """Open the lakes of a chain's mixtures; the run's own may still be empty."""
    lakes = []
    for place in places:
        lake = Lake.open(place) if place != own or len(places) == 1 else Lake.open_or_create(place)
        lake.require_schema(schema)
        if place == own:
            lake.register(schema)
        else:
            lake.salvage(listener=listener)
        lakes.append(lake)
    refuse_twice(lakes)
    return lakes
