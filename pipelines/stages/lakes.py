"""The lakes a training draws from: opened, compared, waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pipelines.config.lakes import located, parse_share
from pipelines.config.settings import Settings, TrainSettings
from pipelines.data.mixture import Mixture, Share
from pipelines.data.strategy import Strategy
from pipelines.data.view import Selection, View
from pipelines.errors import InputMissing, UsageError
from pipelines.events import Listener, Notice, Progress, silent
from pipelines.lake.schema import Schema
from pipelines.lake.sql.selection import select
from pipelines.lake.storage import is_remote
from pipelines.lake.store import Lake, difference
from pipelines.stages.versions import make_versions

POLL_SECONDS = 0.5
T = TypeVar("T")


class Source(NamedTuple):
    """A lake and its relative weight in a mixture; `last`: the weight when annealing is done."""

    place: Path | str
    weight: float = 1.0
    last: float | None = None

    @property
    def share(self) -> Share:
        return Share(self.weight, self.weight if self.last is None else self.last)


def in_chain(settings: Settings, run: Path) -> list[Source]:
    """The lakes that a train of a chain draws from: those of `train.lakes`, else all that the chain fills."""
    texts: Sequence[str] = settings.train.lakes
    if not texts:
        filling = {"ingest": settings.source.lake, "collect": ""}
        filled = [filling[entry.stage] for entry in settings.stages if entry.stage in filling]
        return [Source(place) for place in dict.fromkeys(located(text, run) for text in filled or [""])]
    return [Source(located(place, run), weight, last) for place, weight, last in map(parse_share, texts)]


def weighed(settings: Settings, progress: float) -> Settings:
    """The settings of an epoch of a chain: ranges of weights have become what they are at `progress`, 0 to 1, unless
    they move with the updates.
    """
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
    """Every lake that a train of the chain draws from, in order."""
    stages = [settings.for_stage(entry) for entry in settings.stages if entry.stage == "train"]
    return list(dict.fromkeys(source.place for stage in stages for source in in_chain(stage, run)))


def require_mixtures(settings: Settings, run: Path) -> None:
    """UsageError where a train of the chain could not draw anything."""
    for entry in settings.stages:
        if entry.stage == "train":
            require_shares(in_chain(settings.for_stage(entry), run), None)


def require_shares(sources: Sequence[Source], train: TrainSettings | None) -> None:
    """UsageError for a mixture that nothing can be drawn from; in a chain (None) weights may move with the epochs."""
    if not sources:
        raise UsageError("no lake is named", hint="give --from-lake LAKE, e.g. --from-lake runs/cartpole")
    if train is not None and any(source.last is not None for source in sources) and not train.anneal_steps:
        raise UsageError(
            "the weight of a lake is a range, but train.anneal_steps is 0",
            hint="say over how many updates it moves, e.g. --set train.anneal_steps=1000",
        )
    for progress in (0.0, 1.0):
        if not sum(source.share.at(progress) for source in sources) > 0:
            raise UsageError("the weights of the lakes add up to 0", hint="give at least one lake a weight")


def open_lakes(sources: Sequence[Source], *, follow: bool, listener: Listener = silent) -> list[Lake]:
    """The lakes of a mixture; to `follow`: waits for those that are not there or know no spaces yet.

    InputMissing if one is not there, or if their spaces differ; UsageError if one is named twice.
    """
    if follow:
        lakes = [wait_for(partial(_begun, source.place), f"lake '{source.place}'", listener) for source in sources]
    else:
        lakes = [Lake.open(source.place) for source in sources]
    _refuse_twice(lakes)
    for lake in lakes:
        lake.salvage(listener=listener)
    first = lakes[0].only_schema()
    for lake in lakes[1:]:
        schema = lake.only_schema()
        if schema.id != first.id:
            sides = (f"in '{lakes[0].name}'", f"in '{lake.name}'")
            what = "; ".join(difference(first.spaces, schema.spaces, sides))
            raise InputMissing(
                f"lakes '{lakes[0].name}' and '{lake.name}' hold steps of different spaces: {what}",
                hint="only lakes with the same observations and actions can be mixed",
            )
    return lakes


def open_in_chain(
    places: Sequence[Path | str], schema: Schema, *, own: Path, listener: Listener = silent
) -> list[Lake]:
    """The lakes of a chain's mixtures; the run's own may be one that nothing was collected into yet."""
    lakes = []
    for place in places:
        lake = Lake.open(place) if place != own or len(places) == 1 else Lake.open_or_create(place)
        lake.require_schema(schema)
        if place == own:
            lake.register(schema)
        else:
            lake.salvage(listener=listener)
        lakes.append(lake)
    _refuse_twice(lakes)
    return lakes


def _refuse_twice(lakes: Sequence[Lake]) -> None:
    for number, lake in enumerate(lakes):
        if any(lake.id == other.id for other in lakes[:number]):
            raise UsageError(f"lake '{lake.name}' is named twice", hint="give each lake once, with its weight")


def _begun(place: Path | str) -> Lake | None:
    lake = Lake.find(place)
    return lake if lake is not None and lake.schemas() else None


def wait_for(look: Callable[[], T | None], what: str, listener: Listener) -> T:
    """What `look` finds, once it finds something; says that it waits, and can be interrupted."""
    began, said = time.monotonic(), False
    while (found := look()) is None:
        if not said:
            listener(Notice(text=f"waiting for {what}"))
            said = True
        listener(Progress(stage="wait", done=int(time.monotonic() - began), total=None, unit="s"))
        time.sleep(POLL_SECONDS)
    return found


def make_mixture(
    lakes: Sequence[tuple[Lake, Share]], schema: Schema, train: TrainSettings, *, seed: int, listener: Listener
) -> Mixture:
    """What `train` says about drawing, on these lakes."""
    strategy = Strategy(
        weighting=train.weighting,
        placement=train.placement,
        half_life=train.half_life,
        per_alpha=train.per_alpha,
        per_beta=train.per_beta,
    )
    views, versions = [], []
    for lake, share in lakes:
        schema_id = lake.require_schema(schema)
        selection = Selection(where=train.where, weight=train.weight)
        if train.where or train.weight:
            selection = replace(selection, evaluate=partial(_weights, lake, selection, schema_id, listener))
        view = View(lake, schema_id, selection=selection, extra=strategy.extra, listener=listener, verify=train.verify)
        views.append((view, share))
        if train.relabel.relabeler:
            versions.append(make_versions(lake, schema, train.relabel, seed=seed, listener=listener))
    return Mixture(
        views,
        length=train.resolved_context_length,
        seed=seed,
        strategy=strategy,
        anneal_steps=train.anneal_steps,
        versions=versions or None,
    )


def _weights(lake: Lake, selection: Selection, schema_id: str, listener: Listener, uids: np.ndarray) -> np.ndarray:
    found = select(lake, selection.where, selection.weight, schema_id=schema_id, listener=listener)
    return found.weights_of(uids)


def described(lakes: Sequence[tuple[Lake, Share]]) -> list[dict[str, Any]]:
    """The lakes of a training and their weights, as a run's record names them."""
    return [
        {"id": lake.id, "lake": _location(lake), "weight": share.first, "last": share.last} for lake, share in lakes
    ]


def _location(lake: Lake) -> str:
    url = lake.storage.url()
    return url if is_remote(url) else str(Path(url).resolve())


def changes(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """What differs between two such records, a phrase each; a lake made anew in its place is the same one."""
    gone = [f"--from-lake {_shown(old)}: no longer given" for old in before if not any(_same(old, n) for n in after)]
    new = [f"--from-lake {_shown(new)}: not given before" for new in after if not any(_same(o, new) for o in before)]
    return (*gone, *new)


def _same(old: dict[str, Any], new: dict[str, Any]) -> bool:
    one = old["id"] == new["id"] or old["lake"] == new["lake"]
    return one and (old["weight"], old["last"]) == (new["weight"], new["last"])


def _shown(lake: dict[str, Any]) -> str:
    last = f"..{lake['last']:g}" if lake["last"] != lake["weight"] else ""
    return f"{lake['lake']}:{lake['weight']:g}{last}"
