"""Evaluations of a run: scores with their intervals, by update, environment steps and time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.files.json import parse_object
from pipelines.files.malformed import read_limited
from pipelines.runs.metrics import MetricColumns

DEFAULT_METRIC = "return_mean"
_MOST_FILES = 20_000
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class ScoreInterval:
    """A score and its 95% interval; without one, `low` and `high` are None."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One file of `evaluations/`.

    `series` is the same for evaluations with the same settings, which form a curve. `env_steps` and `seconds` (time
    spent on the run) are those at the checkpoint's update, None if the log does not say.
    """

    path: Path
    series: str
    update: int
    time: float | None
    env: str
    split: str
    label: str
    settings: Mapping[str, Any] = field(repr=False)
    metrics: Mapping[str, Any] = field(repr=False)
    known: Mapping[str, Any] = field(repr=False)
    env_steps: float | None = None
    seconds: float | None = None

    def score(self, metric: str = DEFAULT_METRIC) -> ScoreInterval | None:
        """Return a metric with its interval; None if the evaluation does not have that number."""
        return _score(self.metrics, metric)

    def attempts(self, kind: str = "success") -> list[ScoreInterval]:
        """Return `success` or `return` by attempt; empty if there are no attempts or it is not known for each."""
        entries = self.metrics.get("per_attempt")
        listed = entries if isinstance(entries, list) else []
        found = [_score(entry, f"{kind}_mean") if isinstance(entry, Mapping) else None for entry in listed]
        return [] if None in found else [score for score in found if score is not None]

    def known_attempts(self, who: str, kind: str = "success") -> list[float]:
        """Return what is known exactly of `random` or `optimal` play by attempt; empty if nothing is."""
        table = self.known.get(who)
        values = table.get(kind) if isinstance(table, Mapping) else None
        found = [number(value) for value in values] if isinstance(values, list) else []
        return [] if None in found else [value for value in found if value is not None]


def read_evaluations(
    folder: Path, metrics: MetricColumns | None = None
) -> tuple[tuple[Evaluation, ...], tuple[str, ...]]:
    """Return the evaluations in `folder`, in the order in which they were made, and which files could not be read.

    `metrics` of the run gives them environment steps and seconds.
    """
    found, problems = [], []
    try:
        paths = sorted(folder.glob("*.json"))[:_MOST_FILES]
    except OSError:
        paths = []
    for path in paths:
        if path.name.startswith("."):
            continue
        evaluation = _read(path, metrics)
        if evaluation is None:
            problems.append(f"evaluations/{path.name} is damaged")
        else:
            found.append(evaluation)
    return tuple(sorted(found, key=lambda each: (each.time or 0.0, each.update))), tuple(problems)


def curve(evaluations: Sequence[Evaluation], metric: str = DEFAULT_METRIC) -> list[Evaluation]:
    """Return the evaluations that form a learning curve, by update: of the settings that most checkpoints were
    evaluated with, the newest such if there are several."""
    scored = [each for each in evaluations if each.score(metric) is not None]
    counts = Counter(each.series for each in scored)
    newest = {each.series: place for place, each in enumerate(scored)}
    if not counts:
        return []
    chosen = max(counts, key=lambda series: (counts[series], newest[series]))
    by_update = {each.update: each for each in scored if each.series == chosen}
    return [by_update[update] for update in sorted(by_update)]


def last_and_best(
    evaluations: Sequence[Evaluation], metric: str = DEFAULT_METRIC
) -> tuple[Evaluation, Evaluation] | None:
    """Return the newest evaluation with the metric, and the best in the same environment and split of tasks."""
    scored = [(each, score.value) for each in evaluations if (score := each.score(metric)) is not None]
    if not scored:
        return None
    last = scored[-1][0]
    alike = [(each, value) for each, value in scored if (each.env, each.split) == (last.env, last.split)]
    return last, max(alike, key=lambda item: item[1])[0]


def number(value: Any) -> float | None:
    """Return a finite number of a JSON file as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _read(path: Path, metrics: MetricColumns | None) -> Evaluation | None:
    try:
        report = parse_object(read_limited(path, _MOST_BYTES))
    except OSError:
        return None
    if report is None:
        return None
    update, figures = report.get("update"), report.get("metrics")
    if isinstance(update, bool) or not isinstance(update, int) or not isinstance(figures, dict):
        return None
    if not 0 <= update < 1 << 53:
        return None
    env, settings, known = (_table(report.get(name)) for name in ("env", "settings", "known"))
    head, _, tail = path.stem.rpartition("-")
    return Evaluation(
        path=path,
        series=tail if head else path.stem,
        update=update,
        time=number(report.get("time")),
        env=_text(env.get("name")),
        split=_text(settings.get("split")),
        label=_text(settings.get("label")),
        settings=settings,
        metrics=figures,
        known=known,
        env_steps=metrics.at("env_steps", update) if metrics else None,
        seconds=metrics.at("seconds", update) if metrics else None,
    )


def _score(metrics: Mapping[str, Any], metric: str) -> ScoreInterval | None:
    value = number(metrics.get(metric))
    if value is None:
        return None
    bounds = metrics.get(f"{metric.removesuffix('_mean')}_ci95")
    low, high = bounds if isinstance(bounds, list) and len(bounds) == 2 else (None, None)
    return ScoreInterval(value=value, low=number(low), high=number(high))


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value[:1_000] if isinstance(value, str) else ""
