"""What the stages of a chain share while one process runs them: environments, model, optimiser, data view."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from pipelines.config.lakes import located
from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings
from pipelines.data.mixture import Share
from pipelines.events import Listener, Notice, silent
from pipelines.lake.schema import Schema
from pipelines.lake.store import Lake
from pipelines.learning.acting import AgentPolicy
from pipelines.stages import evaluate, export, ingest, relabel
from pipelines.stages.adaptation import adaptation_pictures, adaptation_tables
from pipelines.stages.collect import Collector
from pipelines.stages.environment import make_env
from pipelines.stages.identity import stored_steps
from pipelines.stages.lakes import described, in_chain, open_in_chain, places_in_chain
from pipelines.stages.policies import Acting, load_policy
from pipelines.stages.result import Result, Table
from pipelines.stages.train import Trainer
from pipelines.training import checkpoint as checkpoints

_SCORES = ("episodes", "return_mean", "return_ci95", "success_mean", "success_ci95", "per_attempt")
_GAPS = ("adaptation_gap", "return_adaptation_gap")


class Workshop:
    """Stages by name, on live objects that are made when first needed."""

    def __init__(self, settings: Settings, directory: RunDirectory) -> None:
        self.settings, self.directory = settings, directory
        self._figures: dict[str, Mapping[str, Any]] = {}
        self._lakes: dict[Path | str, Lake] = {}
        self._other_policies: dict[tuple[str, bool], Acting] = {}
        self._stack = contextlib.ExitStack()
        self._collector: Collector | None = None
        self._trainer: Trainer | None = None
        self._agent_policy: AgentPolicy | None = None
        self._perform: Mapping[str, Callable[[Settings, int, Listener], None]] = {
            "ingest": self._ingest,
            "collect": self._collect,
            "relabel": self._relabel,
            "train": self._train,
            "evaluate": self._evaluate,
            "export": self._export,
        }

    def __enter__(self) -> Workshop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def perform(self, stage: str, settings: Settings, *, target: int, listener: Listener = silent) -> None:
        """Run one stage; `target` is the cumulative count at which a collect or a train is done."""
        self._perform[stage](settings, target, listener)

    def _ingest(self, settings: Settings, target: int, listener: Listener) -> None:
        lake = located(settings.source.lake, self.directory.path)
        self._figures["ingest"] = ingest.run(settings, lake=lake, listener=listener).metrics

    def _collect(self, settings: Settings, target: int, listener: Listener) -> None:
        if self._collector is None:
            collector = Collector(
                settings, self.directory.lake, name=self.directory.identity, run=self.directory, listener=listener
            )
            self._collector = self._stack.enter_context(collector)
        if self._collector.steps >= target:
            return
        self._collector.act_by(self._acting(settings, self._collector, listener))
        self._figures["collect"] = self._collector.collect(target, listener)

    def _acting(self, settings: Settings, collector: Collector, listener: Listener) -> Acting:
        name, greedy = settings.collect.policy, settings.collect.greedy
        if name != "auto":
            if (name, greedy) not in self._other_policies:
                self._other_policies[name, greedy] = load_policy(
                    name,
                    collector.env,
                    seed=collector.policy_seed,
                    greedy=greedy,
                    action_mask=settings.agent.action_mask,
                )
            return self._other_policies[name, greedy]
        learner = self._training(listener).learner
        if self._agent_policy is None:
            if (horizon := collector.env.spec.horizon) is not None:
                learner.agent.sequence.require_time(horizon)  # that of an episode's last observation
            self._agent_policy = AgentPolicy(
                learner.agent,
                num_actors=collector.env.num_envs,
                capacity=settings.train.resolved_context_length,
                seed=collector.policy_seed,
                device=learner.device,
                precision=settings.train.precision,
            )
        learner.agent.eval()
        self._agent_policy.greedy = greedy
        return Acting(
            policy=self._agent_policy,
            policy_id=self.directory.identity,
            version=learner.update,
            run=self.directory.path,
        )

    def _training(self, listener: Listener) -> Trainer:
        if self._trainer is None:
            if self._collector is not None:
                spaces = self._collector.env.spec.spaces
            elif self.settings.env.name:
                env = make_env(self.settings, actors=1, seed=0)
                env.close()
                spaces = env.spec.spaces
            else:
                spaces = Lake.open(places_in_chain(self.settings, self.directory.path)[0]).only_schema().spaces
            self._trainer = Trainer(self.settings, self.directory, spaces, listener=listener)
        return self._trainer

    def _train(self, settings: Settings, target: int, listener: Listener) -> None:
        trainer = self._training(listener)
        if trainer.learner.update >= target:
            return
        if self._collector is not None:
            self._collector.seal()
        trainer.draw_from(self._mixed(settings, listener), listener)
        self._figures["train"] = trainer.train(target, listener)

    def _mixed(self, settings: Settings, listener: Listener) -> list[tuple[Lake, Share]]:
        """Every lake that the chain draws from, with the share that it has now."""
        if not self._lakes:
            places = places_in_chain(self.settings, self.directory.path)
            schema = Schema(self._training(listener).learner.spaces)
            opened = open_in_chain(places, schema, own=self.directory.lake, listener=listener)
            self._lakes = dict(zip(places, opened, strict=True))
        now = {source.place: source.share for source in in_chain(settings, self.directory.path)}
        mixed = [(lake, now.get(place, Share(0.0, 0.0))) for place, lake in self._lakes.items()]
        if len(mixed) > 1 or self.directory.lake not in self._lakes:
            self.directory.update_record(lakes=described(mixed))
        return mixed

    def _relabel(self, settings: Settings, target: int, listener: Listener) -> None:
        if self._collector is not None:
            self._collector.seal()
        self._figures["relabel"] = relabel.run(settings, lake=self.directory.lake, listener=listener).metrics

    def _evaluate(self, settings: Settings, target: int, listener: Listener) -> None:
        self._training(listener).save()
        result = evaluate.run(settings, run=self.directory.path, listener=listener)
        self._figures["evaluate"] = result.metrics
        label, record = settings.evaluate.label, self.directory.load_record()
        text = evaluate.headline(result.metrics, record.get("best"))
        listener(Notice(stage="evaluate", text=f"{label}: {text}" if label else text))
        if label:
            labelled = record.get("labelled", {})
            self.directory.update_record(labelled={**labelled, label: Path(result.outputs[0]).name})

    def _export(self, settings: Settings, target: int, listener: Listener) -> None:
        self._training(listener).save()
        export.run(settings, run=self.directory.path, listener=listener)

    def summary(self, *, seconds: float, status: str) -> Result:
        """The chain's result: last figures, and the labelled evaluations as a table and a picture."""
        labelled = self.directory.load_record().get("labelled", {})
        found = {label: evaluate.stored(self.directory.evaluations / name) for label, name in labelled.items()}
        reports = {label: report for label, report in found.items() if report is not None}
        tables: list[Table] = [table for report in reports.values() for table in evaluate.tables(report)[:1]]
        outputs = [self.directory.path]
        adapting = {label: report for label, report in reports.items() if report["metrics"]["per_attempt"]}
        if adapting:
            tables += adaptation_tables(adapting, of=", fresh tasks")
            outputs += adaptation_pictures(adapting, self.directory.path)
        return Result(
            command="run",
            status=status,
            run=self.directory.path,
            lake=self.directory.lake,
            metrics=self._summary_figures(list(reports.values())),
            outputs=outputs,
            tables=tables,
            seconds=seconds,
        )

    def _summary_figures(self, reports: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Totals of the run, the newest rates and training figures, and the last evaluation's scores."""
        done = checkpoints.numbers(self.directory.checkpoints)
        stored = Lake.find(self.directory.lake)
        steps = stored_steps(stored, self.directory.identity) if stored else 0
        figures: dict[str, Any] = {
            "epochs": self.settings.epochs,
            "steps": self._collector.steps if self._collector else steps,
            "updates": done[-1] if done else 0,
        }
        if "collect" in self._figures:
            figures["steps_per_second"] = self._figures["collect"]["steps_per_second"]
        trained = self._figures.get("train", {})
        shown = ("loss", "updates_per_second", "steps_seen", "replay_ratio")
        figures |= {key: trained[key] for key in shown if key in trained}
        if "ingest" in self._figures:
            figures["ingested"] = self._figures["ingest"]["steps_total"]
        if "relabel" in self._figures:
            figures["relabeled"] = self._figures["relabel"]["trajectories"]
        scores = self._figures.get("evaluate") or (reports[-1]["metrics"] if reports else {})
        return figures | {key: scores[key] for key in (*_SCORES, *_GAPS) if key in scores}
