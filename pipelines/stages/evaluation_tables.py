"""Results of evaluations: tables and pictures for people, and the score that a caller requires."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.errors import RequirementNotMet
from pipelines.evaluation import gate
from pipelines.report.charts import Lines, Series
from pipelines.runs.evaluations import Standard, name_mode
from pipelines.stages.result import Result, Table

_MOST_ROWS, _MOST_COLUMNS = 20, 8  # tasks, attempts in a table
_MOST_GAMES = 4  # that are named
_CURVES = ("success", "return")
Reports = Mapping[str, Mapping[str, Any]]


def require_gate(result: Result, required: str) -> Result:
    """Return `result` if its metrics meet `required` ("": nothing is). RequirementNotMet carries it."""
    try:
        gate.check(required, result.metrics)
    except RequirementNotMet as error:
        error.result = result
        raise
    return result


def make_headline(figures: Mapping[str, Any], best: Mapping[str, Any] | None = None) -> str:
    """Summarise the scores in one line, which begins with what they belong to; `best` is the run record's entry for
    the best checkpoint so far, mentioned where it was chosen on tasks of the same split."""
    low, high = figures["return_ci95"]
    where = f"update {figures['update']:,} on {figures['split']} tasks"
    parts = [f"{where}: return {figures['return_mean']:.4g} [{low:.4g}, {high:.4g}]"]
    if "success_mean" in figures:
        parts.append(f"success {figures['success_mean']:.3g}")
    curves = _find_curves(figures)
    if curves and 1 < len(figures["per_attempt"]) <= _MOST_COLUMNS:
        values = (entry[f"{curves[0]}_mean"] for entry in figures["per_attempt"])
        form = ".2f" if curves[0] == "success" else ".4g"
        parts.append("by attempt " + " ".join(format(value, form) for value in values))
    for way in ("greedy", "sampled"):
        other = figures.get(f"{way}_play")
        if other is not None and other["differs"]:
            low, high = other["return_ci95"]
            parts.append(f"{way} play: return {other['return_mean']:.4g} [{low:.4g}, {high:.4g}]")
    if best is not None and best.get("split") == figures["split"]:
        score = f"best so far: {best['by']} {best['score']:.4g} at update {best['update']:,}"
        parts.append("best so far" if best["update"] == figures["update"] else score)
    return ", ".join(parts)


def tables(report: Mapping[str, Any], other: Mapping[str, Any] | None = None) -> list[Table]:
    """Make tables for people: return and success, and the adaptation curve if the task has attempts.

    `other`: the same episodes, fewer of them, played the other way (greedily or sampled); shown where it differs by
    more than the intervals.
    """
    figures = report["metrics"]
    rows = _list_scores(figures)
    if "normalized_score" in figures:
        rows.append([figures["normalized_by"], figures["normalized_score"], *figures["normalized_ci95"]])
    outcomes = (("draws", "draw_mean"), ("losses", "loss_mean"))
    rows += [[name, figures[key], None, None] for name, key in outcomes if key in figures]
    if "achievement_score" in figures:
        rows.append(["achievement score", figures["achievement_score"], None, None])
    for key in figures:  # normalised scores of `evaluation.adaptation`
        if key.endswith("_median") and f"{(name := key.removesuffix('_median'))}_ci95" in figures:
            games = figures.get(f"{name}_over", ())
            named = ", ".join(games) if len(games) <= _MOST_GAMES else f"{len(games)} games"
            label = name.replace("_", " ") + (f" over {named}" if games else "")
            rows.append([label, figures[f"{name}_mean"], *figures[f"{name}_ci95"]])
    if other is not None:
        about = f"{name_mode(other['settings']['greedy'])} play, {other['metrics']['episodes']} episodes"
        rows += [[f"{name} ({about})", *values] for name, *values in _list_scores(other["metrics"])]
    wanted = report["settings"]
    which = f"tasks where {chosen}" if (chosen := wanted.get("tasks")) else f"{wanted['split']} tasks"
    title = f"{report['env']['name']}, checkpoint {report['update']}, {figures['episodes']} episodes of {which}"
    title += f", {name_mode(wanted['greedy'])} play"
    title += ", memory cleared after each attempt" if Standard.find_memory(wanted) == "attempt" else ""
    title += f" at temperature {hot:g}" if (hot := Standard.find_temperature(wanted)) != 1 else ""
    found = [Table(title=title, columns=["", "mean", "95% low", "95% high"], rows=rows)]
    if chosen:  # hardest first
        tasks = sorted(
            figures["per_task"].items(), key=lambda item: (item[1].get("success_mean", 0.0), item[1]["return_mean"])
        )
        shown = [[name, *(row.get(key) for key in ("episodes", "return_mean", "success_mean"))] for name, row in tasks]
        columns = ["task", "episodes", "return", "success"]
        found.append(Table(title="by task", columns=columns, rows=shown[:_MOST_ROWS]))
    return found + make_adaptation_tables({f"checkpoint {report['update']}": report})


def _list_scores(figures: Mapping[str, Any]) -> list[list[Any]]:
    kinds = [kind for kind in ("return", "success") if f"{kind}_mean" in figures]
    return [[kind, figures[f"{kind}_mean"], *figures[f"{kind}_ci95"]] for kind in kinds]


def _find_curves(figures: Mapping[str, Any]) -> list[str]:
    """Find which of success and return the evaluation's figures contain by attempt."""
    entries = figures["per_attempt"]
    return [kind for kind in _CURVES if entries and f"{kind}_mean" in entries[0]]


