"""The adaptation table, on attempts written by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pipelines.envs.make import make
from pipelines.evaluation.adaptation import Adaptation, compute_metrics, make_example
from pipelines.evaluation.runner import EpisodeResults, evaluate
from pipelines.rollout.policies import RandomPolicy


def results(attempts, tasks=None, has_success=True):
    attempts = np.array(attempts, dtype=bool)
    count = len(attempts)
    return EpisodeResults(
        spec=make("tmaze", num_envs=1, seed=0).spec,
        returns=attempts.sum(axis=1).astype(float),
        lengths=np.full(count, 9),
        success=attempts[:, -1] if has_success else None,
        attempts=attempts if has_success else None,
        attempt_returns=3.0 * attempts if attempts.shape[1] > 1 else None,
        tasks=tuple(tasks or ["a"] * count),
        seconds=1.0,
    )


def test_means_gap_and_pairing():
    curve = Adaptation.compute(np.array([[0, 1, 1], [0, 0, 1], [1, 0, 1], [0, 1, 1]], dtype=bool))
    assert curve.mean.tolist() == [0.25, 0.5, 1.0]
    assert curve.gap == 0.75
    assert curve.gap_ci95[0] <= 0.75 <= curve.gap_ci95[1]
    assert (curve.low <= curve.mean).all()
    assert (curve.high >= curve.mean).all()


def test_intervals_apart():
    rng = np.random.default_rng(0)
    better = np.stack([rng.random(500) < 0.3, rng.random(500) < 0.8], axis=1)
    assert Adaptation.compute(better).apart
    assert not Adaptation.compute(better[:, ::-1]).apart
    assert not Adaptation.compute(np.stack([better[:, 0], rng.random(500) < 0.32], axis=1)).apart


def test_metrics_are_plain_data_with_the_fields_scripts_rely_on():
    found = json.loads(
        json.dumps(compute_metrics(results([[0, 1], [1, 1], [0, 0], [0, 1]], tasks=["a", "b", "a", "b"])))
    )
    assert found["episodes"] == 4
    assert found["return_mean"] == 1.0
    assert len(found["return_ci95"]) == 2
    assert found["success_mean"] == 0.75
    assert [entry["success_mean"] for entry in found["per_attempt"]] == [0.25, 0.75]
    assert [entry["return_mean"] for entry in found["per_attempt"]] == [0.75, 2.25]
    assert found["per_attempt"][0]["return_ci95"][0] <= 0.75 <= found["per_attempt"][0]["return_ci95"][1]
    assert (found["adaptation_gap"], found["return_adaptation_gap"]) == (0.5, 1.5)
    assert found["per_task"]["b"] == {"episodes": 2, "return_mean": 1.5, "success_mean": 1.0}


def test_success_is_absent_where_the_task_has_none():
    found = compute_metrics(results([[0], [1]], has_success=False))
    assert "success_mean" not in found
    assert found["per_attempt"] == []


def test_return_by_attempt_is_there_without_success():
    found = compute_metrics(results([[0, 1], [1, 1]], has_success=False))
    assert found["per_attempt"] == [
        {"attempt": 1, "return_mean": 1.5, "return_ci95": [0.0, 3.0]},
        {"attempt": 2, "return_mean": 3.0, "return_ci95": [3.0, 3.0]},
    ]
    assert "adaptation_gap" not in found
    assert found["return_adaptation_gap"] == 1.5


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("tmaze", {}),
        ("meta-frozen-lake", {"attempts": 3}),
        ("dark-key-door", {}),
        ("gym:Pendulum-v1", {"attempts": 2}),
        ("gym:CartPole-v1", {}),
    ],
)
def test_an_example_has_the_names_of_what_will_be_found(name, params):
    env = make(name, num_envs=2, seed=0, params=params)
    found = compute_metrics(evaluate(env, RandomPolicy(env.spec.spaces.action, seed=0), episodes=2))
    known = make_example(env.spec)
    assert known.keys() == found.keys()
    assert len(known["per_attempt"]) >= len(found["per_attempt"])
    for entry in found["per_attempt"]:
        assert known["per_attempt"][0].keys() == entry.keys()


def test_tasks_that_never_repeat_are_not_listed():
    assert compute_metrics(results([[0], [1]], tasks=["a", "b"]))["per_task"] == {}


def test_a_single_episode():
    assert compute_metrics(results([[1]]))["return_ci95"] == [pytest.approx(1.0)] * 2
