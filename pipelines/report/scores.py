"""Scores of runs: learning curves of their evaluations, and adaptation by attempt."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from pipelines.report.charts import make_a_curve
from pipelines.report.markup import Markup, element, folded, joined, table
from pipelines.report.page import Charts, Curve
from pipelines.report.shown import ShownRun, text
from pipelines.runs.evaluations import Evaluation, ScoreInterval, env_differences

_METRICS = ("success_mean", "return_mean", "normalized_score", "achievement_score")
_KINDS = ("success", "return")
_MOST_EVALUATIONS = 200
_MOST_LINES = 12
_MOST_BANDS = 4  # of several runs, beyond which bands hide each other


def learning_curves(runs: Sequence[ShownRun], charts: Charts) -> Iterator[Markup]:
    """Yield a chart for each score that the runs were evaluated by."""
    for metric in _METRICS:
        curves = [
            curve
            for run in runs
            for curve in _curves(run, metric, several=len(runs) > 1, bands=len(runs) <= _MOST_BANDS)
        ]
        if curves:
            name = metric.removesuffix("_mean").replace("_", " ")
            about = "Mean of each evaluation" + (", with its 95% interval." if len(runs) <= _MOST_BANDS else ".")
            about += " Lines join evaluations that follow each other closely."
            yield charts.lines(name.capitalize(), curves, y=name, about=about, share=metric == "success_mean")


def _curves(run: ShownRun, metric: str, *, several: bool, bands: bool) -> Iterator[Curve]:
    """Yield a line for each kind of evaluation: of the same tasks, as many episodes, and so on."""
    scored = [each for each in run.stored.evaluations if each.score(metric) is not None]
    kinds: dict[str, dict[int, Evaluation]] = {}
    for each in scored:
        kinds.setdefault(each.series, {})[each.update] = each
    longest = sorted(kinds.values(), key=len, reverse=True)[: 2 if several else _MOST_LINES]
    firsts = [next(iter(kind.values())) for kind in longest]
    names = _told_apart(firsts)
    for place, kind in enumerate(longest):
        points = [kind[update] for update in sorted(kind)]
        name = names[place]
        scores = [score for each in points if (score := each.score(metric)) is not None]
        low, high = _bounds(scores) if bands else (None, None)
        yield Curve(
            name=f"{run.label}: {name}" if several else name,
            values=[score.value for score in scores],
            along=run.along_of([each.update for each in points]),
            low=low,
            high=high,
            run=run.number,
            color=run.color if several else place,
            joined=make_a_curve([each.update for each in points]),
        )


def _told_apart(evaluations: Sequence[Evaluation]) -> list[str]:
    """Name evaluations by their tasks, with as much of their settings as distinguishes them."""
    envs = env_differences([each.standard for each in evaluations])
    prefixes = {key: f"{text(name, 80)}, " if len(envs) > 1 else "" for key, name in envs.items()}
    names = [prefixes[each.standard.env] + _tasks(each) for each in evaluations]
    episodes = [
        f"{name}, {text(each.metrics.get('episodes'), 20)} episodes"
        for name, each in zip(names, evaluations, strict=True)
    ]
    exact = [f"{name}, settings {each.series}" for name, each in zip(names, evaluations, strict=True)]
    for candidates in (names, episodes):
        if len(set(candidates)) == len(candidates):
            return candidates
    counts = Counter(names)
    return [plain if counts[plain] == 1 else full for plain, full in zip(names, exact, strict=True)]


def _tasks(evaluation: Evaluation) -> str:
    return text(str(evaluation.standard), 120)


def _bounds(scores: Sequence[ScoreInterval]) -> tuple[list[float] | None, list[float] | None]:
    if all(score.low is None or score.high is None for score in scores):
        return None, None
    known = [(math.nan, math.nan) if s.low is None or s.high is None else (s.low, s.high) for s in scores]
    return [low for low, _ in known], [high for _, high in known]


def adaptation(runs: Sequence[ShownRun], charts: Charts) -> Iterator[Markup]:
    """Yield success and return by attempt, beside random and optimal play where they are known."""
    chosen = [(run, name, each) for run in runs for name, each in _compared(run, several=len(runs) > 1)]
    drawn: list[list[list[float]]] = []
    for kind in _KINDS:
        curves = []
        for place, (run, name, each) in enumerate(chosen):
            scores = each.attempts(kind)
            if len(scores) > 1:
                low, high = _bounds(scores)
                values = [score.value for score in scores]
                curves.append(
                    Curve(
                        name=name,
                        values=values,
                        low=low,
                        high=high,
                        run=run.number,
                        color=run.color if len(runs) > 1 else place,
                    )
                )
        found = [list(curve.values) for curve in curves]
        if not curves or found in drawn:  # where a success is a return of 1, one chart says all
            continue
        drawn.append(found)
        yield charts.lines(
            f"{kind.capitalize()} by attempt",
            [*curves, *_references([each for _, _, each in chosen], kind, attempts=max(map(len, found)))],
            x="attempt in the episode",
            y=kind,
            about="With fixed weights, what rises from left to right is adaptation. Bands are 95% intervals.",
            share=kind == "success",
            whole=True,
            names="evaluation",
        )


def _compared(run: ShownRun, *, several: bool) -> list[tuple[str, Evaluation]]:
    """Return the evaluations whose attempts are shown, of those by which the run is scored: of one run those with a
    label, else the first and the last."""
    counted = run.stored.scores.final or run.stored.evaluations
    tried = [each for each in counted if any(len(each.attempts(kind)) > 1 for kind in _KINDS)]
    if not tried:
        return []
    labelled = [each for each in tried if each.label]
    if several:
        return [(run.label, (labelled or tried)[-1])]
    chosen = labelled or [tried[0], *([tried[-1]] if len(tried) > 1 else [])]
    named = {(text(each.label, 60) or f"update {each.update:,}"): each for each in chosen}
    return list(itertools.islice(named.items(), _MOST_LINES))


def _references(evaluations: Sequence[Evaluation], kind: str, *, attempts: int) -> Iterator[Curve]:
    if len({each.env for each in evaluations}) > 1:
        return
    for who in ("random", "optimal"):
        known = next((found for each in evaluations if (found := each.known_attempts(who, kind))), [])
        if len(known) == 1:
            known = known * attempts
        if known:
            yield Curve(name=who, values=known, reference=True)


def _evaluations_table(runs: Sequence[ShownRun]) -> Markup | None:
    """Return all evaluations, the newest first, and which of them the run is scored by."""
    rows = []
    envs = env_differences([each.standard for run in runs for each in run.stored.evaluations])
    for run in runs:
        for each in reversed(run.stored.evaluations[-_MOST_EVALUATIONS:]):
            scores = [cell for metric in _METRICS[:2] for cell in (_score(each, metric), _interval(each, metric))]
            env = text(envs[each.standard.env], 120)
            about = [text(each.label, 60) or None, env, _tasks(each), each.metrics.get("episodes")]
            about.append("yes" if each in run.stored.scores.final else None)
            rows.append([*([run.label] if len(runs) > 1 else []), each.update, *about, *scores])
    if not rows:
        return None
    columns = ["update", "label", "environment", "tasks", "episodes", "counts", "success", "95%", "return", "95%"]
    named = ["run", *columns] if len(runs) > 1 else columns
    return folded(f"All evaluations ({len(rows)})", table(named, rows, caption="Evaluations, the newest first"))


def _score(evaluation: Evaluation, metric: str) -> float | None:
    score = evaluation.score(metric)
    return None if score is None else score.value


def _interval(evaluation: Evaluation, metric: str) -> str | None:
    score = evaluation.score(metric)
    return None if score is None else interval(score) or None


def interval(score: ScoreInterval) -> str:
    """Format the interval of a score; empty if there is none."""
    return "" if score.low is None or score.high is None else f"{score.low:.4g} to {score.high:.4g}"


def section(runs: Sequence[ShownRun], charts: Charts, collected: Sequence[Markup] = ()) -> Markup | None:
    """Return everything about scores; None if there is nothing. `collected`: charts of the episodes in the lakes."""
    shown = [*adaptation(runs, charts), *collected, *learning_curves(runs, charts)]
    if not shown:
        return None
    return joined(element("div", *shown, class_="grid"), _evaluations_table(runs))
