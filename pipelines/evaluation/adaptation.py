"""What evaluation episodes say: returns, success, success by attempt, and how much the agent gained by
adapting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.evaluation.published import by_task, published
from pipelines.evaluation.runner import EpisodeResults
from pipelines.evaluation.statistics import bootstrap_ci, bootstrap_ci_columns

_MOST_TASKS = 1_000


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """Success by attempt, with 95% intervals: arrays (A,). `gap`: last attempt minus first, paired by
    episode.
    """

    success: np.ndarray
    low: np.ndarray
    high: np.ndarray
    gap: float
    gap_ci95: tuple[float, float]

    @property
    def apart(self) -> bool:
        """The intervals of the first and the last attempt do not touch, and the last is better."""
        return bool(self.low[-1] > self.high[0])


def adaptation(attempts: np.ndarray, *, seed: int = 0) -> Adaptation:
    """The adaptation curve of `attempts` (E, A) bool, A >= 1."""
    low, high = bootstrap_ci_columns(attempts, seed=seed)
    difference = attempts[:, -1].astype(float) - attempts[:, 0]
    return Adaptation(
        success=attempts.mean(axis=0),
        low=low,
        high=high,
        gap=float(difference.mean()),
        gap_ci95=bootstrap_ci(difference, seed=seed),
    )


def metrics(results: EpisodeResults, *, seed: int = 0, every_task: bool = False) -> dict[str, Any]:
    """Plain data for JSON: means and 95% intervals of return and success, by task and by attempt.

    `per_task` maps a task to its episodes and means; it is empty where every episode may have a task of
    its own (more tasks than a thousand, or as many as episodes), unless `every_task` is wanted.
    `per_attempt` is empty where nothing is attempted. `published` adds what papers report.
    """
    found: dict[str, Any] = {
        "episodes": results.episodes,
        "steps": results.steps,
        "return_mean": float(results.returns.mean()),
        "return_std": float(results.returns.std()),
        "return_min": float(results.returns.min()),
        "return_max": float(results.returns.max()),
        "return_ci95": list(bootstrap_ci(results.returns, seed=seed)),
        "length_mean": float(results.lengths.mean()),
        "per_task": _per_task(results, every_task),
        "per_attempt": [],
        **published(results, seed=seed),
    }
    if results.success is not None:
        found["success_mean"] = float(results.success.mean())
        found["success_ci95"] = list(bootstrap_ci(results.success, seed=seed))
    if results.attempts is not None and results.attempts.shape[1]:
        curve = adaptation(results.attempts, seed=seed)
        found["per_attempt"] = [
            {"attempt": i + 1, "success_mean": float(mean), "success_ci95": [float(low), float(high)]}
            for i, (mean, low, high) in enumerate(zip(curve.success, curve.low, curve.high, strict=True))
        ]
        found["adaptation_gap"] = curve.gap
        found["adaptation_gap_ci95"] = list(curve.gap_ci95)
    return found


def _per_task(results: EpisodeResults, every_task: bool) -> dict[str, dict[str, float]]:
    members = by_task(results.tasks)
    own = len(members) > _MOST_TASKS or (len(members) == results.episodes and results.episodes > 1)
    if own and not every_task:
        return {}
    table = {}
    for task in sorted(members):
        chosen = members[task]
        table[task] = {"episodes": len(chosen), "return_mean": float(results.returns[chosen].mean())}
        if results.success is not None:
            table[task]["success_mean"] = float(results.success[chosen].mean())
    return table
