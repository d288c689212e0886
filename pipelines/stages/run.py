"""run: run a recipe's stages, epoch by epoch, in one process that keeps environments, model and data view open, or
with several ranks. Rank 0 carries out the stages, and the others take part in those that train. They are started once,
with the command, and wait for orders between two train stages, with model and data open.

Targets are cumulative and counted from what exists (steps in the lake, updates of the newest checkpoint), so repeating
the command resumes an interrupted chain: finished stages are skipped. `chain.json` records only which one-off stages
(relabel, evaluate, export) are done.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from pipelines.config.host import count_ranks, is_main
from pipelines.config.places import locate_lake
from pipelines.config.policy_files import list_checkpoints
from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import CollectSettings, Settings
from pipelines.data.mixture import Share
from pipelines.envs.env import Env
from pipelines.errors import StageFailed, UsageError
from pipelines.events import Listener, Notice, silent
from pipelines.formats.make import open_importer
from pipelines.lake.spaces import Spaces
from pipelines.lake.store import Lake
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.checkpoint import resolve_device
from pipelines.nets import ranks
from pipelines.nets.actor import make_distribution
from pipelines.report import run_report
from pipelines.report.run_report import LivePage
from pipelines.rollout.collector import AnyCollector, Collector, count_stored_steps
from pipelines.rollout.environment import collect_steps, make_env, with_actors
from pipelines.rollout.opponents import OpponentLoader, is_sql, name_opponents
from pipelines.rollout.plan import (
    CollectionPlan,
    MakePolicy,
    NamedPolicy,
    make_labeller,
    make_schema,
    require_probabilities,
)
from pipelines.rollout.policies import Acting
from pipelines.runs import progress
from pipelines.runs.evaluations import Evaluation, RandomPlay, find_last_and_best, name_mode
from pipelines.runs.progress import record_progress
from pipelines.runs.stored import read_run
from pipelines.stages import evaluate, evaluation_tables, export, ingest, relabel
from pipelines.stages.collectors import make_collectors
from pipelines.stages.forecast import Forecast
from pipelines.stages.plan import ChainLedger, PlannedStage, list_sources, open_in_chain, plan
from pipelines.stages.resolve import with_stored_window, with_window
from pipelines.stages.result import Result, Table
from pipelines.stages.train import describe_lakes, require_shares
from pipelines.tracking.background import track_run
from pipelines.training.data import name_need_of_logp
from pipelines.training.learner import use_threads
from pipelines.training.trainer import Trainer
from pipelines.view.replay import draw_trajectory

_SCORES = ("episodes", "return_mean", "return_ci95", "success_mean", "success_ci95", "per_attempt")
_GAPS = ("adaptation_gap", "return_adaptation_gap")


def run(
    settings: Settings,
    *,
    run: Path,
    listener: Listener = silent,
    fresh: bool = False,
    recipe: Mapping[str, Any] | None = None,
) -> Result:
    """Run every unfinished stage of every epoch. UsageError if the recipe has no stages.

    `recipe` is recorded: which one this is, and how the settings differ from it.
    """
    if count_ranks() > 1:
        ranks.join(resolve_device(settings.train.device), timeout_seconds=settings.train.rank_timeout)
    if not is_main():
        return _take_part(run, listener)
    try:
        with ranks.send_orders() as give:
            result = _run_chain(settings, run=run, listener=listener, fresh=fresh, recipe=recipe, give=give)
        ranks.leave()
    except Exception:
        if settings.report:
            LivePage(run, listener).write_stopped()
        raise
    page = run / run_report.NAME
    if not settings.report or (result.status == "skipped" and page.exists()):
        return result
    return replace(result, outputs=[*result.outputs, *LivePage(run, listener).write_final(draw_trajectory)])


def _take_part(run: Path, listener: Listener) -> Result:
    """Train whenever rank 0 does, until it has carried out the chain."""
    trainer, opened, started = None, dict[Path | str, Lake](), time.monotonic()
    for order in ranks.receive_orders():
        with ranks.raise_together():
            if trainer is None:
                trainer = Trainer(order.settings, RunDirectory(run), order.spaces)
            if trainer.learner.update != order.update:
                raise StageFailed(
                    f"it has checkpoint {trainer.learner.update} of '{run}', but rank 0 has {order.update}",
                    hint="all ranks need the same directory of the run",
                )
            lakes = []
            for place, share in order.lakes:
                opened[place] = opened.get(place) or Lake(place)
                lakes.append((opened[place], share))
        assert trainer is not None
        trainer.train(trainer.draw_from(lakes, listener), order.target, listener)
    ranks.leave()
    return Result(command="run", status="done", run=run, seconds=time.monotonic() - started)


def require_labels(settings: Settings) -> None:
    """Raise UsageError if an agent that learns from labels collects steps without any."""
    if settings.agent.target == "label" and not settings.collect.label:
        raise UsageError(
            "agent.target is 'label', but nothing labels what is collected",
            hint="set collect.label, e.g. to expert; or leave out agent.target",
        )


def _run_chain(
    settings: Settings,
    *,
    run: Path,
    listener: Listener,
    fresh: bool,
    recipe: Mapping[str, Any] | None,
    give: Callable[[TrainOrder], None],
) -> Result:
    if not settings.stages:
        raise UsageError("the recipe has no stages", hint="add [[stages]] entries; see amago examples quickstart")
    if settings.collect.follow:
        raise UsageError(
            "`amago run` always acts with the agent it trains", hint="remove collect.follow, or use amago collect"
        )
    if settings.train.like:
        raise UsageError(
            "train.like: a chain trains on the lakes that it fills", hint="use amago train --like RUN@CHECKPOINT"
        )
    if any(entry.stage == "collect" for entry in settings.stages):
        require_labels(settings)
    planned = [step.settings.collect for step in plan(settings) if step.entry.stage == "collect"]
    if settings.agent.needs_logp and not all(each.logp for each in planned):
        wanted, without = name_need_of_logp(settings.agent)
        raise UsageError(f"{wanted}, but what is collected has no logp", hint=f"set collect.logp=true, or {without}")
    directory = RunDirectory(run)
    mixtures = [list_sources(settings.for_stage(entry), run) for entry in settings.stages if entry.stage == "train"]
    for mixture in mixtures:
        require_shares(mixture, None)
    places = list(dict.fromkeys(source.place for mixture in mixtures for source in mixture))
    started, spaces, horizon = time.monotonic(), None, None
    with directory.lock("run", "collect", "train"):
        stored = {} if fresh else directory.load_document()
        collect, train = settings.collect, with_stored_window(settings.train, stored)
        if settings.env.name:
            collects = [collect_steps(each) for each in planned]
            collect = with_actors(collect, settings.env, stored, collects=collects, listener=listener)
        settings = settings.model_copy(update={"collect": collect, "train": train})
        directory.refuse_changes("run", settings, fresh=fresh)
        if settings.env.name:
            with contextlib.closing(make_env(settings.env, actors=1, seed=0)) as env:
                env.reset()  # construct and start it before anything is written or removed
                spaces, horizon = env.spec.spaces, env.spec.horizon
                make_labeller(settings, env, seed=0)
                for each in planned:
                    require_probabilities(settings.model_copy(update={"collect": each}), env)
                evaluations = {step.settings.evaluate for step in plan(settings) if step.entry.stage == "evaluate"}
                loader = OpponentLoader(env, seed=0, action_mask=settings.agent.action_mask)
                for names in {settings.collect.opponents, *(each.opponents for each in evaluations)} - {()}:
                    loader.load(name_opponents(names, run, listener))
                for evaluating in evaluations:
                    evaluate.require_metrics(settings.env, evaluating, env.spec)
                    if evaluating.temperature != 1:  # refuses actions that are no choices
                        actions = make_distribution(spaces.action, settings.agent.actor)
                        actions.for_play(evaluating.temperature)
        if any(entry.stage == "ingest" for entry in settings.stages):
            open_importer(settings.source, spaces=spaces, horizon=horizon, listener=listener).close()  # as above
        train = with_window(train, settings.agent, horizon, listener)
        settings = settings.model_copy(update={"train": train})
        if fresh:
            own = ("lake", "offline", "checkpoints", "evaluations", "tournaments", "videos", "export")
            for product in (directory.path / name for name in own):
                shutil.rmtree(product, ignore_errors=True)
            for name in ("metrics.jsonl", "track.json", "chain.json", progress.NAME, run_report.NAME):
                (directory.path / name).unlink(missing_ok=True)
        directory.record("run", settings, fresh=fresh, recipe=recipe)
        steps = plan(settings)
        ledger = ChainLedger(directory.path / "chain.json")
        left = steps[ledger.passed :]
        forecast = Forecast([step.work for step in steps], epochs=settings.epochs, done=ledger.passed)
        with contextlib.ExitStack() as stack:
            recorded = stack.enter_context(record_progress(run, listener)) if left else listener
            if left and settings.report:
                recorded = stack.enter_context(LivePage(run, recorded).keep_fresh())
            stack.enter_context(track_run(settings.track.to, directory, settings.document(), recorded))
            runner = stack.enter_context(ChainRunner(settings, directory, places, give))
            listen = forecast.listening(recorded)
            for step in left:
                spent = runner.perform(step, listen)
                forecast.finish()
                ledger.advance(spent)
            return runner.summary(seconds=time.monotonic() - started, status="done" if left else "skipped")


@dataclass(frozen=True)
class TrainOrder:
    """A train stage for all ranks: train from `update` to `target` on lakes with their shares."""

    settings: Settings
    spaces: Spaces
    lakes: tuple[tuple[Path | str, Share], ...]
    update: int
    target: int

    @classmethod
    def of(cls, trainer: Trainer, lakes: tuple[tuple[Path | str, Share], ...], target: int) -> TrainOrder:
        """Describe what rank 0's trainer is about to do."""
        return cls(trainer.settings, trainer.learner.spaces, lakes, trainer.learner.update, target)


