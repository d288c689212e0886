"""evaluate: play complete episodes on held-out tasks and report means with 95% confidence intervals.

Each evaluation is a file in `RUN/evaluations`, named after its checkpoint and settings; repeating an evaluation reads
the file. `require` is checked in both cases.

Where nobody chose how the policy acts, it acts by its default, and the other way on a quarter of the episodes: a policy
may have learnt what one of the two hides. That check is an evaluation of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pipelines.config.places import AMAGO
from pipelines.config.policy_files import list_checkpoints
from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import EnvSettings, EvaluateSettings, Settings
from pipelines.envs.env import EnvSpec
from pipelines.errors import InputMissing, UsageError
from pipelines.evaluation import gate
from pipelines.evaluation.adaptation import compute_metrics, make_example
from pipelines.evaluation.runner import EpisodeResults, play_episodes
from pipelines.events import Listener, Notice, silent, wait_for
from pipelines.files.atomic import write_atomically
from pipelines.files.json import read_object
from pipelines.files.malformed import MALFORMED
from pipelines.formats.scores import Reference
from pipelines.learning import bundle
from pipelines.learning import checkpoint as checkpoints
from pipelines.rollout.environment import make_evaluation_env
from pipelines.rollout.episodes import Episode
from pipelines.rollout.opponents import identify_opponent, name_opponents
from pipelines.rollout.plan import EvaluationPlan, plan_evaluation
from pipelines.rollout.policies import load_trained
from pipelines.runs.evaluations import Standard, name_mode
from pipelines.runs.stored import find_running
from pipelines.stages import filming
from pipelines.stages.early_checks import WEIGHTS, refuse_run_settings
from pipelines.stages.engines import make_engine, perform_all
from pipelines.stages.evaluation_tables import require_gate, tables
from pipelines.stages.resolve import find_differences
from pipelines.stages.result import Result
from pipelines.stages.tasks import Channel
from pipelines.tracking.background import track_run
from pipelines.training.learner import use_threads
from pipelines.training.metrics_log import MetricsLog

_REPORT_BYTES = 1 << 16
_CHECKED_SHARE, _LEAST_CHECKED = 4, 10  # of the episodes, to see whether acting the other way differs
_NOT_IDENTITY = {"evaluators", "tasks", "checkpoint", "mark_best", "best_by", "require", "label", "reference", "video"}


@dataclass(frozen=True, kw_only=True)
class PlayedShare:
    """The episodes that one evaluator has played."""

    spec: EnvSpec
    episodes: list[Episode]
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class EvaluatorTask:
    """An evaluator, which plays the episodes of its plan's actors, in this process or as a task in another."""

    plan: EvaluationPlan

    def __call__(self, channel: Channel) -> PlayedShare:
        return self.play(channel.listen)

    def play(self, listener: Listener) -> PlayedShare:
        """Play all episodes. UsageError if the environment lacks a metric that the settings name."""
        began, plan = time.process_time(), self.plan
        use_threads(plan.settings.train.threads)
        env = plan.make_env(listener)
        try:
            require_metrics(plan.settings.env, plan.wanted, env.spec)
            acting = plan.make_policy(env)
            started = time.perf_counter()
            wanted = plan.wanted
            episodes = play_episodes(
                env, acting.policy, episodes=wanted.episodes, listener=listener, memory=wanted.memory
            )
            seconds = time.perf_counter() - started
        finally:
            env.close()
        cpu_seconds = time.process_time() - began
        return PlayedShare(spec=env.spec, episodes=episodes, seconds=seconds, cpu_seconds=cpu_seconds)


