"""evaluate: play complete episodes on held-out tasks and report means with 95% confidence intervals.

Each evaluation is a file in `RUN/evaluations`, named after its checkpoint and settings; repeating an evaluation reads
the file. `require` is checked in both cases.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipelines.config.run_directory import RunDirectory, dump
from pipelines.config.settings import Settings
from pipelines.envs.env import EnvSpec
from pipelines.errors import InputMissing, RequirementNotMet, UsageError
from pipelines.evaluation import gate
from pipelines.evaluation.adaptation import example
from pipelines.evaluation.adaptation import metrics as describe
from pipelines.evaluation.runner import joined
from pipelines.events import Listener, Notice, silent
from pipelines.files.atomic import write_atomically
from pipelines.files.json import read_object
from pipelines.files.malformed import MALFORMED
from pipelines.formats.scores import Reference, reference, reference_of_environment
from pipelines.lake.store import Lake
from pipelines.learning import checkpoint as checkpoints
from pipelines.learning.checkpoint import Checkpoint
from pipelines.report.charts import Series
from pipelines.report.plots import adaptation_curve
from pipelines.stages import filming
from pipelines.stages.engines import make_engine, perform_all
from pipelines.stages.evaluator import EvaluatorTask
from pipelines.stages.resolve import differences
from pipelines.stages.result import Result, Table
from pipelines.tracking.background import tracked
from pipelines.training.metrics_log import MetricsLog

_MOST_ROWS, _MOST_COLUMNS = 20, 8  # tasks, attempts in a table
_CURVES = ("success", "return")
Reports = Mapping[str, Mapping[str, Any]]
_REPORT_BYTES = 1 << 16
_NOT_IDENTITY = {"evaluators", "tasks", "checkpoint", "mark_best", "best_by", "require", "label", "reference", "video"}


def run(
    settings: Settings,
    *,
    run: Path,
    videos: Path | None = None,
    in_chain: bool = False,
    listener: Listener = silent,
) -> Result:
    """Evaluate a checkpoint of the run. RequirementNotMet carries the result.

    The settings' videos are written to the directory `videos` (default: the run's own); if they cannot be made, that is
    an error before anything is played, or, `in_chain`, a warning. A chain sends its evaluations to trackers itself.
    """
    directory = RunDirectory.open(run)
    videos = videos or directory.videos
    with tracked(() if in_chain else settings.track.to, directory, dump(settings), listener, videos=videos):
        return _run(settings, directory, videos=videos, in_chain=in_chain, listener=listener)


def _run(settings: Settings, directory: RunDirectory, *, videos: Path, in_chain: bool, listener: Listener) -> Result:
    wanted, started = settings.evaluate, time.monotonic()
    gate.parse(wanted.require)
    scale = known_returns(settings)
    checkpoint = checkpoints.load(directory.checkpoints, wanted.checkpoint)
    trained_in = checkpoint.record.get("env") or {}
    if trained_in.get("name") and (changed := differences(settings.env, trained_in)):
        text = f"evaluated in another environment than the agent was trained in: {'; '.join(changed)}"
        listener(Notice(text=text, level="warning"))
    tasks = _tasks(settings, directory, listener)
    path = directory.evaluations / f"{checkpoint.update:06d}-{_identity(settings, tasks)}.json"
    report = stored(path)
    filmed = filming.EpisodeVideos(settings, checkpoint, to=videos, stem=path.stem, tasks=tasks)
    if not in_chain:
        filmed.require(listener)
    known = report is not None
    if report is None:
        _require_space(path)
        report = scored(play(settings, checkpoint, listener, tasks=tasks), scale)
        write_atomically(path, json.dumps(report, indent=1))
        figures = {key: value for key, value in report["metrics"].items() if key != "per_task"}
        MetricsLog(directory.metrics_path).append("evaluate", checkpoint.update, figures)
    report = scored(report, scale)
    if wanted.mark_best:
        _mark_best(directory, checkpoint.update, report["metrics"], wanted.best_by)
    made = filmed.write(listener, strict=not in_chain)
    result = Result(
        command="evaluate",
        status="skipped" if known and not made else "done",
        run=directory.path,
        metrics={"update": checkpoint.update, **report["metrics"]},
        outputs=[path, *filmed.paths],
        tables=tables(report),
        seconds=time.monotonic() - started,
    )
    try:
        gate.check(wanted.require, result.metrics)
    except RequirementNotMet as error:
        error.result = result
        raise
    return result


def _require_space(path: Path) -> None:
    """Refuse to start if the result could not be written."""
    trial = path.with_suffix(".trial")
    try:
        write_atomically(trial, "0" * _REPORT_BYTES)
    finally:
        trial.unlink(missing_ok=True)


def stored(path: Path) -> dict[str, Any] | None:
    """Return the evaluation stored at `path`; None if it is missing or unreadable."""
    report = read_object(path)
    try:
        if report is not None:
            tables(report)
    except MALFORMED:
        return None
    return report


def play(
    settings: Settings, checkpoint: Checkpoint, listener: Listener = silent, *, tasks: Sequence[str] = ()
) -> dict[str, Any]:
    """Play the episodes, on `tasks` if given, and return the report as plain data."""
    wanted, actors = settings.evaluate, min(settings.evaluate.actors, settings.evaluate.episodes)
    count = min(wanted.evaluators, actors)
    shares = [
        EvaluatorTask(
            settings=settings,
            checkpoint=checkpoint,
            place=slice(actors * number // count, actors * (number + 1) // count),
            total=actors,
            tasks=tuple(tasks),
            count=count,
            check=partial(require_metrics, settings),
        )
        for number in range(count)
    ]
    if count == 1:
        played = [shares[0].play(listener)]
    else:
        engine, restarts = make_engine(settings.collect, count), settings.collect.restarts
        played = perform_all(shares, engine, what="evaluator", restarts=restarts, listener=listener)
    episodes = [episode for share in played for episode in share.episodes]
    results = joined(played[0].spec, episodes, max(share.seconds for share in played))
    return {
        "update": checkpoint.update,
        "env": settings.env.model_dump(mode="json"),
        "settings": wanted.model_dump(mode="json"),
        "metrics": describe(results, every_task=bool(tasks)),
        "known": baselines(results.spec),
        "time": time.time(),
        "seconds": results.seconds,
        "cpu_seconds": sum(share.cpu_seconds for share in played),
    }


def require_metrics(settings: Settings, spec: EnvSpec) -> None:
    """Raise UsageError if the settings name a metric that evaluations in the environment of `spec` do not have."""
    wanted, examples = settings.evaluate, {"update": 0, **example(spec)}
    if (known := known_returns(settings)) is not None:
        examples |= scored({"metrics": examples}, known)["metrics"]
    gate.require_names(wanted.require, examples)
    if wanted.mark_best:
        gate.value(wanted.best_by, examples)


def scored(report: Mapping[str, Any], known: Reference | None) -> dict[str, Any]:
    """Return the report with D4RL's normalised return and its interval, if the reference returns are known."""
    figures = {key: value for key, value in report["metrics"].items() if not key.startswith("normalized_")}
    if known is not None:
        figures["normalized_score"] = known.score(figures["return_mean"])
        figures["normalized_ci95"] = [known.score(bound) for bound in figures["return_ci95"]]
        figures["normalized_by"] = f"d4rl {known.task}"
    return {**report, "metrics": figures}


