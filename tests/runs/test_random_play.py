"""The score of random play, and what it says of a run's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelines.runs.evaluations import Evaluation, RandomPlay, Standard


def evaluation(mean: float, low: float | None = None, high: float | None = None, **known: Any) -> Evaluation:
    metrics: dict[str, Any] = {"return_mean": mean}
    if low is not None:
        metrics["return_ci95"] = [low, high]
    return Evaluation(
        path=Path("x"),
        series="",
        update=1,
        time=None,
        env="tmaze",
        split="test",
        label="",
        standard=Standard(env="{}", split="test"),
        settings={},
        metrics=metrics,
        known=known,
    )


@pytest.mark.parametrize(
    ("mean", "low", "high", "said"),
    [
        (-500, -500, -500, "below"),
        (-495, -500, -489, "equal"),
        (-491, -500, -480, "equal"),
        (-488, -490, -480, "equal"),
        (-300, -350, -250, ""),
        (-100, None, None, ""),
        (-600, None, None, "below"),
    ],
)
def test_a_score_is_above_random_play_only_by_more_than_both_errors(mean, low, high, said: str) -> None:
    assert RandomPlay(return_mean=-491.0, return_error=1.0, episodes=24).compare(evaluation(mean, low, high)) == said


def test_measured_random_play_takes_precedence_over_known_scores() -> None:
    exact = evaluation(1.0, random={"return": 0.25})
    measured = {"plan": {"measured": {"return_mean": 0.3, "return_error": 0.1, "episodes": 64}}}
    assert RandomPlay.find(measured, exact) == RandomPlay(return_mean=0.3, return_error=0.1, episodes=64)
    assert RandomPlay.find({}, exact) == RandomPlay(return_mean=0.25)
    assert RandomPlay.find({}) is None


@pytest.mark.parametrize(
    "recipe",
    [
        {"plan": 7},
        {"plan": {"measured": []}},
        {"plan": {"measured": {"return_mean": "high"}}},
        {"plan": {"measured": {"return_mean": float("nan")}}},
        {"plan": {"measured": {"return_mean": True}}},
    ],
)
def test_a_damaged_record_gives_no_random_play(recipe: dict) -> None:
    assert RandomPlay.find(recipe) is None
