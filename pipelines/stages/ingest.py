"""collect --from: import trajectories into a lake.

Trajectories are imported in the order of their source and numbered, so repeating the command resumes with the first one
that is missing from the lake, even after a kill. All data is read and validated once before the first trajectory is
stored.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.config.run_directory import RunDirectory, describe_process
from pipelines.config.settings import Settings
from pipelines.errors import InputMissing
from pipelines.events import Listener, Notice, Progress, silent
from pipelines.formats.base import EPISODE, Importer
from pipelines.formats.make import open_importer
from pipelines.lake import collectors
from pipelines.lake.log import read_log
from pipelines.lake.schema import Schema
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectories
from pipelines.stages.result import Result


def run(
    settings: Settings,
    *,
    run: Path | None = None,
    lake: Path | str | None = None,
    listener: Listener = silent,
    fresh: bool = False,
    recipe: Mapping[str, Any] | None = None,
) -> Result:
    """Import from `source.name` until it is exhausted or `source.steps` are in the lake. `recipe` is recorded in a new
    run, as by `collect`.

    InputMissing if the source does not exist or does not match, IntegrityError if it is damaged; the lake is then
    unchanged.
    """
    started = time.monotonic()
    directory = RunDirectory(run) if run is not None else None
    where = lake if lake is not None else (directory or RunDirectory(".")).lake
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(contextlib.closing(open_source(settings, listener)))
        if directory is not None:
            stack.enter_context(directory.lock("collect"))
            directory.refuse_changes("collect", settings, fresh=fresh)
        # Not the name of the run, under which its own collector counts the steps that it plays.
        name = f"{source.label}-{source.fingerprint[:8]}"
        if directory is None or lake is not None:
            stack.enter_context(collectors.hold_name(where, name))
        replaced = fresh and directory is not None and lake is None
        if fresh and not replaced:
            name = f"{name}-{time.time_ns():x}"
        intake = _Ingestion(settings, source, None if replaced else Lake.find(where), name=name, listener=listener)
        intake.refuse_other_content(fresh=fresh)
        intake.check()
        if directory is not None:
            directory.record("collect", settings, fresh=fresh, recipe=recipe)
        if replaced:
            shutil.rmtree(where, ignore_errors=True)
        metrics = intake.store(where, directory)
    if not metrics["trajectories"]:
        text = f"all that was to be imported of '{settings.source.name}' is in the lake"
        listener(Notice(text=f"{text}; --add N plays N steps, by --policy or at random"))
    metrics["seconds"] = time.monotonic() - started
    metrics["steps_per_second"] = metrics["steps"] / metrics["seconds"]
    return Result(
        command="collect",
        status="done" if metrics["trajectories"] else "skipped",
        run=run,
        lake=where,
        metrics=metrics,
        outputs=[where],
        seconds=metrics["seconds"],
    )


def open_source(settings: Settings, listener: Listener = silent) -> Importer:
    """Open `source.name`, whose steps are to fit the environment of the settings, if they name one."""
    spaces = horizon = None
    if settings.env.name:
        from pipelines.rollout.environment import make_env

        with contextlib.closing(make_env(settings.env, actors=1, seed=0)) as env:
            spaces, horizon = env.spec.spaces, env.spec.horizon
    return open_importer(settings.source, spaces=spaces, horizon=horizon, listener=listener)


class _Ingestion:
    """Import of one source into a lake, starting from the first missing trajectory."""

    def __init__(
        self, settings: Settings, source: Importer, existing: Lake | None, *, name: str, listener: Listener
    ) -> None:
        self._settings, self._source, self._existing, self.name = settings, source, existing, name
        self._listener, self._schema = listener, Schema(source.spaces, labelled=source.labelled, logp=source.logp)
        self._place = f"{settings.source.name}"
        self.before = self._next = self._expired = 0
        if existing is not None:
            existing.require_schema(self._schema, to_write=True)
            self.before, self._next, self._expired = count_stored(existing, name)

    def refuse_other_content(self, *, fresh: bool) -> None:
        """Raise InputMissing if the lake was filled from the same place when its contents were different."""
        if self._existing is None or fresh:
            return
        for name, record in collectors.read_all(self._existing).items():
            known = (record.get("env") or {}).get("source")
            if (
                not isinstance(known, dict)
                or known.get("name") != self._place
                or not count_stored(self._existing, name)[0]
            ):
                continue
            if known.get("fingerprint") != self._source.fingerprint:
                raise InputMissing(
                    f"'{self._place}' was taken into lake '{self._existing.name}' before, and has changed since",
                    hint="take all of it in with --fresh, or into another lake",
                )

    def check(self) -> None:
        """Read all trajectories to import, and refuse invalid ones."""
        if self._settings.source.check and getattr(self._source, "repeats", True):
            done = self.before
            for batch in self._batches():
                done += steps_of(batch)
                self._report("check", done)
            self._require_some(done)

    def _require_some(self, done: int) -> None:
        if not done and not self._expired and self._source.dropped:
            raise InputMissing(
                f"'{self._place}': none of its {self._source.dropped} trajectories has a usable step",
                hint="a step that is not terminal is usable where its next observation is in the data",
            )

    def store(self, where: Path | str, directory: RunDirectory | None) -> dict[str, Any]:
        """Append the trajectories, and return what this call imported."""
        stream = self._batches()
        first = next(stream, None)
        done, returns, trajectories = self.before, 0.0, 0
        if first is not None:
            lake = Lake.open_or_create(where)
            lake.require_schema(self._schema, to_write=True)
            self._register(lake, directory)
            seconds = self._settings.collect.seal_seconds
            with lake.writer(self._schema, name=self.name, seal_seconds=seconds) as writer:
                batch: Trajectories | None = first
                while batch is not None:
                    infos = [replace(info, collector=self.name) for info in batch.infos]
                    writer.append_many(replace(batch, infos=infos))
                    done += steps_of(batch)
                    trajectories += len(batch)
                    returns += float(batch.columns["reward"].sum(dtype="float64"))
                    self._report("collect", done)
                    batch = next(stream, None)
        self._require_some(done)
        if self._source.dropped:
            text = f"{self._source.dropped} trajectories without a usable step were left out"
            self._listener(Notice(text=text, level="warning"))
        return {
            "steps": done - self.before,
            "steps_total": done,
            "trajectories": trajectories,
            "return_mean": returns / trajectories if trajectories else None,
            "dropped": self._source.dropped,
        }

    def _register(self, lake: Lake, directory: RunDirectory | None) -> None:
        about: dict[str, Any] = {"name": self._place, "fingerprint": self._source.fingerprint}
        if described := getattr(self._source, "described", None):
            about["described"] = described
        env = {**self._settings.env.model_dump(mode="json"), "source": about}
        env["name"] = env.get("name") or self._source.env
        collectors.register(
            lake,
            self.name,
            run=None if directory is None else collectors.place(directory.path) | {"id": directory.identity},
            env=env,
            seed=self._settings.seed,
            process=describe_process(),
        )

    def _batches(self) -> Iterator[Trajectories]:
        """Yield the trajectories missing from the lake, up to the requested steps, with the requested environment's
        name."""
        target, done = self._settings.source.steps, self.before
        if target and done >= target:
            return
        for batch in self._unseen():
            if target and done + steps_of(batch) > target:
                batch = _take_first(batch, target - done)
            if self._settings.env.name:
                batch = replace(batch, infos=[replace(i, env=self._settings.env.name) for i in batch.infos])
            done += steps_of(batch)
            yield batch
            if target and done >= target:
                return

    def _unseen(self) -> Iterator[Trajectories]:
        """Skip stored trajectories by counting steps if some have expired, because the highest number may be gone
        too."""
        if not self._expired:
            yield from self._source.batches(self._next)
            return
        seen = 0
        for batch in self._source.batches():
            kept = []
            for trajectory in batch:
                number = int(trajectory.info.tags[EPISODE])
                fresh = number >= self._next and seen >= self.before
                seen += trajectory.length
                if fresh:
                    kept.append(trajectory)
            for trajectory in kept:
                rows = [trajectory.length + 1]
                yield Trajectories(trajectory.columns, rows, [trajectory.info])

    def _report(self, stage: str, done: int) -> None:
        totals = [count for count in (self._settings.source.steps, self._source.steps) if count]
        total = max(min(totals), done) if totals else None
        self._listener(Progress(stage=stage, done=done, total=total, unit="steps"))


def steps_of(batch: Trajectories) -> int:
    """Count the actions of all trajectories."""
    return sum(batch.rows) - len(batch)


def count_stored(lake: Lake, collector: str) -> tuple[int, int, int]:
    """Count the steps that `collector` has stored, including expired ones; return also the next free number and how
    many trajectories have expired."""
    lake.salvage()
    quoted = collector.replace("'", "''")
    highest = f"max(try_cast(map_extract(tags, '{EPISODE}')[1] as bigint))"
    sql = f"select coalesce(sum(length), 0), coalesce({highest}, -1) from trajectories where collector = '{quoted}'"
    expired = read_log(lake.storage).steps[collector]
    _, rows = query(lake, f"{sql} and base_uid is null")
    return int(rows[0][0]) + expired, int(rows[0][1]) + 1, expired


def _take_first(batch: Trajectories, steps: int) -> Trajectories:
    """Take the first trajectories of `batch`, until they have at least `steps` steps."""
    count = taken = 0
    while taken < steps:
        taken += batch.rows[count] - 1
        count += 1
    rows = sum(batch.rows[:count])
    return Trajectories(
        {name: values[:rows] for name, values in batch.columns.items()}, batch.rows[:count], batch.infos[:count]
    )