def run(
    settings: Settings,
    *,
    run: Path,
    videos: Path | None = None,
    in_chain: bool = False,
    both_ways: bool = True,
    listener: Listener = silent,
) -> Result:
    """Evaluate a checkpoint of the run. RequirementNotMet carries the result.

    The settings' videos are written to the directory `videos` (default: the run's own); if they cannot be made, that is
    an error before anything is played, or, `in_chain`, a warning. A chain sends its evaluations to trackers itself.
    `both_ways`: act the other way, too, where the settings leave open how.
    """
    directory, wanted = RunDirectory.open(run), settings.evaluate
    archive = _Archive(to=directory.evaluations, videos=videos or directory.videos, run=directory)
    trackers = () if in_chain else settings.track.to
    with track_run(trackers, directory, settings.document(), listener, videos=archive.videos):
        checkpoint = checkpoints.load(directory.checkpoints, wanted.checkpoint)
        plan = plan_evaluation(settings, checkpoint, directory, listener)
        return archive.evaluate(plan, in_chain=in_chain, both_ways=both_ways, listener=listener)


def follow(settings: Settings, *, path: Path, videos: Path | None = None, listener: Listener = silent) -> Result:
    """Evaluate the newest checkpoint of the run at `path` whenever there is another one, until no process trains it any
    more; wait for the first. Returns the evaluation of the last one, to which alone `require` and `video` apply.

    A checkpoint that is removed while it is read is left out: a newer one has taken its place.
    """
    directory, number = RunDirectory.open(path), -1
    quiet = settings.evaluate.model_copy(update={"require": "", "video": 0})
    while True:
        what = "the first checkpoint" if number < 0 else f"a checkpoint after {number}"
        found = wait_for(partial(_find_another, directory, number), what, listener)
        if found == number:
            return run(settings, run=path, videos=videos, listener=listener)
        number = found
        wanted = settings.model_copy(update={"evaluate": quiet.model_copy(update={"checkpoint": str(number)})})
        with contextlib.suppress(InputMissing):
            metrics = run(wanted, run=path, both_ways=False, listener=listener).metrics
            low, high = metrics["return_ci95"]
            text = f"checkpoint {number}: return {metrics['return_mean']:.4g} ({low:.4g} to {high:.4g})"
            listener(Notice(stage="evaluate", text=text))


def _find_another(directory: RunDirectory, number: int) -> int | None:
    """Find the newest checkpoint if it is not `number`; `number` itself once no process trains the run; else None."""
    process = find_running(directory.path)  # first: a training writes its last checkpoint before it ends
    newest = max(list_checkpoints(directory.checkpoints), default=-1)
    if newest != number:
        return newest
    return number if number >= 0 and (process is None or process[0] == "collect") else None


def run_bundle(
    settings: Settings,
    *,
    directory: Path,
    form: str = WEIGHTS,
    to: Path | None = None,
    trusted: bool = False,
    listener: Listener = silent,
) -> Result:
    """Evaluate the bundle in `directory`, acting with its weights or another `form`: the same episodes and figures as
    of the checkpoint that it was made from. `trusted`: open a form that may contain code.

    Report and videos are written to `to`, and without it nowhere: the bundle is sealed by its checksums.

    InputMissing if it lacks the form, IntegrityError if it was altered; RequirementNotMet carries the result.
    """
    refuse_run_settings(settings, directory, form=form, to=to)
    found = bundle.read(directory)
    file = None
    if form != WEIGHTS:
        from pipelines.export.forms import FormFile

        file = FormFile.read(found, form, trust=trusted)
    archive = _Archive(to=to, videos=to or Path(), facts={"bundle": found.record["checksum"], "form": form})
    opponents = name_opponents(settings.evaluate.opponents, None, listener)
    plan = EvaluationPlan(settings=settings, checkpoint=found, opponents=opponents, form=file)
    return archive.evaluate(plan, listener=listener)


