"""Trainer: a learner bound to a run, whose checkpoints a kill cannot tear.

A resume restores weights, optimiser, schedules and the view the sampler drew from, and then adds what the lakes have
gained: on unchanged lakes it repeats an uninterrupted run to the bit.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from pipelines.config.host import is_main
from pipelines.config.policy_files import list_checkpoints
from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings
from pipelines.data.mixture import Share
from pipelines.data.prefetch import Prefetch
from pipelines.errors import InputMissing, Interrupted, UsageError
from pipelines.events import Event, Listener, Notice, Progress, Waiting, silent
from pipelines.lake.lineage import read_drawn
from pipelines.lake.spaces import Spaces
from pipelines.lake.store import Lake, describe_difference
from pipelines.learning import checkpoint as checkpoints
from pipelines.learning.agent import Agent, ReferencePolicy
from pipelines.learning.batch import HostBatch
from pipelines.learning.checkpoint import Checkpoint, load_agent
from pipelines.nets import ranks
from pipelines.rollout.policies import load_trained
from pipelines.training import speed
from pipelines.training.data import TrainingData, require_columns
from pipelines.training.flops import count_update_flop
from pipelines.training.learner import Learner
from pipelines.training.metrics_log import MetricsLog
from pipelines.training.publisher import Publisher

# In a result; the others are in metrics.jsonl.
_SHOWN = ("loss", "actor_loss", "critic_loss", "grad_norm", "agreement", "gap_to_spread")


class Trainer:
    """A learner with its run's checkpoints and log; lives through all epochs of a chain.

    With `resume`, it continues from the run's newest checkpoint, if there is one. Of several ranks, each has a trainer;
    rank 0 writes.
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
        self._data: TrainingData | None = None
        self._batches: Prefetch[HostBatch] | None = None
        self._resumed: Checkpoint | None = None
        self._learnt: dict[str, torch.Tensor] = {}
        self._recent: list[dict[str, torch.Tensor]] = []  # figures of updates since the last regular line
        self._saved = -1
        self._origin: dict[str, Any] = {}  # what run.json says of the policies that it takes
        self._publisher: Publisher | None = None
        self._copy: Agent | None = None
        windows = self.learner.micro_batch_size * len(self.learner.micro_batches)
        self._cost = speed.Cost(
            sum(each.numel() for each in self.learner.parameters),
            self.learner.device,
            flop=partial(count_update_flop, self.learner.agent, windows, settings.train.resolved_context_length),
        )
        if resume:
            self._continue(listener)
        if self._resumed is None and settings.init.source:
            self._begin_warm(listener)
        if settings.agent.reference:
            self._hold_near_reference()
        self._report_notices(listener)

    def _report_notices(self, listener: Listener) -> None:
        """Report the notices of the learner, each once."""
        while self.learner.notices:
            listener(Notice(text=self.learner.notices.pop(0)))

    def _continue(self, listener: Listener) -> None:
        if list_checkpoints(self.directory.checkpoints):
            checkpoint = checkpoints.load(self.directory.checkpoints)
            self._require_spaces(checkpoint)
            self._learnt = self.learner.restore(checkpoint)
            with checkpoint.understood():
                for figures in checkpoint.record.get("recent", ()):
                    self._recent.append({name: torch.tensor(float(value)) for name, value in figures.items()})
            self._resumed, self._saved = checkpoint, checkpoint.update
            listener(Notice(text=f"resuming from checkpoint {checkpoint.update}"))
        if is_main():
            self.log.rewind(self.learner.update)

    def _begin_warm(self, listener: Listener) -> None:
        """Take the weights of `init.source`, and record which they are."""
        init = self.settings.init
        observed = self.settings.agent if "timestep" in init.parts else None
        found = load_trained(init.source, spaces=self.learner.spaces, settings=observed)
        with found.checkpoint.understood():
            theirs = Spaces.from_json(found.checkpoint.record["spaces"])
        try:
            done = self.learner.begin_with(found.checkpoint.acting, init)
        except UsageError as error:
            if theirs == self.learner.spaces:
                raise
            differs = "; ".join(describe_difference(theirs, self.learner.spaces, ("the source's", "trained on here")))
            raise InputMissing(
                f"init.source: {found.checkpoint.label} was trained for other spaces: {differs}",
                hint="choose init.parts that do not depend on them, or take what fits: init.strict=false",
            ) from error
        taken = f"{done.taken:,} of {done.total:,} numbers taken from {found.checkpoint.label}"
        listener(Notice(stage="train", text=f"warm start: {taken}"))
        for text in done.kept:
            listener(Notice(stage="train", text=f"begins at random: {text}", level="warning"))
        if theirs != self.learner.spaces:
            text = f"{found.checkpoint.label} was trained for other spaces, of the same shapes where weights were taken"
            listener(Notice(stage="train", text=text, level="warning"))
        self._origin = {"weights_from": {"policy": found.identity, "update": found.checkpoint.update}}

    def _hold_near_reference(self) -> None:
        """Load `agent.reference`. InputMissing if it was trained for other spaces."""
        learner = self.learner
        found = load_trained(self.settings.agent.reference, spaces=learner.spaces)
        with found.checkpoint.understood():
            theirs = Spaces.from_json(found.checkpoint.record["spaces"])
        if theirs != learner.spaces:
            differs = "; ".join(describe_difference(theirs, learner.spaces, ("the reference's", "trained on here")))
            raise InputMissing(f"agent.reference: {found.checkpoint.label} was trained for other spaces: {differs}")
        agent = load_agent(found.checkpoint, own=self.settings.agent).to(learner.device)
        agent.packed = learner.agent.packed
        learner.agent.reference = ReferencePolicy(agent, of=learner.agent)
        self._origin |= {"reference": {"policy": found.identity, "update": found.checkpoint.update}}

    def draw_from(self, lakes: Sequence[tuple[Lake, Share]], listener: Listener = silent) -> TrainingData:
        """Return windows of `lakes` (each time the same ones), by the shares they have now, with what is new in them.

        InputMissing if there are no trajectories, unless lakes are followed, which waits for the first, and if those of
        `train.like` are not all there. UsageError for a trajectory longer than the sequence encoder can take.
        """
        train = self.settings.train
        span = ranks.find_host_span() if self._data is None and train.shard == "host" else (0.0, 1.0)
        with ranks.raise_together():
            if self._data is None:
                labels = self.settings.agent.target == "label"
                schema = lakes[0][0].schema_of(self.learner.spaces, labels=labels)
                relay = partial(self._relay, listener)
                require_columns(schema, self.settings.agent, lake=lakes[0][0].name)
                self._data = TrainingData(lakes, schema, train, seed=self.settings.seed, listener=relay, span=span)
                if self._resumed is not None:
                    self._data.restore(self._resumed, self._learnt)
                elif train.like:
                    source, update, snapshots = read_drawn(train.like)
                    self._data.hold(snapshots)
                    self._origin |= {"like": {"policy": source.identity, "update": update}}
        self._data.prepare([share for _, share in lakes], update=self.learner.update, listener=listener)
        with ranks.raise_together():
            self.learner.agent.sequence.require_time(self._data.mixture.longest)
            if self.learner.agent.reference is not None:
                self.learner.agent.reference.agent.sequence.require_time(self._data.mixture.longest)
        return self._data

    def _relay(self, listener: Listener, event: Event) -> None:
        """Pass on an event of the data; while a batch is drawn, an update cannot be stopped halfway."""
        if isinstance(event, Waiting) and self._batches is not None:
            event = replace(event, stoppable=False)
        listener(event)

    def train(
        self,
        data: TrainingData,
        target: int,
        listener: Listener = silent,
        *,
        about_data: Mapping[str, float] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Update until `target` updates are done; a checkpoint is written at the end, and on an interruption.
        `about_data`: figures of the data besides the lakes, logged with every line."""
        train = self.settings.train
        compute = self.learner.describe()
        if is_main():
            self.directory.update_record(compute=compute, **self._origin)
        ahead = train.prefetch if not train.per_alpha else 0  # priorities follow from the update before
        updates, size = range(self.learner.update, target), self.learner.micro_batch_size
        plan = ((size, update, number) for update in updates for number in self.learner.micro_batches)
        batches = Prefetch(data.mixture, plan, ahead=ahead, prepare=self.learner.prepare)
        with ranks.raise_rank_lost(), batches as self._batches:
            try:
                return self._train(self._batches, data, target, listener, about_data)
            finally:
                self._batches = None
                data.cancel()

    def _train(
        self,
        batches: Prefetch[HostBatch],
        data: TrainingData,
        target: int,
        listener: Listener,
        about_data: Mapping[str, float],
    ) -> dict[str, Any]:
        learner, train, began = self.learner, self.settings.train, time.monotonic()
        learnt = data.mixture.prioritise if train.per_alpha else None
        first = learner.update
        figures: dict[str, Any] = {}
        if first >= target:
            losses = [entry["loss"] for entry in self.log.read() if entry.get("stage") == "train" and "loss" in entry]
            figures["loss"] = losses[-1] if losses else None
        waited = 0.0

        def draw(_: int) -> HostBatch:
            nonlocal waited
            asked = time.monotonic()
            batch = batches.next()
            waited += time.monotonic() - asked
            return batch

        while learner.update < target:
            self._recent.append(learner.step(draw, learnt))
            self._report_notices(listener)
            if text := self._cost.after(learner.update - first, target - first):
                listener(Notice(stage="train", text=text))
            regular = learner.update % train.log_every == 0
            if regular or learner.update == target:
                figures = ranks.average(means(self._recent), learner.device)
                # From the means of all updates and ranks: a mean of ratios is dominated by steps whose critics happen
                # to agree.
                if (spread := figures.get("action_spread", 0.0)) > 0:
                    figures["gap_to_spread"] = figures["action_gap"] / spread
                self._recent = [] if regular else self._recent
                rate = (learner.update - first) / (time.monotonic() - began)
                figures |= {"updates_per_second": rate, **self._counts(data), **about_data}
                if is_main():
                    self.log.append("train", learner.update, figures)
            if learner.update % train.checkpoint_every == 0 and learner.update < target:
                self.save(listener)
            shown, interrupted = {"loss": figures["loss"]} if "loss" in figures else {}, None
            try:
                listener(Progress(stage="train", done=learner.update, total=target, unit="updates", metrics=shown))
            except Interrupted as error:
                interrupted = error
            stop, due = ranks.any_rank(interrupted is not None, is_main() and data.is_due, device=learner.device)
            if stop:
                listener(Waiting(what=f"checkpoint {learner.update} to be written", stoppable=False))
                self.save(listener)
                raise interrupted or Interrupted(f"train interrupted on another rank at {learner.update} updates")
            if due:
                batches.changing(lambda: data.refresh(learner.update, listener))
        self.save(listener)
        seconds = time.monotonic() - began
        return {
            **{name: figures[name] for name in _SHOWN if name in figures},
            "updates": learner.update,
            "updates_done": learner.update - first,
            "updates_per_second": (learner.update - first) / seconds if learner.update > first else 0.0,
            "data_seconds": waited,
            **self._counts(data),
        }

    def _counts(self, data: TrainingData) -> dict[str, float]:
        """Return steps trained on, environment steps in the lakes, their ratio, and updates skipped."""
        seen, collected = self.learner.steps_seen, data.env_steps
        known = {"env_steps": collected, "replay_ratio": seen / collected} if collected else {}
        return {"steps_seen": seen, "skipped_updates": self.learner.skipped_updates, **known}

    @contextlib.contextmanager
    def publishing(self, lake: Lake, listener: Listener) -> Iterator[None]:
        """Until the end, publish checkpoints in `lake`, beginning with the newest one."""
        self._publisher = Publisher(lake, self.directory.identity, self.directory.checkpoints)
        try:
            if self._saved >= 0:
                self._publisher.publish(self._saved, listener)
            yield
        finally:
            self._publisher.close(listener)
            self._publisher = None

    def save(self, listener: Listener = silent) -> None:
        """Write a checkpoint of this moment, unless there is one."""
        if self._saved == self.learner.update:
            return
        recent = [ranks.average(_numbers(figures), self.learner.device) for figures in self._recent]
        if not is_main():
            if self.learner.is_sharded:
                self.learner.state()  # what rank 0 needs of it
            self._saved = self.learner.update
            return
        data, arrays = None, {}
        if self._data is not None:
            mixture = self._data.mixture
            if self._batches is not None:
                self._batches.wait()  # drawing a batch may remove a segment from the view
            data = {"lakes": mixture.snapshots()}
            arrays = {name: torch.from_numpy(array.copy()) for name, array in mixture.arrays().items()}
        env = self.settings.env.model_dump(mode="json")
        record = {"time": time.time(), "env": env, "data": data, "recent": recent}
        self.learner.save(self.directory.checkpoints, record, arrays)
        self._saved = self.learner.update
        if self._publisher is not None:
            self._publisher.publish(self._saved, listener)

    def acting(self) -> Agent:
        """Return the agent to act with: the one that learns; where ranks share out its weights, a whole copy of it, as
        of the last checkpoint."""
        learner = self.learner
        if not learner.is_sharded:
            return learner.agent
        if self._copy is None:
            self._copy = Agent(learner.spaces, learner.agent_settings).to(learner.device)
        weights: Mapping[str, torch.Tensor] = learner.agent.state_dict()
        if learner.shards.of:
            weights = checkpoints.load(self.directory.checkpoints, str(learner.update)).weights
        self._copy.load_state_dict(dict(weights))
        return self._copy

    def _require_spaces(self, checkpoint: Checkpoint) -> None:
        with checkpoint.understood():
            stored = Spaces.from_json(checkpoint.record["spaces"])
        if stored != self.learner.spaces:
            raise InputMissing(
                f"run '{self.directory.path}' was trained for other spaces than those of this lake",
                hint="choose another --run, or start over with --fresh",
            )


def _numbers(figures: dict[str, torch.Tensor]) -> dict[str, float]:
    return dict(zip(figures, _on_host([value.float() for value in figures.values()]), strict=True))


def means(recent: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Mean of each figure over those of some updates that have it."""
    names = dict.fromkeys(name for metrics in recent for name in metrics)
    found = {name: [metrics[name].float() for metrics in recent if name in metrics] for name in names}
    values = _on_host([value for values in found.values() for value in values])
    return {name: statistics.fmean(next(values) for _ in each) for name, each in found.items()}


def _on_host(values: Sequence[torch.Tensor]) -> Iterator[float]:
    """Yield 0-d tensors as numbers; all are copied at once."""
    yield from torch.stack([*values]).tolist() if values else ()
