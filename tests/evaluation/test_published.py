"""Figures that papers report, against numbers worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from pipelines.envs.env import Score
from pipelines.envs.make import make
from pipelines.envs.suites.reference_scores import ATARI, PROCGEN
from pipelines.evaluation.adaptation import compute_metrics, score_achievements
from pipelines.evaluation.runner import EpisodeResults
from pipelines.stages.evaluation_tables import tables


def results(returns, tasks, **of_spec):
    achieved = of_spec.pop("achieved", None)
    return EpisodeResults(
        spec=replace(make("tmaze", num_envs=1, seed=0).spec, **of_spec),
        returns=np.array(returns, dtype=float),
        lengths=np.full(len(returns), 9),
        success=None,
        attempts=None,
        tasks=tuple(tasks),
        seconds=1.0,
        achieved=achieved,
    )


def test_human_normalised_score_is_a_mean_over_games():
    score = Score(name="human_normalized", bounds={"pong": (-20.0, 20.0), "breakout": (0.0, 10.0), "qbert": (0.0, 1.0)})
    found = compute_metrics(results([20, 0, 5, 5], ["pong", "pong", "breakout", "breakout"], score=score))
    assert found["human_normalized_mean"] == pytest.approx((0.75 + 0.5) / 2)
    assert found["human_normalized_median"] == pytest.approx((0.75 + 0.5) / 2)
    low, high = found["human_normalized_ci95"]
    assert low == pytest.approx((0.5 + 0.5) / 2)  # breakout never varies
    assert high == pytest.approx((1.0 + 0.5) / 2)


def test_games_are_named_before_the_slash_of_a_task():
    score = Score(name="procgen_normalized", bounds={"maze": (5.0, 10.0)})
    found = compute_metrics(results([10, 5], ["maze/3", "maze/4"], score=score))
    assert found["procgen_normalized_mean"] == 0.5


def test_a_game_without_bounds_leaves_the_score_out():
    score = Score(name="human_normalized", bounds={"pong": (-20.0, 20.0)})
    found = compute_metrics(results([1, 1], ["pong", "et"], score=score))
    assert not [key for key in found if key.startswith("human_normalized")]


def test_twentieth_percentile_is_over_the_tasks_means():
    found = compute_metrics(results([0, 2, 2, 2, 4, 4, 6, 6, 8, 8], [*"aabbccddee"]))
    assert found["return_p20"] == pytest.approx(np.percentile([1, 2, 4, 6, 8], 20))


def test_achievements_and_their_geometric_mean():
    achieved = np.array([[True, False], [True, True], [True, False], [True, False]])
    found = json.loads(
        json.dumps(compute_metrics(results([0] * 4, "abcd", achievements=("wake_up", "eat"), achieved=achieved)))
    )
    assert found["achievements"] == {"wake_up": 1.0, "eat": 0.25}
    assert found["achievement_score"] == pytest.approx(np.exp((np.log(101) + np.log(26)) / 2) - 1)
    assert score_achievements(np.zeros(22)) == 0.0


def test_the_result_shows_published_scores():
    score = Score(name="human_normalized", bounds={"pong": (-20.0, 20.0)})
    report = {
        "update": 1,
        "env": {"name": "x"},
        "settings": {"split": "test", "greedy": False},
        "metrics": compute_metrics(results([0.0], ["pong"], score=score)),
    }
    assert ["human normalized over pong", 0.5, 0.5, 0.5] in tables(report)[0].rows


def test_bounds_are_those_of_all_games():
    assert len(ATARI) == 57
    assert PROCGEN["easy"].keys() == PROCGEN["hard"].keys()
    assert len(PROCGEN["easy"]) == 16
    for bounds in (ATARI, *PROCGEN.values()):
        assert all(low < high for low, high in bounds.values())