def known_returns(settings: Settings) -> Reference | None:
    """Return the reference returns of D4RL's normalisation for the settings' environment; None if unknown."""
    wanted = settings.evaluate.reference
    if wanted in ("none", "auto"):
        params = settings.env.params
        continuing = bool(params.get("continuing_task", params.get("protocol") != "paper"))
        return reference_of_environment(settings.env.name, continuing=continuing) if wanted == "auto" else None
    return reference(wanted)


def baselines(spec: EnvSpec) -> dict[str, dict[str, Any]]:
    """Return the exact return and success by attempt of random and optimal play, where the environment provides
    them."""
    return {
        "random": {"return": spec.random_return, "success": _listed(spec.random_success)},
        "optimal": {"return": spec.optimal_return, "success": _listed(spec.optimal_success)},
    }


def headline(figures: Mapping[str, Any], best: Mapping[str, Any] | None = None) -> str:
    """Summarise the scores in one line; `best` is the run record's entry for the best checkpoint so far."""
    low, high = figures["return_ci95"]
    parts = [f"update {figures['update']:,}", f"return {figures['return_mean']:.4g} [{low:.4g}, {high:.4g}]"]
    if "success_mean" in figures:
        parts.append(f"success {figures['success_mean']:.3g}")
    curves = _curves_of(figures)
    if curves and 1 < len(figures["per_attempt"]) <= _MOST_COLUMNS:
        values = (entry[f"{curves[0]}_mean"] for entry in figures["per_attempt"])
        form = ".2f" if curves[0] == "success" else ".4g"
        parts.append("by attempt " + " ".join(format(value, form) for value in values))
    if best is not None:
        score = f"best so far: {best['by']} {best['score']:.4g} at update {best['update']:,}"
        parts.append("best so far" if best["update"] == figures["update"] else score)
    return ", ".join(parts)


