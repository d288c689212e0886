"""Trajectories that are described and logged together say what each would say alone."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.lake.trajectory import Infos, TrajectoryInfo
from pipelines.lake.writer import _to_json

VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.lists(st.booleans())
VALUES |= st.dictionaries(st.text(), st.text(), max_size=2)


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=5), st.dictionaries(st.text(), VALUES, max_size=3))
def test_rows_are_encoded_as_one_by_one(pairs, shared):
    each = {"uid": [a for a, _ in pairs], 'na"me %s': [b for _, b in pairs]}
    shared = {key: value for key, value in shared.items() if key not in each}
    rows = [json.loads(text) for text in _to_json(each, shared)]
    assert rows == [{"uid": a, 'na"me %s': b} | shared for a, b in pairs]


def test_infos_by_columns_are_those_of_a_list():
    listed = [TrajectoryInfo(env="e", task=f"a, b{i}", seed=i, tags={"k": str(i)}, success=i > 0) for i in range(3)]
    columns = Infos(
        TrajectoryInfo(env="e"), {n: [getattr(x, n) for x in listed] for n in ("task", "seed", "tags", "success")}
    )
    assert list(columns) == listed == list(Infos.of(listed))
    assert list(columns[1:]) == listed[1:]
    with pytest.raises(ValueError, match="given together"):
        Infos(listed[0], {"task": ["a"], "seed": [1, 2]})
