"""Scores on a page: learning curves of evaluations, adaptation by attempt, and groups of runs with different seeds."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pipelines.report.charts import is_a_curve
from pipelines.report.markup import Markup, element, fold, join, table
from pipelines.report.page import Charts, Curve
from pipelines.report.shown import ShownRun, text
from pipelines.runs.comparison import Axis, compute_curves, estimate_improvements, group_runs
from pipelines.runs.evaluations import Evaluation, ScoreInterval, name_environments

_METRICS = ("success_mean", "return_mean", "normalized_score", "achievement_score")
_KINDS = ("success", "return")
_MOST_EVALUATIONS = 200
_MOST_LINES = 12
_MOST_GROUPS = 20
_AXES: tuple[Axis, ...] = ("updates", "steps", "seconds")
_MOST_BANDS = 4  # of several runs, beyond which bands hide each other


def _make_learning_curves(run: ShownRun, metric: str, *, count: int) -> Iterator[Curve]:
    """Yield the run's curve for each kind of evaluation: evaluations of one kind have the same tasks and settings.

    `count`: the number of runs in the chart.
    """
    kinds: dict[str, dict[int, Evaluation]] = {}
    for each in run.stored.evaluations:
        if each.score(metric) is not None:
            kinds.setdefault(each.series, {})[each.update] = each
    longest = sorted(kinds.values(), key=len, reverse=True)[: 2 if count > 1 else _MOST_LINES]
    names = _name_distinctly([next(iter(kind.values())) for kind in longest])
    for place, (kind, name) in enumerate(zip(longest, names, strict=True)):
        points = [kind[update] for update in sorted(kind)]
        scores = [score for each in points if (score := each.score(metric)) is not None]
        low, high = _split_bounds(scores) if count <= _MOST_BANDS else (None, None)
        yield Curve(
            name=f"{run.label}: {name}" if count > 1 else name,
            values=[score.value for score in scores],
            along=run.at_updates([each.update for each in points]),
            low=low,
            high=high,
            run=run.number,
            color=run.color if count > 1 else place,
            joined=is_a_curve([each.update for each in points]),
        )


def _name_distinctly(evaluations: Sequence[Evaluation]) -> list[str]:
    """Name evaluations by their tasks, with as much of their settings as distinguishes them."""
    envs = name_environments([each.standard for each in evaluations])
    prefixes = {key: f"{text(name, 80)}, " if len(envs) > 1 else "" for key, name in envs.items()}
    names = [prefixes[each.standard.env] + text(str(each.standard), 120) for each in evaluations]
    pairs = list(zip(names, evaluations, strict=True))
    for candidates in (names, [f"{name}, {text(e.metrics.get('episodes'), 20)} episodes" for name, e in pairs]):
        if len(set(candidates)) == len(candidates):
            return candidates
    counts = Counter(names)
    return [name if counts[name] == 1 else f"{name}, settings {each.series}" for name, each in pairs]


def _split_bounds(scores: Sequence[ScoreInterval]) -> tuple[list[float] | None, list[float] | None]:
    """Split intervals into lower and upper bounds, NaN where one is unknown; None if all are."""
    if all(score.low is None or score.high is None for score in scores):
        return None, None
    known = [(math.nan, math.nan) if s.low is None or s.high is None else (s.low, s.high) for s in scores]
    return [low for low, _ in known], [high for _, high in known]


def _draw_adaptation(runs: Sequence[ShownRun], charts: Charts) -> Iterator[Markup]:
    """Yield success and return by attempt, beside random and optimal play where they are known."""
    several = len(runs) > 1
    chosen = [(run, name, each) for run in runs for name, each in _choose_adaptation(run, several=several)]
    shared_env = len({each.env for _, _, each in chosen}) == 1
    drawn: list[list[list[float]]] = []
    for kind in _KINDS:
        lines = []
        for place, (run, name, each) in enumerate(chosen):
            scores = each.attempts(kind)
            if len(scores) > 1:
                low, high = _split_bounds(scores)
                values = [score.value for score in scores]
                color = run.color if several else place
                lines.append(Curve(name=name, values=values, low=low, high=high, run=run.number, color=color))
        found = [list(line.values) for line in lines]
        if not lines or found in drawn:  # where a success is a return of 1, one chart says all
            continue
        drawn.append(found)
        for who in ("random", "optimal") if shared_env else ():
            known = next((values for _, _, each in chosen if (values := each.known_attempts(who, kind))), [])
            if len(known) == 1:
                known = known * max(map(len, found))
            if known:
                lines.append(Curve(name=who, values=known, reference=True))
        yield charts.lines(
            f"{kind.capitalize()} by attempt",
            lines,
            x="attempt in the episode",
            y=kind,
            about="With fixed weights, what rises from left to right is adaptation. Bands are 95% intervals.",
            share=kind == "success",
            whole=True,
            names="evaluation",
        )


def _choose_adaptation(run: ShownRun, *, several: bool) -> list[tuple[str, Evaluation]]:
    """Choose the evaluations whose attempts are drawn, with their names, among those by which the run is scored.

    One run shows those with a label, also with the memory cleared after each attempt, or else the first and the last.
    Each of several runs shows one.
    """
    counted = list(run.stored.scores.final or run.stored.evaluations)
    if not several:
        standards = {replace(each.standard, memory="attempt") for each in counted}
        counted += [
            each for each in run.stored.evaluations
            if each.label and each.standard in standards and each not in counted
        ]  # fmt: skip
    tried = [each for each in counted if any(len(each.attempts(kind)) > 1 for kind in _KINDS)]
    if not tried:
        return []
    labelled = [each for each in tried if each.label]
    if several:
        return [(run.label, (labelled or tried)[-1])]
    chosen = labelled or [tried[0], *([tried[-1]] if len(tried) > 1 else [])]
    named = {(text(each.label, 60) or f"update {each.update:,}"): each for each in chosen}
    return list(itertools.islice(named.items(), _MOST_LINES))


def _tabulate_evaluations(runs: Sequence[ShownRun]) -> Markup | None:
    """Tabulate all evaluations, the newest first, and which of them the run is scored by."""
    rows = []
    envs = name_environments([each.standard for run in runs for each in run.stored.evaluations])
    for run in runs:
        for each in reversed(run.stored.evaluations[-_MOST_EVALUATIONS:]):
            scores: list[Any] = []
            for metric in _METRICS[:2]:
                score = each.score(metric)
                scores += [None, None] if score is None else [score.value, format_interval(score) or None]
            env, tasks = text(envs[each.standard.env], 120), text(str(each.standard), 120)
            about = [text(each.label, 60) or None, env, tasks, each.metrics.get("episodes")]
            about.append("yes" if each in run.stored.scores.final else None)
            rows.append([*([run.label] if len(runs) > 1 else []), each.update, *about, *scores])
    if not rows:
        return None
    columns = ["update", "label", "environment", "tasks", "episodes", "counts", "success", "95%", "return", "95%"]
    named = ["run", *columns] if len(runs) > 1 else columns
    return fold(f"All evaluations ({len(rows)})", table(named, rows, caption="Evaluations, the newest first"))


def format_interval(score: ScoreInterval) -> str:
    """Format the interval of a score; empty if there is none."""
    return "" if score.low is None or score.high is None else f"{score.low:.4g} to {score.high:.4g}"


def show_scores(runs: Sequence[ShownRun], charts: Charts, collected: Markup | None = None) -> Markup | None:
    """Show everything about scores; None if there is nothing. `collected`: the chart of the episodes in the lake."""
    shown = [*_draw_adaptation(runs, charts), *([collected] if collected else [])]
    for metric in _METRICS:
        found = [curve for run in runs for curve in _make_learning_curves(run, metric, count=len(runs))]
        if found:
            name = metric.removesuffix("_mean").replace("_", " ")
            about = "Mean of each evaluation" + (", with its 95% interval." if len(runs) <= _MOST_BANDS else ".")
            about += " Lines join evaluations that follow each other closely."
            shown.append(charts.lines(name.capitalize(), found, y=name, about=about, share=metric == "success_mean"))
    if not shown:
        return None
    return join(element("div", *shown, class_="grid"), _tabulate_evaluations(runs))


def show_groups(runs: Sequence[ShownRun], charts: Charts) -> Markup | None:
    """Compare groups of runs that differ in their seed: scores, curves, and the probability that one group is better.

    None if every run is a group of its own, since the scores of the runs say the same then.
    """
    groups = group_runs([run.stored for run in runs])
    if not groups or len(groups) == len(runs):
        return None
    rows = [
        [text(g.name, 200), len(g.runs), g.score and g.score.value, g.score and format_interval(g.score)]
        for g in groups
    ]
    columns = ["group", "runs", "interquartile mean of the last return", "95% interval"]
    about = (
        "Runs that differ in nothing but the seed are a group. Intervals are stratified bootstrap intervals over runs."
    )
    figures = []
    for metric in _METRICS[:2]:
        # Each axis has curves of its own, since runs advance at different speeds.
        drawn = [
            (axis, each) for axis in _AXES for each in compute_curves(groups[:_MOST_GROUPS], metric=metric, axis=axis)
        ]
        if not drawn:
            continue
        scored_on = list(dict.fromkeys(each.scored_on for _, each in drawn))
        lines = [
            Curve(
                name=text(each.name if len(scored_on) == 1 else f"{each.name}: {each.scored_on}", 200),
                values=each.values,
                x=each.x,
                low=each.low,
                high=each.high,
                axis=axis,
                joined=is_a_curve(each.x),
                color=[group.name for group in groups].index(each.name),
            )
            for axis, each in drawn
        ]
        name, tasks = metric.removesuffix("_mean"), text(" or ".join(scored_on), 200)
        title, share = f"{name.capitalize()} of groups", metric == "success_mean"
        how = f"Interquartile mean over the runs of a group, with its 95% interval; {tasks}."
        figures.append(charts.lines(title, lines, y=name, about=how, share=share, names="group"))
    better = [
        [text(each.better, 200), text(each.than, 200), each.probability.value, format_interval(each.probability)]
        for each in estimate_improvements(groups[:_MOST_GROUPS])
    ]
    likely = ["a run of", "scores higher than one of", "with probability", "95% interval"]
    return join(
        element("p", about),
        table(columns, rows, caption="Groups of runs"),
        element("div", *figures, class_="grid"),
        table(likely, better, caption="Probability of improvement") if better else None,
    )
