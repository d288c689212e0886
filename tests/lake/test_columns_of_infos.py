"""Trajectories that are described and logged together say what each would say alone."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from pipelines.lake.trajectory import Infos, TrajectoryInfo
from pipelines.lake.wal import Log

VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.lists(st.booleans())
VALUES |= st.dictionaries(st.text(), st.text(), max_size=2)
ARRAYS = npst.arrays(st.sampled_from(["<i8", "<f8", "?", "<u4"]), 5, elements={"allow_nan": False})


@given(
    st.lists(VALUES, min_size=5, max_size=5), ARRAYS, st.dictionaries(st.text(), VALUES, max_size=3), st.integers(1, 5)
)
def test_rows_that_are_logged_together_are_read_one_by_one(tmp_path_factory, values, array, shared, n):
    folder = tmp_path_factory.mktemp("log")
    each = {"values": values[:n], "array": array[:n]}
    shared = {key: value for key, value in shared.items() if key not in each}
    log = Log.create(folder / "a.wal", {}, tmp=folder)
    log.append(shared, each, [b"ab"] * n, [zlib.crc32(b"ab")] * n)
    rows = [shared | {"values": values[i], "array": array[i].item()} for i in range(n)]
    found = log.read().records
    assert [row for row, _ in found] == json.loads(json.dumps(rows)) == rows
    assert [[type(value) for value in row.values()] for row, _ in found] == [[*map(type, row.values())] for row in rows]
    log.drop()


def test_infos_by_columns_are_those_of_a_list():
    listed = [TrajectoryInfo(env="e", task=f"a, b{i}", seed=i, tags={"k": str(i)}, success=i > 0) for i in range(3)]
    columns = Infos(
        TrajectoryInfo(env="e"), {n: [getattr(x, n) for x in listed] for n in ("task", "seed", "tags", "success")}
    )
    assert list(columns) == listed == list(Infos.of(listed))
    assert list(columns[1:]) == listed[1:]
    arrays = Infos(TrajectoryInfo(env="e"), {"epsilon": np.array([0.1, -0.0]), "task": ["a", "b"]})
    assert [type(info.epsilon) for info in arrays] == [float, float]
    assert list(arrays) == [TrajectoryInfo(env="e", epsilon=0.1, task="a"), TrajectoryInfo(env="e", task="b")]
    with pytest.raises(ValueError, match="given together"):
        Infos(listed[0], {"task": ["a"], "seed": [1, 2]})
