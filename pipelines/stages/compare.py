"""compare: scores of groups of runs with intervals, which group is better, and learning curves."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.errors import InputMissing, UsageError
from pipelines.files.atomic import write_atomically
from pipelines.report.charts import Lines, Series, is_a_curve
from pipelines.runs.comparison import (
    Axis,
    GroupCurve,
    Improvement,
    RunGroup,
    Statistic,
    compute_curves,
    estimate_improvements,
    group_runs,
)
from pipelines.runs.evaluations import DEFAULT_METRIC, ScoreInterval
from pipelines.runs.find import find_runs
from pipelines.runs.stored import read_run
from pipelines.stages.result import Result, Table

_UNITS = {"updates": "gradient updates", "steps": "environment steps", "seconds": "seconds"}
_MOST_LINES = 16


def compare(
    runs: Sequence[Path | str],
    *,
    metric: str = DEFAULT_METRIC,
    statistic: Statistic = "iqm",
    by: Sequence[str] = (),
    axis: Axis = "updates",
    to: Path | None = None,
) -> Result:
    """Compare runs, grouped by what differs except the seed, as `amago compare` does.

    Args:
        runs: runs, directories of runs, or patterns.
        metric: score of the evaluations; of each run its latest update counts, as its own settings evaluate it.
        statistic: "iqm" (interquartile mean) or "mean", over the runs of a group.
        by: settings to group by instead of all that differ.
        axis: x of the learning curves: "updates", "steps" or "seconds".
        to: picture of the learning curves (.png, .svg), or their points (.csv).
    """
    if to is not None and to.suffix not in (".png", ".svg", ".csv"):
        raise UsageError(f"cannot write '{to}': its name must end in .png, .svg or .csv")
    groups = group_runs([read_run(path) for path in find_runs(runs)], metric=metric, statistic=statistic, by=by)
    better = estimate_improvements(groups)
    lines = compute_curves(groups, metric=metric, axis=axis, statistic=statistic) if to is not None else []
    if to is not None:
        _write_curves(to, lines, metric, axis)
    return Result(
        command="compare",
        metrics={
            "metric": metric,
            "statistic": statistic,
            "groups": [
                {
                    "name": group.name,
                    "settings": dict(group.settings),
                    "runs": [str(run.path) for run in group.runs],
                    "unfinished": group.unfinished,
                    "scored_on": group.scored_on,
                    "scores": {env: list(values) for env, values in group.scores.items()},
                    **_describe_interval("score", group.score),
                }
                for group in groups
            ],
            "improvement": [
                {"better": each.better, "than": each.than, **_describe_interval("probability", each.probability)}
                for each in better
            ],
        },
        tables=_tabulate(groups, better, metric, statistic),
        outputs=[to] if to is not None else [],
    )


def _write_curves(to: Path, lines: Sequence[GroupCurve], metric: str, axis: Axis) -> None:
    if not lines:
        raise InputMissing(f"no run has evaluations with known {axis} to draw", hint="try --x updates")
    if to.suffix == ".csv":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("group", axis, metric, "low", "high"))
        for line in lines:
            writer.writerows(
                (line.name, *point) for point in zip(line.x, line.values, line.low, line.high, strict=True)
            )
        write_atomically(to, text.getvalue())
        return
    shared = {line.scored_on for line in lines}
    series = [
        Series(
            name=line.name if len(shared) == 1 else f"{line.name}: {line.scored_on}",
            x=line.x,
            values=line.values,
            low=line.low,
            high=line.high,
            joined=is_a_curve(line.x),
        )
        for line in lines[:_MOST_LINES]
    ]
    what = metric.removesuffix("_mean")
    title = f"{what} on {shared.pop()}".capitalize() if len(shared) == 1 else ""
    Lines(series=series, x_title=_UNITS[axis], y_title=what, share=what == "success").draw(to, title=title)


def _describe_interval(name: str, score: ScoreInterval | None) -> dict[str, Any]:
    if score is None:
        return {name: None, f"{name}_ci95": None}
    return {name: score.value, f"{name}_ci95": None if score.low is None else [score.low, score.high]}


def _tabulate(
    groups: Sequence[RunGroup], better: Sequence[Improvement], metric: str, statistic: Statistic
) -> list[Table]:
    """Tabulate the groups, a row each, with the probability that it improves on the first, which is the baseline."""
    baseline = groups[0].name
    over = {each.better: each.probability for each in better if each.than == baseline}
    shared = {group.scored_on for group in groups if group.scores}
    columns = ["group", "runs", f"{statistic} of {metric}", "95% low", "95% high", "lowest", "highest"]
    columns += ["scored on"] if len(shared) > 1 else []
    are_mixed = len({frozenset(group.scores) for group in groups if group.scores}) > 1
    columns += ["environments"] if are_mixed else []
    if over:
        columns += ["P(better than the first)", "95%"]
    rows = []
    for group in groups:
        score, values = group.score, [value for each in group.scores.values() for value in each]
        runs = f"{len(group.runs)}" + (f" ({group.unfinished} unfinished)" if group.unfinished else "")
        row = [group.name, runs, *((score.value, score.low, score.high) if score else (None, None, None))]
        row += [min(values, default=None), max(values, default=None)]
        row += [group.scored_on] if len(shared) > 1 else []
        row += ["; ".join(group.scores)] if are_mixed else []
        if over:
            chance = over.get(group.name)
            bounds = f"{chance.low:.2f} to {chance.high:.2f}" if chance and chance.low is not None else ""
            row += [f"{chance.value:.2f}" if chance else "", bounds]
        rows.append(row)
    title = [f"scored on {shared.pop()}"] if len(shared) == 1 else []
    title += ["in different environments, whose scores are of different scales"] if are_mixed else []
    return [Table(title=", ".join(title), columns=columns, rows=rows)]
