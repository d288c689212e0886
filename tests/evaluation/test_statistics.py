"""Bootstrap intervals: against theory, reproducible, and joint over the columns of an episode."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.evaluation.statistics import bootstrap_ci, bootstrap_ci_columns, bootstrap_ci_of_iqm, compute_iqm


def test_width_agrees_with_the_normal_approximation():
    values = np.random.default_rng(0).normal(3, 2, 400)
    low, high = bootstrap_ci(values)
    half = 1.96 * values.std() / np.sqrt(400)
    assert low == pytest.approx(values.mean() - half, abs=0.03)
    assert high == pytest.approx(values.mean() + half, abs=0.03)


def test_covers_the_true_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = [
        low <= 0.3 <= high for low, high in (bootstrap_ci(rng.random(200) < 0.3, resamples=500) for _ in range(300))
    ]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.04)


def test_the_same_seed_gives_the_same_interval_in_one_chunk_or_many(monkeypatch):
    values = np.random.default_rng(0).random((300, 2))
    whole = bootstrap_ci_columns(values, resamples=200)
    np.testing.assert_array_equal(whole, bootstrap_ci_columns(values, resamples=200))
    monkeypatch.setattr("pipelines.evaluation.statistics._CHUNK", 1000)
    np.testing.assert_allclose(bootstrap_ci_columns(values, resamples=200), whole)
    assert not np.array_equal(bootstrap_ci_columns(values, resamples=200, seed=1), whole)


def test_constant_and_single_values_have_no_width():
    assert bootstrap_ci(np.ones(20)) == (1.0, 1.0)
    assert bootstrap_ci(np.array([2.5])) == (2.5, 2.5)


def test_no_value_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_ci(np.array([]))


def test_the_interquartile_mean_leaves_out_a_quarter_at_either_end():
    assert compute_iqm(np.array([7.0, 0, 6, 1, 5, 2, 4, 3])) == 3.5  # of 2 3 4 5
    assert compute_iqm(np.array([-100.0, 1, 2, 3, 100])) == 2  # of 1 2 3
    assert compute_iqm(np.array([1.0, 2, 6])) == 3  # of all three


def test_values_are_drawn_within_their_stratum():
    zeros, ones = np.zeros(4), np.ones(4)
    assert bootstrap_ci_of_iqm([zeros, ones]) == (0.5, 0.5)  # always four of each
    assert bootstrap_ci_of_iqm([np.concatenate([zeros, ones])])[1] > 0.5


def test_the_stratified_interval_is_that_of_all_resamples():
    # Two values give means 0, 1/2, 1 with 1/4, 1/2, 1/4; a quarter of four is left out at either end: of 0 0 x y only
    # 0 and x count, so that the highest mean of two zeros beside two values is 1/2.
    assert bootstrap_ci_of_iqm([np.array([0.0, 1.0])]) == (0.0, 1.0)
    assert bootstrap_ci_of_iqm([np.zeros(2), np.array([0.0, 1.0])]) == (0.0, 0.5)
    assert bootstrap_ci_of_iqm([np.zeros(2), np.array([0.0, 1.0])], level=0.4) == (0.0, 0.0)


def test_a_stratum_without_values_is_an_error():
    for strata in ([], [np.ones(2), np.array([])]):
        with pytest.raises(ValueError, match="at least one"):
            bootstrap_ci_of_iqm(strata)
