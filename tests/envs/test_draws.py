"""Draws are uniform, and depend on what they are for alone."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.envs.draws import Draws


def test_uniform_and_uncorrelated():
    u = Draws(0, "train", "x").uniform(np.arange(500)[:, None], 0, np.arange(200))
    assert u.shape == (500, 200)
    assert u.mean() == pytest.approx(0.5, abs=0.01)
    np.testing.assert_allclose(np.histogram(u, bins=10, range=(0, 1))[0] / u.size, 0.1, atol=0.01)
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 0.02


def test_seed_split_scope_and_stream_each_matter():
    episodes = np.arange(8)
    same = Draws(0, "train", "x").uniform(episodes, 1)
    np.testing.assert_array_equal(same, Draws(0, "train", "x").uniform(episodes, 1))
    for other in (Draws(1, "train", "x"), Draws(0, "test", "x"), Draws(0, "train", "y")):
        assert not np.intersect1d(same, other.uniform(episodes, 1)).size
    assert not np.intersect1d(same, Draws(0, "train", "x").uniform(episodes, 2)).size


def test_permutations_are_uniform():
    orders = Draws(0, "train", "x").permutations(np.arange(6000), 0, 3)
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 6
    np.testing.assert_allclose(counts / 6000, 1 / 6, atol=0.02)


def test_integers_stay_below_their_bounds():
    found = Draws(0, "train", "x").integers(np.arange(2000), 0, 3)
    assert set(found.tolist()) == {0, 1, 2}