def tables(report: Mapping[str, Any]) -> list[Table]:
    """Return tables for people: return and success, and the adaptation curve if the task has attempts."""
    figures = report["metrics"]
    low, high = figures["return_ci95"]
    rows = [["return", figures["return_mean"], low, high]]
    if "success_mean" in figures:
        rows.append(["success", figures["success_mean"], *figures["success_ci95"]])
    if "normalized_score" in figures:
        rows.append([figures["normalized_by"], figures["normalized_score"], *figures["normalized_ci95"]])
    if "achievement_score" in figures:
        rows.append(["achievement score", figures["achievement_score"], None, None])
    for key in figures:  # normalised scores of `evaluation.published`
        if key.endswith("_median") and f"{(name := key.removesuffix('_median'))}_ci95" in figures:
            rows.append([name.replace("_", " "), figures[f"{name}_mean"], *figures[f"{name}_ci95"]])
    split = report["settings"]["split"]
    which = f"tasks where {chosen}" if (chosen := report["settings"].get("tasks")) else f"{split} tasks"
    title = f"{report['env']['name']}, checkpoint {report['update']}, {figures['episodes']} episodes of {which}"
    found = [Table(title=title, columns=["", "mean", "95% low", "95% high"], rows=rows)]
    if chosen:
        found.append(_task_table(figures["per_task"]))
    return found + adaptation_tables({f"checkpoint {report['update']}": report})


def _listed(values: tuple[float, ...] | None) -> list[float] | None:
    return None if values is None else list(values)


def _task_table(figures: Mapping[str, Mapping[str, float]]) -> Table:
    """Return a table of all tasks, hardest first."""
    ordered = sorted(figures.items(), key=lambda item: (item[1].get("success_mean", 0.0), item[1]["return_mean"]))
    shown = [[name, *(row.get(key) for key in ("episodes", "return_mean", "success_mean"))] for name, row in ordered]
    return Table(title="by task", columns=["task", "episodes", "return", "success"], rows=shown[:_MOST_ROWS])


def _tasks(settings: Settings, directory: RunDirectory, listener: Listener) -> list[str]:
    """Return the tasks that `evaluate.tasks` selects in the run's lakes: its own and those it was trained on.

    InputMissing if there are none, or more than the number of episodes to play.
    """
    wanted = settings.evaluate
    if not wanted.tasks.strip():
        return []
    from pipelines.lake.sql.selection import tasks

    places = [directory.lake, *(lake["lake"] for lake in directory.load_record().get("lakes", ()))]
    lakes = {lake.id: lake for place in places if (lake := Lake.find(place)) is not None}
    if not lakes:
        raise InputMissing(f"run '{directory.path}' has no lake whose tasks could be chosen")
    found = {
        name for lake in lakes.values() for name in tasks(lake, wanted.tasks, env=settings.env.name, listener=listener)
    }
    if not found:
        raise InputMissing(f"no trajectory of '{settings.env.name}' matches --tasks", hint="see amago lake info")
    if len(found) > wanted.episodes:
        raise UsageError(
            f"{len(found)} tasks are chosen, {wanted.episodes} episodes are to be played",
            hint=f"give --episodes {len(found)} or more, or choose fewer tasks",
        )
    return sorted(found)


