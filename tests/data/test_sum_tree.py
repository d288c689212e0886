"""The tree of sums against a flat cumulative sum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.data.sum_tree import FAN, SumTree
from tests.tiers import examples

weights = st.lists(st.integers(0, 5), min_size=1, max_size=300)


@given(weights=weights, changes=st.lists(st.tuples(st.integers(0, 299), st.integers(0, 5)), max_size=40))
@examples(100)
def test_every_point_falls_where_a_cumulative_sum_says(weights: list[int], changes: list[tuple[int, int]]) -> None:
    values = np.array(weights, dtype=np.float64)
    tree = SumTree(values.copy())
    changed = {place % len(values): float(value) for place, value in changes}
    if changed:
        tree.set(np.array(list(changed)), np.array(list(changed.values())))
        values[list(changed)] = list(changed.values())
    np.testing.assert_array_equal(tree.weights, values)
    assert tree.total == values.sum()
    points = np.arange(0, values.sum(), 0.25)  # whole numbers add up exactly
    np.testing.assert_array_equal(tree.find(points), np.searchsorted(np.cumsum(values), points, side="right"))


@pytest.mark.parametrize("size", [1, FAN, FAN + 1, FAN**2, FAN**2 + 1, 300_000])
def test_a_changed_tree_is_one_built_anew(size: int) -> None:
    rng = np.random.default_rng(size)
    values = rng.random(size) * 10.0 ** rng.integers(-9, 3, size)
    values[rng.random(size) < 0.3] = 0
    tree = SumTree(values.copy())
    for _ in range(20):
        places = np.unique(rng.integers(0, size, 50))
        values[places] = rng.random(len(places)) * (rng.random(len(places)) < 0.7)
        tree.set(places, values[places])
    again = SumTree(values)
    assert tree.total == again.total
    points = rng.random(1000) * tree.total
    found = tree.find(points)
    np.testing.assert_array_equal(found, again.find(points))
    if tree.total:
        assert (values[found] > 0).all()
        assert (values[tree.find(np.array([tree.total, np.nextafter(tree.total, 0)]))] > 0).all()
