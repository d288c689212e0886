"""train: gradient updates on windows sampled from lakes."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.config.host import is_main
from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings, TrainSettings
from pipelines.data.mixture import Share
from pipelines.errors import InputMissing, StorageError, UsageError
from pipelines.events import Listener, Notice, silent, wait_for
from pipelines.lake.footer import hex_uids
from pipelines.lake.schema import LABEL, OPTIONAL, Schema
from pipelines.lake.spaces import Spaces
from pipelines.lake.sql.catalog import query
from pipelines.lake.sql.describing import find_duplicates
from pipelines.lake.sql.selection import select
from pipelines.lake.storage import is_remote
from pipelines.lake.store import Lake, describe_added, describe_difference
from pipelines.learning.checkpoint import resolve_device
from pipelines.nets import ranks
from pipelines.rollout.rollout import UNFINISHED
from pipelines.runs.progress import record_progress
from pipelines.stages.resolve import find_environment, find_longest_episode, with_stored_window, with_window
from pipelines.stages.result import Result
from pipelines.tracking.background import track_run
from pipelines.training.data import require_columns
from pipelines.training.trainer import Trainer


class Source(NamedTuple):
    """A lake and its relative weight in a mixture; `last`: the weight at the end of annealing."""

    place: Path | str
    weight: float = 1.0
    last: float | None = None

    @property
    def share(self) -> Share:
        return Share(self.weight, self.weight if self.last is None else self.last)


def run(
    settings: Settings,
    *,
    run: Path,
    lakes: Sequence[tuple[Any, ...]],
    listener: Listener = silent,
    fresh: bool = False,
    add: bool = False,
) -> Result:
    """Train the run up to `train.steps` updates, or with `add` by so many more, on `lakes`: (place, weight) or (place,
    weight, last weight).

    InputMissing if a lake does not exist or is empty, unless it is followed; UsageError if the run was trained on other
    lakes or with other weights, unless `fresh`.
    """
    sources = [Source(*lake) for lake in lakes]
    require_shares(sources, settings.train)
    directory = RunDirectory(run)
    started = time.monotonic()
    ranks.join(resolve_device(settings.train.device), timeout_seconds=settings.train.rank_timeout)
    with contextlib.ExitStack() as held:
        with ranks.raise_together():
            if is_main():
                held.enter_context(directory.lock("train"))
        with ranks.raise_together():
            train = settings.train if fresh else with_stored_window(settings.train, directory.load_document())
            directory.refuse_changes("train", settings.model_copy(update={"train": train}), fresh=fresh)
            labels = settings.agent.target == "label"
            opened = _open_lakes(sources, follow=train.follow, labels=labels, listener=listener)
            if len(opened) > 1 and is_main():
                for each in find_duplicates(opened):
                    listener(each.as_notice())
            env = find_environment(opened, settings.env, listener)
            train = with_window(train, settings.agent, find_longest_episode(opened), listener)
            settings = settings.model_copy(update={"env": env, "train": train})
            shared = [(lake, source.share) for lake, source in zip(opened, sources, strict=True)]
            schema = opened[0].only_schema(labels=labels)
            require_columns(schema, settings.agent, lake=opened[0].name)
            if is_main():
                for lake in opened:
                    _warn_of_lacking(lake, schema.spaces, listener)
            spaces = schema.spaces
        with ranks.raise_together():
            trainer = Trainer(settings, directory, spaces, listener=listener, resume=not fresh)
            if not fresh:
                _refuse_other_lakes(directory, describe_lakes(shared))
        before = trainer.learner.update
        if add:
            train = train.model_copy(update={"steps": before + train.steps})
            settings = settings.model_copy(update={"train": train})
        data = trainer.draw_from(shared, listener)
        with ranks.raise_together():
            if is_main():
                if fresh:  # check all inputs before anything is removed or written
                    forget(directory)
                directory.record("train", settings, fresh=fresh)
                directory.update_record(lakes=describe_lakes(shared))
        with contextlib.ExitStack() as recorded:
            listen = listener
            if is_main():
                listen = recorded.enter_context(record_progress(run, listener))
                recorded.enter_context(track_run(settings.track.to, directory, settings.document(), listen))
                if is_remote(opened[0].name) if train.publish == "auto" else train.publish:
                    recorded.enter_context(trainer.publishing(opened[0], listen))
            metrics = trainer.train(data, train.steps, listen)
        if is_main():
            metrics |= _measure_returns(opened, schema, where=train.where, listener=listener)
        if ranks.count_joined() > 1:
            metrics["ranks"] = ranks.count_joined()
        ranks.leave()
    return Result(
        command="train",
        status="done" if trainer.learner.update > before else "skipped",
        run=run,
        lake=", ".join(lake.name for lake in opened),
        metrics=metrics,
        outputs=[directory.checkpoints / f"{trainer.learner.update:06d}"],
        seconds=time.monotonic() - started,
    )


def _measure_returns(
    lakes: Sequence[Lake], schema: Schema, *, where: str, listener: Listener = silent
) -> dict[str, float]:
    """Average the returns of the finished original episodes of `lakes` that are trained on, themselves or in versions
    with the columns of `schema`, as far as a piece matches `where`, and count them; empty if there are none, or if a
    store cannot be read."""
    total = count = 0.0
    try:
        for lake in lakes:
            own = lake.schema_of(schema.spaces, labels=schema.labelled).id
            of_schema = f"select coalesce(base_uid, uid) from trajectories where schema = '{own}'"
            text = f"""from episodes where complete and base_uid is null
                and coalesce(map_extract(tags, '{UNFINISHED}')[1], '') != 'true'
                {f"and uids[1] in ({of_schema})" if len(lake.schemas()) > 1 else ""}"""
            if where:
                chosen = set(hex_uids(select(lake, where, schema_id=own, listener=listener).uids))
                bases = "select uid, base_uid from trajectories where base_uid is not null"
                chosen |= {base for uid, base in query(lake, bases, listener=listener)[1] if uid in chosen}
                _, rows = query(lake, f'select uids, "return" {text}', listener=listener)
                found = [value for uids, value in rows if not chosen.isdisjoint(uids)]
                total, count = total + math.fsum(found), count + len(found)
            else:
                ((value, number),) = query(lake, f'select sum("return"), count(*) {text}', listener=listener)[1]
                total, count = total + (value or 0.0), count + number
    except StorageError:
        return {}
    return {"data_return_mean": total / count, "data_episodes": int(count)} if count else {}


def _refuse_other_lakes(directory: RunDirectory, wanted: list[dict[str, Any]]) -> None:
    record = directory.load_record()
    problems = changes(record["lakes"], wanted) if "train" in record.get("stages", {}) and "lakes" in record else ()
    if problems:
        raise UsageError(
            f"run '{directory.path}' was trained on other lakes, or with other weights",
            hint="repeat it unchanged, start over with --fresh, or choose another --run",
            problems=problems,
        )


def forget(directory: RunDirectory) -> None:
    """Remove the training results of the run, and its record of them."""
    shutil.rmtree(directory.checkpoints, ignore_errors=True)
    for made in (directory.evaluations, directory.videos):
        shutil.rmtree(made, ignore_errors=True)
    for file in (directory.metrics_path, directory.track_path):
        file.unlink(missing_ok=True)


def require_shares(sources: Sequence[Source], train: TrainSettings | None) -> None:
    """Raise UsageError for a mixture without anything to sample; in a chain (None) weights may be annealed over
    epochs."""
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


def _open_lakes(
    sources: Sequence[Source], *, follow: bool, labels: bool = False, listener: Listener = silent
) -> list[Lake]:
    """Open the lakes of a mixture, for their steps with `labels` or without; with `follow`, wait for those that do not
    exist yet or have no spaces.

    InputMissing if one does not exist, or if their spaces differ; UsageError if one is named twice.
    """
    if follow:

        def find(place: Path | str) -> Lake | None:
            lake = Lake.find(place)
            return lake if lake is not None and lake.schemas() else None

        lakes = [wait_for(partial(find, source.place), f"lake '{source.place}'", listener) for source in sources]
    else:
        lakes = [Lake(source.place) for source in sources]
    refuse_twice(lakes)
    for lake in lakes:
        lake.salvage(listener=listener)
    first = lakes[0].only_schema(labels=labels)
    for lake in lakes[1:]:
        schema = lake.only_schema(labels=labels)
        if schema.id != first.id:
            sides = (f"in '{lakes[0].name}'", f"in '{lake.name}'")
            if schema.spaces == first.spaces and (column := schema.find_difference(first)):
                raise InputMissing(
                    f"lakes '{lakes[0].name}' and '{lake.name}' cannot be mixed: "
                    f"only one of them has {OPTIONAL[column]}",
                    hint="add labels to the other: amago relabel --from-lake LAKE --with label:POLICY"
                    if column == LABEL
                    else f"collect both with collect.{column}, or both without",
                )
            what = "; ".join(describe_difference(first.spaces, schema.spaces, sides))
            raise InputMissing(
                f"lakes '{lakes[0].name}' and '{lake.name}' hold steps of different spaces: {what}",
                hint="only lakes with the same observations and actions can be mixed",
            )
    return lakes


def _warn_of_lacking(lake: Lake, spaces: Spaces, listener: Listener) -> None:
    """Warn of trajectories that are not drawn from, since they lack observation columns that others have."""
    schemas = lake.schemas()
    for before in lake.list_spaces():
        if before == spaces:
            continue
        lacking, having = (
            ", ".join(f"'{id}'" for id, schema in schemas.items() if schema.spaces == each) for each in (before, spaces)
        )
        text = f"""select count(*) from trajectories where schema in ({lacking}) and base_uid is null and uid not in
            (select base_uid from trajectories where schema in ({having}) and base_uid is not null)"""
        [(count,)] = query(lake, text, listener=listener)[1]
        if count:
            names = ", ".join(sorted(spaces.observation.keys() - before.observation.keys()))
            way = (
                f"; amago relabel --from-lake {lake.name} {added}" if (added := describe_added(before, spaces)) else ""
            )
            text = f"{count} trajectories of lake '{lake.name}' lack {names} and are not drawn from{way}"
            listener(Notice(stage="train", text=text, level="warning"))


def refuse_twice(lakes: Sequence[Lake]) -> None:
    for number, lake in enumerate(lakes):
        if any(lake.id == other.id for other in lakes[:number]):
            raise UsageError(f"lake '{lake.name}' is named twice", hint="give each lake once, with its weight")


def describe_lakes(lakes: Sequence[tuple[Lake, Share]]) -> list[dict[str, Any]]:
    """Describe the lakes of a training and their weights, for the run's record."""
    urls = [lake.storage.url() for lake, _ in lakes]
    places = [url if is_remote(url) else str(Path(url).resolve()) for url in urls]
    return [
        {"id": lake.id, "lake": place, "weight": share.first, "last": share.last}
        for (lake, share), place in zip(lakes, places, strict=True)
    ]


def changes(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Write a phrase for each difference between two such records; a lake recreated in place counts as the same."""

    def is_same(old: dict[str, Any], new: dict[str, Any]) -> bool:
        is_one = old["id"] == new["id"] or old["lake"] == new["lake"]
        return is_one and (old["weight"], old["last"]) == (new["weight"], new["last"])

    gone, new = (
        [each for each in some if not any(is_same(each, other) for other in others)]
        for some, others in ((before, after), (after, before))
    )
    return tuple(
        f"--from-lake {each['lake']}:{each['weight']:g}{last}: {what}"
        for some, what in ((gone, "no longer given"), (new, "not given before"))
        for each in some
        for last in ["" if each["last"] == each["weight"] else f"..{each['last']:g}"]
    )
