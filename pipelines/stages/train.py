"""train: gradient updates on windows drawn from a lake, with checkpoints that a kill cannot tear.

A resume restores weights, optimiser, schedules, random streams and the view the sampler drew from, and then takes in
what the lake has gained: on an unchanged lake it repeats an uninterrupted run to the bit.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings
from pipelines.data.mixture import Mixture, Share
from pipelines.data.prefetch import Prefetch
from pipelines.errors import InputMissing, Interrupted, StageFailed, StorageError, UsageError
from pipelines.events import Event, Listener, Notice, Progress, Waiting, silent
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Spaces
from pipelines.lake.store import Lake
from pipelines.stages.context import with_stored_window, with_window
from pipelines.stages.lakes import Source, changes, described, make_mixture, open_lakes, require_shares, wait_for
from pipelines.stages.played import longest_episode, with_environment
from pipelines.stages.result import Result
from pipelines.training import checkpoint as checkpoints
from pipelines.training import speed
from pipelines.training.checkpoint import Checkpoint
from pipelines.training.learner import Learner
from pipelines.training.metrics_log import MetricsLog

SALVAGE_SECONDS = 10.0  # between two looks for logs of collectors that died, when lakes are followed
TOLD = ("loss", "actor_loss", "critic_loss", "grad_norm")  # in a result; the others are in metrics.jsonl


def run(
    settings: Settings,
    *,
    run: Path,
    lakes: Sequence[tuple[Any, ...]],
    listener: Listener = silent,
    fresh: bool = False,
) -> Result:
    """Train the run until it has `train.steps` updates, on `lakes`: (place, weight) or (place, weight, last weight).

    InputMissing for a lake that is not there or is empty, unless it is to be followed; UsageError if the run was
    trained on other lakes or with other weights, unless `fresh`.
    """
    sources = [Source(*lake) for lake in lakes]
    require_shares(sources, settings.train)
    directory = RunDirectory(run)
    started = time.monotonic()
    with directory.lock("train"):
        if not fresh:
            settings = with_stored_window(settings, directory.load_document())
        directory.refuse_changes("train", settings, fresh=fresh)
        opened = open_lakes(sources, follow=settings.train.follow, listener=listener)
        settings = with_environment(settings, opened, listener)
        settings = with_window(settings, longest_episode(opened), listener)
        shared = [(lake, source.share) for lake, source in zip(opened, sources, strict=True)]
        trainer = Trainer(settings, directory, opened[0].only_schema().spaces, listener=listener, resume=not fresh)
        if not fresh:
            _refuse_other_lakes(directory, described(shared))
        trainer.draw_from(shared, listener)
        if fresh:  # nothing is lost or written before everything asked for is there
            forget(directory)
        directory.record("train", settings, fresh=fresh)
        directory.update_record(lakes=described(shared))
        before = trainer.learner.update
        metrics = trainer.train(settings.train.steps, listener)
    return Result(
        command="train",
        status="done" if trainer.learner.update > before else "skipped",
        run=run,
        lake=", ".join(lake.name for lake in opened),
        metrics=metrics,
        outputs=[directory.checkpoints / f"{trainer.learner.update:06d}"],
        seconds=time.monotonic() - started,
    )


def _refuse_other_lakes(directory: RunDirectory, wanted: list[dict[str, Any]]) -> None:
    record = directory.load_record()
    problems = changes(record["lakes"], wanted) if "train" in record.get("stages", {}) and "lakes" in record else ()
    if problems:
        raise UsageError(
            f"run '{directory.path}' was trained on other lakes, or with other weights",
            hint="repeat it unchanged, start anew with --fresh, or choose another --run",
            problems=problems,
        )


def forget(directory: RunDirectory) -> None:
    """Remove what training made of the run, and what was said of it."""
    shutil.rmtree(directory.checkpoints, ignore_errors=True)
    shutil.rmtree(directory.evaluations, ignore_errors=True)
    directory.metrics_path.unlink(missing_ok=True)


class Trainer:
    """A learner bound to a run, and to a lake once it has one; lives through all epochs of a chain.

    Made anew it continues from the run's newest checkpoint, if there is one, unless it is not to `resume`.
    """

    def __init__(
        self,
        settings: Settings,
        directory: RunDirectory,
        spaces: Spaces,
        *,
        listener: Listener = silent,
        resume: bool = True,
    ) -> None:
        self.settings, self.directory, self.log = settings, directory, MetricsLog(directory.metrics_path)
        self.learner = Learner(spaces, settings.agent, settings.train, seed=settings.seed)
        self._mixture: Mixture | None = None
        self._batches: Prefetch | None = None
        self._resumed: Checkpoint | None = None
        self._learnt: dict[str, torch.Tensor] = {}
        self._recent: list[dict[str, torch.Tensor]] = []  # figures of updates since the last regular line
        self._saved, self._looked, self._salvaged, self._env_steps = -1, 0.0, 0.0, 0
        self._cost = speed.Cost(sum(each.numel() for each in self.learner.parameters), self.learner.device)
        if resume:
            self._continue(listener)
        for text in self.learner.notices:
            listener(Notice(text=text))

    def _continue(self, listener: Listener) -> None:
        if checkpoints.numbers(self.directory.checkpoints):
            checkpoint = checkpoints.load(self.directory.checkpoints)
            self._require_spaces(checkpoint)
            self._learnt = self.learner.restore(checkpoint)
            with checkpoint.understood():
                for figures in checkpoint.record.get("recent", ()):
                    self._recent.append({name: torch.tensor(float(value)) for name, value in figures.items()})
            self._resumed, self._saved = checkpoint, checkpoint.update
            listener(Notice(text=f"resuming from checkpoint {checkpoint.update}"))
        self.log.rewind(self.learner.update)

    def draw_from(self, lakes: Sequence[tuple[Lake, Share]], listener: Listener = silent) -> None:
        """Draw windows from `lakes` (again: the same ones, by the shares they have now, with what is new in them).

        InputMissing if there are no trajectories; to follow: waits for the first. UsageError for a trajectory longer
        than the sequence encoder can take.
        """
        train = self.settings.train
        if self._mixture is None:
            schema = Schema(self.learner.spaces)
            heard = partial(self._hear, listener)
            self._mixture = make_mixture(lakes, schema, train, seed=self.settings.seed, listener=heard)
            if self._resumed is not None:
                self._resume(self._mixture, self._resumed)
        self._mixture.share_out([share for _, share in lakes])
        if train.follow:
            wait_for(lambda: self._refresh(listener) or None, "the first trajectories", listener)
        elif not self._refresh(listener):
            self._mixture.shares(self.learner.update)  # says what is empty
        self.learner.agent.sequence.require_time(self._mixture.longest)

    def _hear(self, listener: Listener, event: Event) -> None:
        """Pass on what is heard while data is drawn; an update is not stopped in the middle of it."""
        if isinstance(event, Waiting) and self._batches is not None:
            event = replace(event, stoppable=False)
        listener(event)

    def _resume(self, mixture: Mixture, checkpoint: Checkpoint) -> None:
        data = checkpoint.record.get("data")
        if data is None:
            return
        with checkpoint.understood():
            mixture.restore(data["lakes"])
            mixture.load_state_dict(data["sampler"])
            mixture.load_arrays({name: tensor.numpy() for name, tensor in self._learnt.items()})

    def _refresh(self, listener: Listener) -> bool:
        """Take in what is new; whether there is something to draw from."""
        assert self._mixture is not None
        if self.settings.train.follow and time.monotonic() - self._salvaged >= SALVAGE_SECONDS:
            for part in self._mixture.parts:
                part.view.lake.salvage(listener=listener)
            self._salvaged = time.monotonic()
        self._mixture.refresh(self.learner.update)
        self._env_steps = self._mixture.collected_steps
        self._looked = time.monotonic()
        return not self._mixture.is_empty

    def _look_again(self, listener: Listener) -> None:
        """As `_refresh`; an object store that is away for a while is waited for with what is here."""
        try:
            self._refresh(listener)
        except (StageFailed, StorageError) as error:
            if not isinstance(error, StorageError) and not isinstance(error.__cause__, StorageError):
                raise
            self._looked = time.monotonic()
            listener(Notice(text=f"{error}; training goes on with what it knows of the lake", level="warning"))

    def train(self, target: int, listener: Listener = silent) -> dict[str, Any]:
        """Update until `target` updates are done; a checkpoint is written at the end, and on an interruption."""
        mixture, train = self._mixture, self.settings.train
        assert mixture is not None, "draw_from comes first"
        self.directory.update_record(compute=self.learner.described())
        ahead = train.prefetch if not train.per_alpha else 0  # priorities follow from the update before
        size = train.batch_size // train.grad_accumulation
        plan = ((size, update) for update in range(self.learner.update, target) for _ in range(train.grad_accumulation))
        with Prefetch(mixture, plan, ahead=ahead) as self._batches:
            try:
                return self._train(self._batches, mixture, target, listener)
            finally:
                self._batches = None

    def _train(self, batches: Prefetch, mixture: Mixture, target: int, listener: Listener) -> dict[str, Any]:
        learner, began = self.learner, time.monotonic()
        learnt = mixture.prioritise if self.settings.train.per_alpha else None
        first = learner.update
        figures: dict[str, Any] = {"loss": self._last_loss()} if first >= target else {}
        while learner.update < target:
            self._recent.append(learner.step(lambda _: batches.next(), learnt))
            if text := self._cost.after(learner.update - first, target - first):
                listener(Notice(stage="train", text=text))
            regular = learner.update % self.settings.train.log_every == 0
            if regular or learner.update == target:
                figures = means(self._recent)
                self._recent = [] if regular else self._recent
                rate = (learner.update - first) / (time.monotonic() - began)
                figures |= {"updates_per_second": rate, **self._counts()}
                self.log.append("train", learner.update, figures)
            if learner.update % self.settings.train.checkpoint_every == 0 and learner.update < target:
                self.save()
            if self.settings.train.follow and time.monotonic() - self._looked >= self.settings.train.refresh_seconds:
                batches.changing(lambda: self._look_again(listener))
            shown = {"loss": figures["loss"]} if "loss" in figures else {}
            try:
                listener(Progress(stage="train", done=learner.update, total=target, unit="updates", metrics=shown))
            except Interrupted:
                self.save()
                raise
        self.save()
        seconds = time.monotonic() - began
        return {
            **{name: figures[name] for name in TOLD if name in figures},
            "updates": learner.update,
            "updates_done": learner.update - first,
            "updates_per_second": (learner.update - first) / seconds if learner.update > first else 0.0,
            **self._counts(),
        }

    def _counts(self) -> dict[str, float]:
        """Steps trained on, environment steps in the lakes, their ratio, and updates skipped."""
        seen, collected = self.learner.steps_seen, self._env_steps
        known = {"env_steps": collected, "replay_ratio": seen / collected} if collected else {}
        return {"steps_seen": seen, "skipped_updates": self.learner.skipped_updates, **known}

    def save(self) -> None:
        """Write a checkpoint of this moment, unless there is one."""
        if self._saved == self.learner.update:
            return
        data, arrays = None, {}
        if self._mixture is not None:
            drawing = self._batches or self._mixture
            state = drawing.state_dict()  # first: nothing moves from here on
            data = {"lakes": self._mixture.snapshots(), "sampler": state}
            arrays = {name: torch.from_numpy(array.copy()) for name, array in self._mixture.arrays().items()}
        recent = [{name: float(value) for name, value in figures.items()} for figures in self._recent]
        env = self.settings.env.model_dump(mode="json")
        record = {"time": time.time(), "env": env, "data": data, "recent": recent}
        self.learner.save(self.directory.checkpoints, record, arrays)
        self._saved = self.learner.update

    def _last_loss(self) -> float | None:
        losses = [entry["loss"] for entry in self.log.read() if entry.get("stage") == "train" and "loss" in entry]
        return losses[-1] if losses else None

    def _require_spaces(self, checkpoint: Checkpoint) -> None:
        with checkpoint.understood():
            stored = Spaces.from_json(checkpoint.record["spaces"])
        if stored != self.learner.spaces:
            raise InputMissing(
                f"run '{self.directory.path}' was trained for other spaces than those of this lake",
                hint="choose another --run, or start anew with --fresh",
            )


def means(recent: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Mean of each figure over those of some updates that have it."""
    names = dict.fromkeys(name for metrics in recent for name in metrics)
    found = {name: [metrics[name] for metrics in recent if name in metrics] for name in names}
    return {name: float(torch.stack([v.float().cpu() for v in values]).mean()) for name, values in found.items()}
