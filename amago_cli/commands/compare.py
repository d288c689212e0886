"""`amago compare`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import Common, Metric, SomeRuns, lister


class Statistic(StrEnum):
    """Statistics over the runs of a group."""

    IQM = "iqm"
    MEAN = "mean"


class Axis(StrEnum):
    """X axes of learning curves."""

    UPDATES = "updates"
    STEPS = "steps"
    SECONDS = "seconds"


@lister
def compare(
    common: Common,
    runs: SomeRuns,
    metric: Metric = "return_mean",
    statistic: Annotated[
        Statistic, typer.Option("--statistic", help="Interquartile mean or mean over the runs of a group.")
    ] = Statistic.IQM,
    by: Annotated[
        list[str] | None,
        typer.Option(
            "--by",
            metavar="KEY",
            help="Setting to group by; repeatable. Default: all that differ, except the seed.",
            autocompletion=completion.settings,
        ),
    ] = None,
    x: Annotated[Axis, typer.Option("--x", help="X axis of the learning curves.")] = Axis.UPDATES,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="Write learning curves: .png or .svg, or their points as .csv."),
    ] = None,
) -> Any:
    """Compare runs: a row for each group of runs that differ only in their seed.

    Of each run, the latest update counts, evaluated as the run's own settings say: not in another environment, on other
    tasks or with another way to act. Intervals are 95% stratified bootstrap intervals over runs; runs in
    several environments are strata. P(better than the first) is the probability that a run of the group scores higher
    than a run of the first group (Agarwal et al., 2021). One run in a group has no interval.

    Example: amago compare 'runs/maze-*' --to curves.png
    """
    from amago_cli.render.output import Rows
    from pipelines.stages import compare as engine

    result = engine.compare(runs, metric=metric, statistic=statistic.value, by=by or (), axis=x.value, to=to)
    if common.invocation.csv:
        return Rows(columns=result.tables[0].columns, rows=result.tables[0].rows)
    return result
