"""train: gradient updates on windows drawn from a lake, with checkpoints that a kill cannot tear.

A resume restores weights, optimiser, schedules, random streams and the view the sampler drew from, and then takes in
what the lake has gained: on an unchanged lake it repeats an uninterrupted run to the bit.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings
from pipelines.data.batch import Batch
from pipelines.data.sampler import WindowSampler
from pipelines.data.view import View
from pipelines.errors import InputMissing, Interrupted, UsageError
from pipelines.events import Listener, Notice, Progress, silent
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Spaces
from pipelines.lake.store import Lake
from pipelines.stages.result import Result
from pipelines.training import checkpoint as checkpoints
from pipelines.training.learner import Learner
from pipelines.training.metrics_log import MetricsLog


def run(
    settings: Settings,
    *,
    run: Path,
    lakes: Sequence[tuple[Path, float]],
    listener: Listener = silent,
    fresh: bool = False,
) -> Result:
    """Train the run until it has `train.steps` updates. InputMissing for a lake that is not there or is empty."""
    if len(lakes) != 1:
        raise UsageError(f"{len(lakes)} lakes are given, one is expected", hint="give --from-lake once")
    lake = Lake.open(lakes[0][0])
    lake.salvage(listener=listener)
    schema = lake.only_schema()
    directory = RunDirectory(run)
    started = time.monotonic()
    with directory.lock("train"):
        directory.refuse_changes("train", settings, fresh=fresh)
        trainer = Trainer(settings, directory, schema.spaces, listener=listener, resume=not fresh)
        trainer.draw_from(lake, listener)
        if fresh:  # nothing is lost or written before everything asked for is there
            forget(directory)
        directory.record("train", settings, fresh=fresh)
        before = trainer.learner.update
        metrics = trainer.train(settings.train.steps, listener)
    return Result(
        command="train",
        status="done" if trainer.learner.update > before else "skipped",
        run=run,
        lake=lake.name,
        metrics=metrics,
        outputs=[directory.checkpoints / f"{trainer.learner.update:06d}"],
        seconds=time.monotonic() - started,
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
        self._view: View | None = None
        self._sampler: WindowSampler | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._saved = -1
        if not resume:
            return
        if checkpoints.numbers(directory.checkpoints):
            checkpoint = checkpoints.load(directory.checkpoints)
            self._require_spaces(checkpoint.record["spaces"])
            self.learner.restore(checkpoint)
            self._resumed, self._saved = checkpoint.record.get("data"), checkpoint.update
            listener(Notice(text=f"resuming from checkpoint {checkpoint.update}"))
        self.log.rewind(self.learner.update)

    def draw_from(self, lake: Lake, listener: Listener = silent) -> None:
        """Draw windows from `lake` (again: take in what is new in it)."""
        if self._view is None or self._sampler is None:
            schema = Schema(self.learner.spaces)
            self._view = View(lake, lake.require_schema(schema), listener=listener)
            self._sampler = WindowSampler(
                self._view,
                length=self.settings.train.window,
                seed=self.settings.seed,
                weighting=self.settings.train.weighting,
                placement=self.settings.train.placement,
            )
            if self._resumed is not None:
                if self._resumed["view"]["lake"] == lake.id:
                    self._view.restore(self._resumed["view"])
                self._sampler.load_state_dict(self._resumed["sampler"])
        self._view.refresh()
        if not self._view.num_trajectories:
            raise InputMissing(
                f"lake '{lake.name}' has no trajectories to learn from", hint="fill it with: amago collect"
            )

    def train(self, target: int, listener: Listener = silent) -> dict[str, Any]:
        """Update until `target` updates are done; a checkpoint is written at the end, and on an interruption."""
        learner, began = self.learner, time.monotonic()
        first = learner.update
        recent: list[dict[str, torch.Tensor]] = []
        figures: dict[str, Any] = {"loss": self._last_loss()} if first >= target else {}
        while learner.update < target:
            recent.append(learner.step(self._draw))
            if learner.update % self.settings.train.log_every == 0 or learner.update == target:
                figures = means(recent)
                recent = []
                rate = (learner.update - first) / (time.monotonic() - began)
                figures |= {"updates_per_second": rate, "steps_seen": learner.steps_seen}
                self.log.append("train", learner.update, figures)
            if learner.update % self.settings.train.checkpoint_every == 0 and learner.update < target:
                self.save()
            shown = {"loss": figures["loss"]} if figures else {}
            try:
                listener(Progress(stage="train", done=learner.update, total=target, unit="updates", metrics=shown))
            except Interrupted:
                self.save()
                raise
        self.save()
        seconds = time.monotonic() - began
        return {
            **figures,
            "updates": learner.update,
            "updates_done": learner.update - first,
            "updates_per_second": (learner.update - first) / seconds if learner.update > first else 0.0,
            "steps_seen": learner.steps_seen,
        }

    def save(self) -> None:
        """Write a checkpoint of this moment, unless there is one."""
        if self._saved == self.learner.update:
            return
        data = None
        if self._view is not None and self._sampler is not None:
            data = {"view": self._view.snapshot(), "sampler": self._sampler.state_dict()}
        record = {"time": time.time(), "env": self.settings.env.model_dump(mode="json"), "data": data}
        self.learner.save(self.directory.checkpoints, record)
        self._saved = self.learner.update

    def _last_loss(self) -> float | None:
        losses = [entry["loss"] for entry in self.log.read() if entry.get("stage") == "train" and "loss" in entry]
        return losses[-1] if losses else None

    def _draw(self, size: int) -> Batch:
        assert self._sampler is not None, "draw_from comes first"
        return self._sampler.sample(size)

    def _require_spaces(self, stored: Mapping[str, Any]) -> None:
        if Spaces.from_json(stored) != self.learner.spaces:
            raise InputMissing(
                f"run '{self.directory.path}' was trained for other spaces than those of this lake",
                hint="choose another --run, or start anew with --fresh",
            )


def means(recent: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Mean of each figure over some updates."""
    return {name: float(torch.stack([m[name] for m in recent]).float().mean()) for name in recent[0]}