class ChainRunner:
    """Stages by name, on shared objects that are created on first use. `places`: the lakes that train stages sample
    from; `give` sends an order to the other ranks."""

    def __init__(
        self,
        settings: Settings,
        directory: RunDirectory,
        places: Sequence[Path | str],
        give: Callable[[TrainOrder], None],
    ) -> None:
        self.settings, self.directory, self._places, self._give = settings, directory, places, give
        use_threads(settings.train.threads)
        self._figures: dict[str, Mapping[str, Any]] = {}
        self._lakes: dict[Path | str, Lake] = {}
        self._other_policies: dict[NamedPolicy, Acting] = {}
        self._stack = contextlib.ExitStack()
        self._collector: AnyCollector | None = None
        self._trainer: Trainer | None = None
        self._agent_policy: AgentPolicy | None = None
        self._perform: Mapping[str, Callable[[PlannedStage, Listener], None]] = {
            "ingest": self._ingest,
            "collect": self._collect,
            "relabel": self._relabel,
            "train": self._train,
            "evaluate": self._evaluate,
            "export": self._export,
        }

    def __enter__(self) -> ChainRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def perform(self, step: PlannedStage, listener: Listener) -> dict[str, float]:
        """Run one stage. Return the seconds that its parts took, e.g. `collect.env` and `collect.policy`."""
        stage, began = step.entry.stage, time.monotonic()
        before = self._figures.get(stage)
        self._perform[stage](step, listener)
        seconds, figures = time.monotonic() - began, self._figures.get(stage)
        if figures is None or figures is before:  # nothing was left to do
            figures = {}
        if stage == "collect":
            parts = {f"collect.{name}": figures.get(f"{name}_share", 0.0) for name in ("env", "policy")}
            parts = {name: share * figures.get("seconds", 0.0) for name, share in parts.items()}
            return parts | {"collect.other": max(0.0, seconds - sum(parts.values()))}
        if stage == "train":
            data = figures.get("data_seconds", 0.0)
            return {"train.data": data, "train.update": max(0.0, seconds - data)}
        return {stage: seconds}

    def _ingest(self, step: PlannedStage, listener: Listener) -> None:
        lake = locate_lake(self.settings.source.lake, self.directory.path)
        self._figures["ingest"] = ingest.run(self.settings, lake=lake, listener=listener).metrics

    def _collect(self, step: PlannedStage, listener: Listener) -> None:
        wanted = step.settings.collect
        if self._steps() >= step.target:
            return
        if any(map(is_sql, wanted.opponents)):  # among checkpoints, of which the newest is the agent that acts
            self._training(listener).save()
        several = wanted.collectors > 1
        policy: MakePolicy | None = partial(self._make_policy, wanted, listener)
        if self._collector is None:
            plan = CollectionPlan(
                settings=self.settings,
                place=self.directory.lake,
                name=self.directory.identity,
                run=self.directory,
                policy=None if several else policy,
            )
            self._collector = self._stack.enter_context(make_collectors(plan, listener=listener))
            policy = None
        if several:
            policy = self._save_policy(wanted, listener)
        self._figures["collect"] = self._collector.collect(step.target, listener, policy=policy)

    def _save_policy(self, wanted: CollectSettings, listener: Listener) -> NamedPolicy:
        """Name the policy of a stage for other processes, which load the agent's weights from a checkpoint."""
        named = NamedPolicy.of(self.settings, wanted)
        if named.name == "auto":
            learner = self._training(listener).learner
            self._training(listener).save()
            named = replace(named, name=f"{self.directory.path.absolute()}@{learner.update}")
        return named

    def _steps(self) -> int:
        """Count the environment steps collected by the chain so far, including earlier processes."""
        if self._collector is not None:
            return self._collector.steps
        stored = Lake.find(self.directory.lake)
        return count_stored_steps(stored, self.directory.identity) if stored else 0

    def _make_policy(self, wanted: CollectSettings, listener: Listener, env: Env, seed: int) -> Acting:
        """Make the policy of a stage: one that its settings name, or the agent as it is now."""
        if wanted.policy != "auto":
            named = NamedPolicy.of(self.settings, wanted)
            if named not in self._other_policies:
                self._other_policies[named] = named(env, seed)
            return self._other_policies[named]
        agent = self._training(listener, env).acting()
        if self._agent_policy is None:
            if (horizon := env.spec.horizon) is not None:
                agent.sequence.require_time(horizon)  # the row of an episode's last observation
            self._agent_policy = AgentPolicy(
                agent,
                num_actors=env.num_envs,
                capacity=self.settings.train.resolved_context_length,
                seed=seed,
                device=agent.gamma_G.device,
                precision=self._training(listener).learner.precision,
                explores=True,
            )
        agent.eval()
        self._agent_policy.greedy = wanted.greedy
        return Acting(
            policy=self._agent_policy,
            policy_id=self.directory.identity,
            version=self._training(listener).learner.update,
            run=self.directory.path,
        )

    def _training(self, listener: Listener, env: Env | None = None) -> Trainer:
        """Create the trainer on first use, for the spaces of `env` if given."""
        if self._trainer is None:
            if env is None and self.settings.env.name:
                if isinstance(self._collector, Collector):
                    env = self._collector.env
                else:
                    env = make_env(self.settings.env, actors=1, seed=0)
                    env.close()
            if env is not None:
                spaces = env.spec.spaces
            else:
                spaces = Lake(self._places[0]).only_schema().spaces
            self._trainer = Trainer(self.settings, self.directory, spaces, listener=listener)
        return self._trainer

    def _train(self, step: PlannedStage, listener: Listener) -> None:
        trainer = self._training(listener)
        if trainer.learner.update >= step.target:
            return
        if self._collector is not None:
            self._collector.seal()
        mixed = self._mixed(step, listener)
        shares = zip(self._lakes, (share for _, share in mixed), strict=True)
        self._give(TrainOrder.of(trainer, tuple(shares), step.target))
        with ranks.raise_together():
            pass  # the other ranks follow, or refuse
        in_flight = self._figures.get("collect", {}).get("in_flight_share")
        about_data = {} if in_flight is None else {"in_flight_share": in_flight}
        data = trainer.draw_from(mixed, listener)
        self._figures["train"] = trainer.train(data, step.target, listener, about_data=about_data)

    def _mixed(self, step: PlannedStage, listener: Listener) -> list[tuple[Lake, Share]]:
        """List every lake that the chain samples from, with its current weight."""
        if not self._lakes:
            spaces = self._training(listener).learner.spaces
            present = next(filter(None, map(Lake.find, self._places)), None)
            schema = make_schema(spaces, self.settings.collect) if present is None else present.schema_of(spaces)
            opened = open_in_chain(self._places, schema, own=self.directory.lake, listener=listener)
            self._lakes = dict(zip(self._places, opened, strict=True))
        now = {source.place: source.share for source in list_sources(step.settings, self.directory.path)}
        mixed = [(lake, now.get(place, Share(0.0, 0.0))) for place, lake in self._lakes.items()]
        if len(mixed) > 1 or self.directory.lake not in self._lakes:
            self.directory.update_record(lakes=describe_lakes(mixed))
        return mixed

    def _relabel(self, step: PlannedStage, listener: Listener) -> None:
        if self._collector is not None:
            self._collector.seal()
        self._figures["relabel"] = relabel.run(step.settings, lake=self.directory.lake, listener=listener).metrics

    def _evaluate(self, step: PlannedStage, listener: Listener) -> None:
        self._training(listener).save()
        result = evaluate.run(
            step.settings, run=self.directory.path, listener=listener, in_chain=True, both_ways=step.is_final
        )
        self._figures["evaluate"] = result.metrics
        label, record = step.settings.evaluate.label, self.directory.load_record()
        text = evaluation_tables.make_headline(result.metrics, record.get("best"))
        listener(Notice(stage="evaluate", text=f"{label}: {text}" if label else text))
        if label:
            labelled = record.get("labelled", {})
            self.directory.update_record(labelled={**labelled, label: Path(result.outputs[0]).name})

    def _export(self, step: PlannedStage, listener: Listener) -> None:
        self._training(listener).save()
        export.run(step.settings, run=self.directory.path, listener=listener)

    def summary(self, *, seconds: float, status: str) -> Result:
        """Assemble the chain's result: final figures, and the labelled evaluations as a table and a picture."""
        labelled = self.directory.load_record().get("labelled", {})
        found = {label: evaluate.read_stored(self.directory.evaluations / name) for label, name in labelled.items()}
        reports = {label: report for label, report in found.items() if report is not None}
        tables: list[Table] = [table for report in reports.values() for table in evaluation_tables.tables(report)[:1]]
        outputs = [self.directory.path]
        adapting = {label: report for label, report in reports.items() if report["metrics"]["per_attempt"]}
        if adapting:
            tables += evaluation_tables.make_adaptation_tables(adapting, of=", fresh tasks")
            outputs += evaluation_tables.draw_adaptation(adapting, self.directory.path)
        return Result(
            command="run",
            status=status,
            run=self.directory.path,
            lake=self.directory.lake,
            metrics=self._summary_figures(),
            outputs=outputs,
            tables=tables,
            seconds=seconds,
            remark=self._remark(),
        )

    def _remark(self) -> str:
        """Write the remark on a score that is not above random play, or below what was recorded; "" for any other."""
        stored = read_run(self.directory.path)
        found, random, recorded = find_last_and_best(stored.scores.final), stored.random_play, stored.recorded_return
        if found is None:
            return ""
        if random is None or not (said := random.compare(found[0])):
            if recorded is None or RandomPlay(return_mean=recorded).compare(found[0]) != "below":
                return ""
            text = f"the score is below what was recorded: return {found[0].metrics['return_mean']:.4g}, {recorded:.4g}"
            return f"{text}; try imitation alone, --set agent.actor_weight=0, with another --run"
        what = "below random play" if said == "below" else "no better than random play"
        text = f"the score is {what}: return {found[0].metrics['return_mean']:.4g}, random {random}"
        minutes = stored.planned_minutes
        more = f"a larger budget (--minutes {2 * minutes:g}, with another --run)" if minutes else "more epochs"
        return f"{text}; try {more} or another --seed, and see what it does: amago watch {self.directory.path}"

    def _summary_figures(self) -> dict[str, Any]:
        """Gather totals of the run, the latest rates and training figures, and the scores of the last evaluation by the
        run's own settings, with the update and the tasks that they belong to."""
        done = list_checkpoints(self.directory.checkpoints)
        figures: dict[str, Any] = {
            "epochs": self.settings.epochs,
            "steps": self._steps(),
            "updates": done[-1] if done else 0,
        }
        if "collect" in self._figures:
            collected = self._figures["collect"]
            figures |= {key: collected[key] for key in ("steps_per_second", "in_flight_share") if key in collected}
        trained = self._figures.get("train", {})
        shown = ("loss", "agreement", "gap_to_spread", "updates_per_second", "steps_seen", "replay_ratio")
        figures |= {key: trained[key] for key in shown if key in trained}
        if ranks.count_joined() > 1:
            figures["ranks"] = ranks.count_joined()
        if "ingest" in self._figures:
            figures["ingested"] = self._figures["ingest"]["steps_total"]
        if "relabel" in self._figures:
            figures["relabeled"] = self._figures["relabel"]["trajectories"]
        stored = read_run(self.directory.path)
        evaluations = stored.evaluations
        found = find_last_and_best(stored.scores.final)
        if found is not None:
            last, _ = found
            figures["evaluated"] = f"update {last.update:,}, {last.standard}"
            figures |= {"evaluated_update": last.update, "evaluated_split": last.split}
            figures |= {key: last.metrics[key] for key in (*_SCORES, *_GAPS) if key in last.metrics}
            figures |= _compare_modes(last, evaluations)
        if stored.recorded_return is not None:
            figures["recorded_return"] = stored.recorded_return
        if (random := stored.random_play) is not None:
            figures["random_return"] = random.return_mean
            if found is not None and (said := random.compare(found[0])):
                figures["against_random"] = said
        if (best := self.directory.load_record().get("best")) is not None:
            figures["best"] = f"update {best['update']:,}, {best['by']} {best['score']:.4g} on {best['split']} tasks"
            figures["best_update"] = best["update"]
        return figures


def _compare_modes(last: Evaluation, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """Find the scores of the same checkpoint on the same tasks acting the other way, greedily or sampled, where both
    were played and differ by more than their intervals."""
    wanted = replace(last.standard, greedy=not last.standard.greedy, temperature=1.0)
    other = next(
        (each for each in reversed(evaluations) if (each.update, each.standard) == (last.update, wanted)), None
    )
    if last.standard.greedy is None or other is None or not evaluate.differs(last.metrics, other.metrics):
        return {}
    kept = ("return_mean", "return_ci95", "success_mean", "success_ci95")
    return {f"{name_mode(not last.standard.greedy)}_{key}": other.metrics[key] for key in kept if key in other.metrics}
