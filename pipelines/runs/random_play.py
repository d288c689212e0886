"""The score of random play, which a run should exceed: measured when a run without a recipe begins, or known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.runs.evaluations import Evaluation, number

_ERRORS = 2.0  # standard errors of the measured mean that count as equal


@dataclass(frozen=True, kw_only=True)
class RandomPlay:
    """Mean return of random play, its standard error, and the number of episodes (0: known exactly)."""

    return_mean: float
    return_error: float = 0.0
    episodes: int = 0

    def __str__(self) -> str:
        return f"{self.return_mean:.4g}" + (f" ({self.episodes:,} episodes)" if self.episodes else "")


def random_play(recipe: Mapping[str, Any], evaluation: Evaluation | None = None) -> RandomPlay | None:
    """Look up the score of random play: measured by the plan in a run's `recipe`, or known to an `evaluation`.

    None if neither has it.
    """
    plan = recipe.get("plan")
    measured = plan.get("measured") if isinstance(plan, Mapping) else None
    if isinstance(measured, Mapping) and (mean := number(measured.get("return_mean"))) is not None:
        error, episodes = number(measured.get("return_error")), number(measured.get("episodes"))
        return RandomPlay(return_mean=mean, return_error=error or 0.0, episodes=int(episodes or 0))
    known = evaluation.known.get("random") if evaluation is not None else None
    exact = number(known.get("return")) if isinstance(known, Mapping) else None
    return None if exact is None else RandomPlay(return_mean=exact)


def compare(evaluation: Evaluation, random: RandomPlay) -> str:
    """Compare the interval of a return with random play: "below", "equal" if they overlap, or "" if it is above."""
    score = evaluation.score()
    if score is None:
        return ""
    low = score.value if score.low is None else score.low
    high = score.value if score.high is None else score.high
    margin = _ERRORS * random.return_error
    if high < random.return_mean - margin:
        return "below"
    return "equal" if low <= random.return_mean + margin else ""