def run_amago(settings: Settings, *, name: str, to: Path | None = None, listener: Listener = silent) -> Result:
    """Evaluate the weights that `name`, amago:PATH, names; a report and videos are written to `to`, as of a bundle.

    InputMissing if there are no such weights, or for other spaces than those of the environment.
    """
    refuse_run_settings(settings, Path(name.removeprefix(AMAGO)), form=WEIGHTS, to=to)
    if not settings.env.name:
        raise UsageError(f"'{name}' does not name its environment", hint="name it: --env NAME")
    env = make_evaluation_env(settings.env, settings.evaluate, actors=1, listener=listener)
    try:
        found = load_trained(name, spaces=env.spec.spaces)
    finally:
        env.close()
    archive = _Archive(to=to, videos=to or Path(), facts={"policy": found.identity})
    return archive.evaluate(EvaluationPlan(settings=settings, checkpoint=found.checkpoint), listener=listener)


@dataclass(frozen=True, kw_only=True)
class _Archive:
    """Where evaluations are stored: files in `to` (None: nowhere), named after their settings and `facts`, and
    `videos`; those of a `run` are also its figures, and choose its best checkpoint."""

    to: Path | None
    videos: Path
    run: RunDirectory | None = None
    facts: Mapping[str, str] = field(default_factory=dict)

    def identify(self, plan: EvaluationPlan) -> str:
        """Hash everything that determines the outcome besides the checkpoint."""
        content: dict[str, Any] = {
            "env": plan.settings.env.model_dump(mode="json"),
            "evaluate": plan.wanted.model_dump(mode="json", exclude=_NOT_IDENTITY),
        }
        if plan.tasks:
            content["tasks"] = list(plan.tasks)
        if plan.wanted.temperature == 1:  # as it was before there were temperatures
            del content["evaluate"]["temperature"]
        if plan.wanted.memory == "episode":  # as it was before there was a choice
            del content["evaluate"]["memory"]
        if not plan.wanted.opponents:  # as it was before there were games
            del content["evaluate"]["opponents"]
        else:  # the checkpoints that they are now
            content["opponents"] = [[identify_opponent(name) for name in group] for group in plan.opponents]
        content |= self.facts
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]

    def stem(self, plan: EvaluationPlan) -> str:
        """Name an evaluation's files, without the ending."""
        return f"{plan.checkpoint.update:06d}-{self.identify(plan)}"

    def read_or_play(
        self, plan: EvaluationPlan, scale: Reference | None, listener: Listener
    ) -> tuple[dict[str, Any], Path | None, bool]:
        """Read the report of an evaluation, or play its episodes; return it, its file, and whether it was there."""
        path = None if self.to is None else self.to / f"{self.stem(plan)}.json"
        known = None if path is None else read_stored(path)
        if known is not None:
            return add_normalized(known, scale), path, True
        if path is not None:  # fail now if the result could not be written later
            trial = path.with_suffix(".trial")
            try:
                write_atomically(trial, "0" * _REPORT_BYTES)
            finally:
                trial.unlink(missing_ok=True)
        report = add_normalized(play(plan, listener), scale)
        if path is not None:
            write_atomically(path, json.dumps(report, indent=1))
        return report, path, False

    def record(self, plan: EvaluationPlan, report: Mapping[str, Any], *, is_new: bool) -> None:
        """Record the figures of a new report, and the best checkpoint."""
        if self.run is None:
            return
        wanted = report["settings"]
        if is_new:
            figures = _describe_way(wanted)
            figures |= {key: value for key, value in report["metrics"].items() if key != "per_task"}
            MetricsLog(self.run.metrics_path).append("evaluate", report["update"], figures)
        if plan.wanted.mark_best is True:
            by, series, update = plan.wanted.best_by, self.identify(plan), plan.checkpoint.update
            score, best = gate.find_value(by, report["metrics"]), self.run.load_record().get("best")
            # Scores of different series cannot be compared: the best of another one is forgotten.
            if best is None or (best["by"], best.get("series")) != (by, series) or score > best["score"]:
                checkpoints.mark_best(self.run.checkpoints, update)
                about = {**_describe_way(wanted), "series": series}
                self.run.update_record(best={"update": update, "score": score, "by": by, **about})

    def evaluate(
        self, plan: EvaluationPlan, *, in_chain: bool = False, both_ways: bool = True, listener: Listener = silent
    ) -> Result:
        """Evaluate by the plan, or read the evaluation that is stored."""
        started, is_open = time.monotonic(), plan.wanted.greedy == "auto"
        gate.parse(plan.wanted.require)
        greedy, split = plan.wanted.acts_greedily(by_default=plan.checkpoint.greedy), plan.wanted.task_split
        plan = plan.with_evaluate(plan.wanted.model_copy(update={"greedy": greedy, "split": split}))
        wanted, env = plan.wanted, plan.settings.env
        if greedy and wanted.temperature != 1:
            raise UsageError(
                "evaluate.temperature has no effect, since the policy takes its most likely actions",
                hint="sample them with --sample, or leave it out",
            )
        scale = find_reference(env, wanted.reference)
        trained_in = plan.checkpoint.record.get("env") or {}
        if trained_in.get("name") and (changed := find_differences(env, trained_in)):
            text = f"evaluated in another environment than the agent was trained in: {'; '.join(changed)}"
            listener(Notice(text=text, level="warning"))
        filmed = filming.EpisodeVideos(plan, to=self.videos, stem=self.stem(plan))
        if not in_chain:
            filmed.require(listener)
        report, path, known = self.read_or_play(plan, scale, listener)
        self.record(plan, report, is_new=not known)
        other = None
        if is_open and both_ways:  # a quarter of the same episodes, but each chosen task, played the other way
            least = max(_LEAST_CHECKED, len(plan.tasks), wanted.episodes // _CHECKED_SHARE)
            changes: dict[str, Any] = {"greedy": not greedy, "episodes": min(wanted.episodes, least)}
            changes |= {"label": "", "require": "", "mark_best": False, "video": 0, "temperature": 1.0}
            reversed_plan = plan.with_evaluate(wanted.model_copy(update=changes))
            other, _, other_known = self.read_or_play(reversed_plan, scale, listener)
            known = known and other_known
        made = filmed.write(listener, strict=not in_chain)
        result = Result(
            command="evaluate",
            status="skipped" if known and not made else "done",
            run=None if self.run is None else self.run.path,
            metrics=_gather_figures(report, other),
            outputs=[*([path] if path else []), *filmed.paths],
            tables=tables(
                report, other if other is not None and differs(report["metrics"], other["metrics"]) else None
            ),
            seconds=time.monotonic() - started,
        )
        return require_gate(result, wanted.require)


def _describe_way(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Describe, by the settings of a report, which tasks were played and how the policy acted."""
    temperature = Standard.find_temperature(wanted)
    about = {"split": wanted["split"], "greedy": wanted["greedy"]}
    about |= {"memory": memory} if (memory := Standard.find_memory(wanted)) != "episode" else {}
    return about if temperature == 1 else {**about, "temperature": temperature}


def _gather_figures(report: Mapping[str, Any], other: Mapping[str, Any] | None) -> dict[str, Any]:
    """Assemble the figures of a result: the scores, with what they belong to, and those of the check."""
    wanted = report["settings"]
    found = {"update": report["update"], **_describe_way(wanted), **report["metrics"]}
    if other is not None:
        kept = ("episodes", *(f"{kind}_{what}" for kind in ("return", "success") for what in ("mean", "ci95")))
        figures = {key: other["metrics"][key] for key in kept if key in other["metrics"]}
        figures["differs"] = differs(report["metrics"], other["metrics"])
        found[f"{name_mode(other['settings']['greedy'])}_play"] = figures
    return found


def differs(figures: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether the intervals of the return, or of success, of two evaluations do not overlap."""
    pairs = (
        (figures[name], others[name]) for name in ("return_ci95", "success_ci95") if name in figures and name in others
    )
    return any(low > other_high or high < other_low for (low, high), (other_low, other_high) in pairs)


def read_stored(path: Path) -> dict[str, Any] | None:
    """Read the evaluation stored at `path`; None if it is missing or unreadable."""
    report = read_object(path)
    try:
        if report is not None:
            tables(report)
            _gather_figures(report, report)
            for name in ("return_ci95", "success_ci95"):  # by which evaluations are compared
                ends = report["metrics"].get(name, [0.0, 0.0])
                if not isinstance(ends, list) or len(ends) != 2 or not all(isinstance(x, int | float) for x in ends):
                    return None
    except MALFORMED:
        return None
    return report


def play(plan: EvaluationPlan, listener: Listener = silent) -> dict[str, Any]:
    """Play the episodes of the plan, in several processes if the settings say so; return the report as plain data."""
    settings, wanted = plan.settings, plan.wanted
    count = min(wanted.evaluators, plan.total)
    if count == 1:
        played = [EvaluatorTask(plan=plan).play(listener)]
    else:
        engine, restarts = make_engine(settings.collect, count), settings.collect.restarts
        tasks = [EvaluatorTask(plan=share) for share in plan.share(count)]
        played = perform_all(tasks, engine, what="evaluator", restarts=restarts, listener=listener)
    episodes = [episode for share in played for episode in share.episodes]
    spec = played[0].spec
    results = EpisodeResults.join(spec, episodes, max(share.seconds for share in played))
    return {
        "update": plan.checkpoint.update,
        "env": settings.env.model_dump(mode="json"),
        "settings": wanted.model_dump(mode="json"),
        "default_greedy": plan.checkpoint.greedy,
        "metrics": compute_metrics(results, every_task=bool(plan.tasks)),
        "known": {  # exact return, and success by attempt, where the environment provides them
            "random": {"return": spec.random_return, "success": spec.random_success and [*spec.random_success]},
            "optimal": {"return": spec.optimal_return, "success": spec.optimal_success and [*spec.optimal_success]},
        },
        "time": time.time(),
        "seconds": results.seconds,
        "cpu_seconds": sum(share.cpu_seconds for share in played),
    }


def require_metrics(env: EnvSettings, wanted: EvaluateSettings, spec: EnvSpec) -> None:
    """Raise UsageError if the settings name a metric that evaluations in the environment of `spec` do not have, or
    clear a memory between attempts that it does not have."""
    if wanted.memory == "attempt" and spec.num_attempts == wanted.attempts == 1:
        raise UsageError(
            f"evaluate.memory = 'attempt' would change nothing: an episode of '{env.name}' is one attempt",
            hint="play each several times: evaluate.attempts, --attempts K",
        )
    examples = {"update": 0, **make_example(spec)}
    if (known := find_reference(env, wanted.reference)) is not None:
        examples |= add_normalized({"metrics": examples}, known)["metrics"]
    gate.refuse_unknown(wanted.require, examples)
    if wanted.mark_best is True:
        gate.find_value(wanted.best_by, examples)


def add_normalized(report: Mapping[str, Any], known: Reference | None) -> dict[str, Any]:
    """Extend the report by D4RL's normalised return and its interval, if the reference returns are known."""
    figures = {key: value for key, value in report["metrics"].items() if not key.startswith("normalized_")}
    if known is not None:
        figures["normalized_score"] = known.score(figures["return_mean"])
        figures["normalized_ci95"] = [known.score(bound) for bound in figures["return_ci95"]]
        figures["normalized_by"] = f"d4rl {known.task}"
    return {**report, "metrics": figures}


def find_reference(env: EnvSettings, wanted: str) -> Reference | None:
    """Find the reference returns of D4RL's normalisation that `evaluate.reference` names, for an environment if it is
    "auto"; None if unknown."""
    if wanted in ("none", "auto"):
        continuing = bool(env.params.get("continuing_task", env.params.get("protocol") != "paper"))
        return Reference.of_environment(env.name, continuing=continuing) if wanted == "auto" else None
    return Reference.find(wanted)