def _identity(settings: Settings, tasks: Sequence[str]) -> str:
    """Hash everything that determines the outcome besides the checkpoint."""
    content: dict[str, Any] = {
        "env": settings.env.model_dump(mode="json"),
        "evaluate": settings.evaluate.model_dump(mode="json", exclude=_NOT_IDENTITY),
    }
    if tasks:
        content["tasks"] = list(tasks)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def _mark_best(directory: RunDirectory, update: int, figures: Mapping[str, Any], best_by: str) -> None:
    score = gate.value(best_by, figures)
    best = directory.load_record().get("best")
    if best is None or best["by"] != best_by or score > best["score"]:
        checkpoints.mark_best(directory.checkpoints, update)
        directory.update_record(best={"update": update, "score": score, "by": best_by})


def _curves_of(figures: Mapping[str, Any]) -> list[str]:
    """Return which of success and return the evaluation's figures contain by attempt."""
    entries = figures["per_attempt"]
    return [kind for kind in _CURVES if entries and f"{kind}_mean" in entries[0]]


def adaptation_tables(reports: Reports, *, of: str = "") -> list[Table]:
    """Return tables of success and return by attempt, for the figures that all named reports have; `of` ends the
    titles."""
    return [_table(reports, kind, title=f"{kind} by attempt{of}") for kind in _shared(reports)]


def adaptation_pictures(reports: Reports, directory: Path) -> list[Path]:
    """Draw the curves of `adaptation_tables` into `directory`: `adaptation.png` and `adaptation_return.png`."""
    name = next(iter(reports.values()))["env"]["name"]
    return [
        adaptation_curve(
            directory / ("adaptation.png" if kind == "success" else f"adaptation_{kind}.png"),
            [*(_series(label, report, kind) for label, report in reports.items()), *_references(reports, kind)],
            title=f"Adaptation: {name}",
            metric=kind,
        )
        for kind in _shared(reports)
    ]


def _shared(reports: Reports) -> list[str]:
    return [kind for kind in _CURVES if all(kind in _curves_of(report["metrics"]) for report in reports.values())]


def _known(reports: Reports, kind: str) -> dict[str, Sequence[float]]:
    """Return success by attempt of random and optimal play, where known exactly."""
    known = next(iter(reports.values()))["known"]
    return {name: known[name]["success"] for name in ("random", "optimal") if kind == "success" and known[name][kind]}


def _references(reports: Reports, kind: str) -> list[Series]:
    return [Series(name=name, values=values, reference=True) for name, values in _known(reports, kind).items()]


def _series(label: str, report: Mapping[str, Any], kind: str) -> Series:
    entries = report["metrics"]["per_attempt"]
    low, high = zip(*(entry[f"{kind}_ci95"] for entry in entries), strict=True)
    return Series(name=label, values=[entry[f"{kind}_mean"] for entry in entries], low=low, high=high)


def _table(reports: Reports, kind: str, *, title: str) -> Table:
    """Return two rows (mean, 95% interval) per named report, between random and optimal play where those are known.
    Long curves are thinned to a few attempts, including the first and the last."""
    attempts = min(len(report["metrics"]["per_attempt"]) for report in reports.values())
    shown = sorted({round(i * (attempts - 1) / (_MOST_COLUMNS - 1)) for i in range(_MOST_COLUMNS)})
    known = {name: [name, *(f"{values[i]:.3f}" for i in shown)] for name, values in _known(reports, kind).items()}
    form, interval = (".3f", "{:.2f}-{:.2f}") if kind == "success" else (".4g", "{:.3g} to {:.3g}")
    rows: list[list[Any]] = [known["random"]] if "random" in known else []
    for name, report in reports.items():
        entries = [report["metrics"]["per_attempt"][i] for i in shown]
        rows.append([name, *(format(entry[f"{kind}_mean"], form) for entry in entries)])
        rows.append(["  95% interval", *(interval.format(*entry[f"{kind}_ci95"]) for entry in entries)])
    rows += [known["optimal"]] if "optimal" in known else []
    return Table(title=title, columns=["attempt", *(str(i + 1) for i in shown)], rows=rows)