def make_adaptation_tables(reports: Reports, *, of: str = "") -> list[Table]:
    """Make tables of success and return by attempt, for the figures that all named reports have; `of` ends the
    titles. Each has two rows (mean, 95% interval) per report, between random and optimal play where those are known.
    Long curves are thinned to a few attempts, including the first and the last."""
    made = []
    attempts = min(len(report["metrics"]["per_attempt"]) for report in reports.values())
    shown = sorted({round(i * (attempts - 1) / (_MOST_COLUMNS - 1)) for i in range(_MOST_COLUMNS)})
    for kind in _find_shared_curves(reports):
        references = _find_known(reports, kind).items()
        known = {name: [name, *(f"{values[i]:.3f}" for i in shown)] for name, values in references}
        form, interval = (".3f", "{:.2f}-{:.2f}") if kind == "success" else (".4g", "{:.3g} to {:.3g}")
        rows: list[list[Any]] = [known["random"]] if "random" in known else []
        for name, report in reports.items():
            entries = [report["metrics"]["per_attempt"][i] for i in shown]
            rows.append([name, *(format(entry[f"{kind}_mean"], form) for entry in entries)])
            rows.append(["  95% interval", *(interval.format(*entry[f"{kind}_ci95"]) for entry in entries)])
        rows += [known["optimal"]] if "optimal" in known else []
        columns = ["attempt", *(str(i + 1) for i in shown)]
        made.append(Table(title=f"{kind} by attempt{of}", columns=columns, rows=rows))
    return made


def draw_adaptation(reports: Reports, directory: Path) -> list[Path]:
    """Draw the curves of `make_adaptation_tables` into `directory`: `adaptation.png` and `adaptation_return.png`."""
    pictures = []
    for kind in _find_shared_curves(reports):
        series = []
        for label, report in reports.items():
            entries = report["metrics"]["per_attempt"]
            low, high = zip(*(entry[f"{kind}_ci95"] for entry in entries), strict=True)
            series.append(Series(name=label, values=[entry[f"{kind}_mean"] for entry in entries], low=low, high=high))
        known = _find_known(reports, kind).items()
        series += [Series(name=name, values=values, reference=True) for name, values in known]
        to = directory / ("adaptation.png" if kind == "success" else f"adaptation_{kind}.png")
        title = f"Adaptation: {next(iter(reports.values()))['env']['name']}"
        share = kind == "success"
        chart = Lines(series=series, x_title="attempt in the episode", y_title=kind, share=share, whole=True)
        pictures.append(chart.draw(to, title=title))
    return pictures


def _find_shared_curves(reports: Reports) -> list[str]:
    return [kind for kind in _CURVES if all(kind in _find_curves(report["metrics"]) for report in reports.values())]


def _find_known(reports: Reports, kind: str) -> dict[str, Sequence[float]]:
    """Find success by attempt of random and optimal play, where known exactly."""
    known = next(iter(reports.values()))["known"]
    return {name: known[name]["success"] for name in ("random", "optimal") if kind == "success" and known[name][kind]}
