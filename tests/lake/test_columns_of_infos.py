"""Trajectories that are described and logged together say what each would say alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.lake.trajectory import Infos, TrajectoryInfo
from pipelines.lake.writer import _to_json

VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.booleans())
VALUES |= st.dictionaries(st.text(), st.text(), max_size=2)


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=5), st.dictionaries(st.text(), VALUES, max_size=3))
def test_rows_are_encoded_as_one_by_one(pairs, shared):
    each = {"uid": [a for a, _ in pairs], 'na"me %s': [b for _, b in pairs]}
    shared = {key: value for key, value in shared.items() if key not in each}
    rows = [json.dumps({"uid": a, 'na"me %s': b} | shared).encode() for a, b in pairs]
    assert _to_json(each, shared) == rows


@pytest.mark.parametrize(
    "kind", [st.booleans(), st.integers(), st.floats(), st.sampled_from([0.0, -0.0, 0.1]), st.text()]
)
@given(data=st.data())
def test_columns_of_one_kind_are_encoded_as_one_by_one(kind, data):
    column = data.draw(st.lists(kind, min_size=1, max_size=9))
    assert _to_json({"a": column}, {}) == [json.dumps({"a": value}).encode() for value in column]


def test_arrays_are_encoded_as_their_values():
    each = {"a": np.array([1, -(2**63)]), "b": np.array([True, False]), "c": np.array([-0.0, 0.1])}
    assert _to_json(each, {}) == [
        b'{"a": 1, "b": true, "c": -0.0}',
        b'{"a": -9223372036854775808, "b": false, "c": 0.1}',
    ]


def test_infos_by_columns_are_those_of_a_list():
    listed = [TrajectoryInfo(env="e", task=f"a, b{i}", seed=i, tags={"k": str(i)}, success=i > 0) for i in range(3)]
    columns = Infos(
        TrajectoryInfo(env="e"), {n: [getattr(x, n) for x in listed] for n in ("task", "seed", "tags", "success")}
    )
    assert list(columns) == listed == list(Infos.of(listed))
    assert list(columns[1:]) == listed[1:]
    with pytest.raises(ValueError, match="given together"):
        Infos(listed[0], {"task": ["a"], "seed": [1, 2]})
