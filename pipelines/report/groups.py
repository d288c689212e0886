"""Several runs beside each other: groups of runs that differ in their seed only, with intervals over the runs."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.report.charts import make_a_curve
from pipelines.report.markup import Markup, element, joined, table
from pipelines.report.page import Charts, Curve
from pipelines.report.scores import interval
from pipelines.report.shown import ShownRun, text
from pipelines.runs.comparison import Axis, RunGroup, curves, grouped, improvements

_AXES: tuple[Axis, ...] = ("updates", "steps", "seconds")
_METRICS = ("success_mean", "return_mean")
_MOST_GROUPS = 20


def section(runs: Sequence[ShownRun], charts: Charts) -> Markup | None:
    """Return the scores of the groups, their learning curves, and how likely one is better than another."""
    groups = grouped([run.stored for run in runs])
    if not groups or len(groups) == len(runs):  # every run is a group of its own: the runs' scores say all
        return None
    rows = [[text(g.name, 200), len(g.runs), g.score and g.score.value, g.score and interval(g.score)] for g in groups]
    columns = ["group", "runs", "interquartile mean of the last return", "95% interval"]
    about = (
        "Runs that differ in nothing but the seed are a group. Intervals are stratified bootstrap intervals over runs."
    )
    drawn = [_curves(groups, metric, charts) for metric in _METRICS]
    return joined(
        element("p", about),
        table(columns, rows, caption="Groups of runs"),
        element("div", *drawn, class_="grid"),
        _improvements(groups),
    )


def _curves(groups: Sequence[RunGroup], metric: str, charts: Charts) -> Markup | None:
    """Return a chart of the groups' curves; on each axis these are others, as runs advance at different speeds."""
    drawn = [(axis, each) for axis in _AXES for each in curves(groups[:_MOST_GROUPS], metric=metric, axis=axis)]
    scored_on = list(dict.fromkeys(each.scored_on for _, each in drawn))
    found = [
        Curve(
            name=text(each.name if len(scored_on) == 1 else f"{each.name}: {each.scored_on}", 200),
            values=each.values,
            x=each.x,
            low=each.low,
            high=each.high,
            axis=axis,
            joined=make_a_curve(each.x),
            color=[group.name for group in groups].index(each.name),
        )
        for axis, each in drawn
    ]
    if not found:
        return None
    name = metric.removesuffix("_mean")
    about = f"Interquartile mean over the runs of a group, with its 95% interval; {text(' or '.join(scored_on), 200)}."
    share = metric == "success_mean"
    return charts.lines(f"{name.capitalize()} of groups", found, y=name, about=about, share=share, names="group")


def _improvements(groups: Sequence[RunGroup]) -> Markup | None:
    rows = [
        [text(each.better, 200), text(each.than, 200), each.probability.value, interval(each.probability)]
        for each in improvements(groups[:_MOST_GROUPS])
    ]
    columns = ["a run of", "scores higher than one of", "with probability", "95% interval"]
    return table(columns, rows, caption="Probability of improvement") if rows else None
