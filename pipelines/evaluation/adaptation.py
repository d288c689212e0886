"""Metrics of evaluation episodes: returns and success, also by attempt, the gain from adaptation, and the figures that
papers report: normalised returns, Crafter's score, the 20th percentile over tasks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipelines.envs.env import EnvSpec
from pipelines.evaluation.runner import EpisodeResults
from pipelines.evaluation.statistics import bootstrap_ci, bootstrap_ci_columns, bootstrap_ci_of_strata

_MOST_TASKS = 1_000
_MOST_ATTEMPTS = 100  # whose names are known where their number varies


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """Mean by attempt (of success or return), with 95% intervals: arrays (A,). `gap`: last attempt minus first, paired
    by episode.
    """

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    gap: float
    gap_ci95: tuple[float, float]

    @property
    def apart(self) -> bool:
        """Whether the last attempt is better than the first and their intervals do not overlap."""
        return bool(self.low[-1] > self.high[0])

    @classmethod
    def compute(cls, attempts: np.ndarray, *, seed: int = 0) -> Adaptation:
        """Compute the adaptation curve of `attempts` (E, A), success or returns, A >= 1."""
        low, high = bootstrap_ci_columns(attempts, seed=seed)
        difference = attempts[:, -1].astype(float) - attempts[:, 0]
        return cls(
            mean=attempts.mean(axis=0),
            low=low,
            high=high,
            gap=float(difference.mean()),
            gap_ci95=bootstrap_ci(difference, seed=seed),
        )


def compute_metrics(results: EpisodeResults, *, seed: int = 0, every_task: bool = False) -> dict[str, Any]:
    """Compute, as plain data for JSON, means and 95% intervals of return and success, by task and by attempt.

    `per_task` maps a task to its episodes and means; it is empty if tasks may be unique to episodes (more than a
    thousand tasks, or as many as episodes), unless `every_task` is set. `per_attempt` is empty without attempts;
    success is left out if tasks do not define it. `published` adds the figures that papers report.
    """
    members = _group(results.tasks)
    per_task: dict[str, dict[str, float]] = {}
    are_unique = len(members) > _MOST_TASKS or (len(members) == results.episodes and results.episodes > 1)
    for task in sorted(members) if every_task or not are_unique else ():
        chosen = members[task]
        per_task[task] = {"episodes": len(chosen), "return_mean": float(results.returns[chosen].mean())}
        if results.success is not None:
            per_task[task]["success_mean"] = float(results.success[chosen].mean())
    found: dict[str, Any] = {
        "episodes": results.episodes,
        "steps": results.steps,
        "return_mean": float(results.returns.mean()),
        "return_std": float(results.returns.std()),
        "return_min": float(results.returns.min()),
        "return_max": float(results.returns.max()),
        "return_ci95": list(bootstrap_ci(results.returns, seed=seed)),
        "length_mean": float(results.lengths.mean()),
        "per_task": per_task,
        "per_attempt": [],
        **compute_published(results, seed=seed),
    }
    if results.outcomes is not None:
        found |= {
            "draw_mean": float((results.outcomes == 0.5).mean()),
            "loss_mean": float((results.outcomes == 0).mean()),
        }
    if results.success is not None:
        found["success_mean"] = float(results.success.mean())
        found["success_ci95"] = list(bootstrap_ci(results.success, seed=seed))
    curves = {"success": results.attempts, "return": results.attempt_returns}
    for name, attempts in curves.items():
        if attempts is None or not attempts.shape[1]:
            continue
        curve = Adaptation.compute(attempts, seed=seed)
        found["per_attempt"] = found["per_attempt"] or [{"attempt": i + 1} for i in range(attempts.shape[1])]
        for entry, mean, low, high in zip(found["per_attempt"], curve.mean, curve.low, curve.high, strict=True):
            entry |= {f"{name}_mean": float(mean), f"{name}_ci95": [float(low), float(high)]}
        gap = "adaptation_gap" if name == "success" else f"{name}_adaptation_gap"
        found |= {gap: curve.gap, f"{gap}_ci95": list(curve.gap_ci95)}
    return found


def make_example(spec: EnvSpec) -> dict[str, Any]:
    """Compute metrics of a made-up episode: their names are those of metrics of episodes of `spec`."""
    attempts = None if spec.num_attempts == 1 else np.zeros((1, spec.num_attempts or _MOST_ATTEMPTS))
    nothing = EpisodeResults(
        spec=replace(spec, score=None),
        returns=np.zeros(1),
        lengths=np.ones(1, dtype=np.int64),
        success=np.zeros(1, dtype=bool) if spec.has_success else None,
        attempts=attempts if spec.has_success else None,
        attempt_returns=attempts,
        tasks=("",),
        seconds=0.0,
        achieved=np.zeros((1, len(spec.achievements)), dtype=bool) if spec.achievements else None,
        outcomes=np.zeros(1) if spec.seats else None,
    )
    names = () if spec.score is None else spec.score.figures[:3]
    return compute_metrics(nothing) | {name: [0.0, 0.0] if name.endswith("_ci95") else 0.0 for name in names}


def compute_published(results: EpisodeResults, *, seed: int = 0) -> dict[str, Any]:
    """Compute `return_p20` (the 20th percentile of the tasks' mean returns), and what the environment's papers report.

    With a `spec.score` called s: `s_mean` with `s_ci95`, and `s_median`, over the games (or other groups) played, which
    `s_over` lists; absent if the bounds of one are not published. With achievements: the share of episodes that had
    each, and their score.
    """
    means = [float(results.returns[chosen].mean()) for chosen in _group(results.tasks).values()]
    figures: dict[str, Any] = {"return_p20": float(np.percentile(means, 20))}  # as Nikulin et al., 2024
    score = results.spec.score
    groups = {} if score is None else _group(tuple(map(score.group, results.tasks)))
    if score is not None and groups.keys() <= score.bounds.keys():
        strata = []
        for group in sorted(groups):
            low, high = score.bounds[group]
            strata.append((results.returns[groups[group]] - low) / (high - low))
        over = [float(values.mean()) for values in strata]
        interval = list(bootstrap_ci_of_strata(strata, seed=seed))
        scores = float(np.mean(over)), interval, float(np.median(over)), sorted(groups)
        figures |= dict(zip(score.figures, scores, strict=True))
    if results.achieved is not None:
        rates = results.achieved.mean(axis=0)
        figures["achievement_score"] = score_achievements(rates)
        figures["achievements"] = dict(zip(results.spec.achievements, rates.tolist(), strict=True))
    return figures


def score_achievements(rates: np.ndarray) -> float:
    """Compute Crafter's score, in percent: the geometric mean over achievements of their success rates, with 1% added
    before and subtracted after (Hafner, 2022).

    >>> round(score_achievements(np.array([1.0, 0.0])), 3)
    9.05
    """
    return float(np.expm1(np.log1p(100 * rates).mean()))


def _group(tasks: tuple[str, ...]) -> dict[str, list[int]]:
    """List the indices of each task's episodes."""
    members: dict[str, list[int]] = defaultdict(list)
    for index, task in enumerate(tasks):
        members[task].append(index)
    return members
