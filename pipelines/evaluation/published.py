"""The figures that papers report: normalised returns, Crafter's score, the 20th percentile over tasks."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from pipelines.envs.env import Score
from pipelines.evaluation.runner import EpisodeResults
from pipelines.evaluation.statistics import mean_of_strata_ci


def published(results: EpisodeResults, *, seed: int = 0) -> dict[str, Any]:
    """`return_p20` (the 20th percentile of the tasks' mean returns), and what the environment's papers report.

    With a `spec.score` called s: `s_mean` with `s_ci95`, and `s_median`, over the games (or other groups) played;
    absent if the bounds of one are not published. With achievements: the share of episodes that had each, and their
    score.
    """
    figures: dict[str, Any] = {"return_p20": _return_percentile(results, 20)}
    if results.spec.score is not None:
        figures |= _normalised(results, results.spec.score, seed)
    if results.achieved is not None:
        rates = results.achieved.mean(axis=0)
        figures["achievement_score"] = achievement_score(rates)
        figures["achievements"] = dict(zip(results.spec.achievements, rates.tolist(), strict=True))
    return figures


def _return_percentile(results: EpisodeResults, percent: float) -> float:
    """Return a percentile over tasks of their mean return (Nikulin et al., 2024, use the 20th)."""
    means = [float(results.returns[chosen].mean()) for chosen in by_task(results.tasks).values()]
    return float(np.percentile(means, percent))


def achievement_score(rates: np.ndarray) -> float:
    """Return Crafter's score, in percent: the geometric mean over achievements of their success rates, with 1% added
    before and subtracted after (Hafner, 2022).

    >>> round(achievement_score(np.array([1.0, 0.0])), 3)
    9.05
    """
    return float(np.expm1(np.log1p(100 * rates).mean()))


def by_task(tasks: tuple[str, ...]) -> dict[str, list[int]]:
    """Return the indices of each task's episodes."""
    members: dict[str, list[int]] = defaultdict(list)
    for index, task in enumerate(tasks):
        members[task].append(index)
    return members


def _normalised(results: EpisodeResults, score: Score, seed: int) -> dict[str, Any]:
    groups = by_task(tuple(map(score.group, results.tasks)))
    if not groups.keys() <= score.bounds.keys():
        return {}
    strata = []
    for group in sorted(groups):
        low, high = score.bounds[group]
        strata.append((results.returns[groups[group]] - low) / (high - low))
    means = [float(values.mean()) for values in strata]
    figures = float(np.mean(means)), list(mean_of_strata_ci(strata, seed=seed)), float(np.median(means))
    return dict(zip(normalised_names(score), figures, strict=True))


def normalised_names(score: Score) -> tuple[str, str, str]:
    """Return the names of the figures that `score` adds: mean, interval, median."""
    return f"{score.name}_mean", f"{score.name}_ci95", f"{score.name}_median"
