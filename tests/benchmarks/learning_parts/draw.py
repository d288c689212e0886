"""Learning curves over seeds, by task: against CPU seconds and against environment steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.evaluation.statistics import bootstrap_ci_of_iqm, compute_iqm
from pipelines.report.charts import LIGHT, Lines, Series, add_title, draw
from tests.benchmarks.learning_parts.results import connect
from tests.benchmarks.learning_parts.tasks import load_tasks

AXES = {"cpu_seconds": "CPU seconds", "env_steps": "environment steps"}
_PLACES = 40
_QUERY = """
WITH points AS (
    SELECT task, variant, cpu_limit, settings::VARCHAR AS settings, seed, unnest(curve) AS point
    FROM results WHERE {where}
), flat AS (SELECT task, variant, cpu_limit, settings, seed, point.* FROM points)
SELECT task, variant, cpu_limit, settings, seed, cpu_seconds, env_steps, (CASE task {cases} END)::DOUBLE AS score
FROM flat ORDER BY task, variant, cpu_limit, settings, seed, update
"""
Curve = np.ndarray  # (points, 3): cpu_seconds, env_steps, score


def curves(path: Path, *, where: str = "true") -> dict[str, dict[tuple[Any, ...], list[Curve]]]:
    """Read the curves of all seeds, by task and by what else a group of results has in common."""
    tasks = load_tasks()
    cases = " ".join(f"WHEN '{name}' THEN {task.score}" for name, task in tasks.items())
    with connect(path, tasks) as con:
        rows = con.execute(_QUERY.format(where=where, cases=cases)).fetchall()
    seeds: dict[str, dict[tuple[Any, ...], dict[int, list[Any]]]] = defaultdict(lambda: defaultdict(dict))
    for task, variant, limit, settings, seed, *point in rows:
        seeds[task][variant, limit, settings].setdefault(seed, []).append(point)
    return {
        task: {group: [np.array(points) for points in own.values()] for group, own in groups.items()}
        for task, groups in seeds.items()
    }


def band(found: list[Curve], axis: int, name: str) -> Series:
    """Compute the interquartile mean and its interval where all seeds have a curve, interpolated linearly."""
    x = np.linspace(max(c[0, axis] for c in found), min(c[-1, axis] for c in found), _PLACES)
    at = np.stack([np.interp(x, curve[:, axis], curve[:, 2]) for curve in found])
    bounds = [bootstrap_ci_of_iqm([column]) for column in at.T]
    low, high = zip(*bounds, strict=True)
    return Series(name=name, values=[compute_iqm(column) for column in at.T], low=low, high=high, x=x.tolist())


def learning_curves(path: Path, target: Path, *, where: str = "true") -> Path:
    """Draw a row for each task into a PNG or SVG file."""
    found = curves(path, where=where)
    if not found:
        raise SystemExit(f"no learning curves in {path} where {where}")
    rows = [{"hconcat": list(_row(task, groups)), "spacing": 30} for task, groups in found.items()]
    spec = {"vconcat": rows, "spacing": 30, "resolve": {"scale": {"color": "independent", "strokeDash": "independent"}}}
    return draw(target, add_title(spec, "", LIGHT))


def _row(task: str, groups: dict[tuple[Any, ...], list[Curve]]) -> Iterator[dict[str, Any]]:
    """Yield a chart for each axis. They share a legend, in which the recipe as it is comes first."""
    groups = dict(sorted(groups.items(), key=lambda item: item[0][0] != "default"))
    for axis, label in enumerate(AXES.values()):
        series = [band(seeds, axis, f"{group[0]}, {len(seeds)} seeds") for group, seeds in groups.items()]
        chart = Lines(series=series, x_title=label, y_title="" if axis else task)
        yield {"data": {"values": chart.rows()}, **chart.spec(LIGHT, width=420, height=200)}
