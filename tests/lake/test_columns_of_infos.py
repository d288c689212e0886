"""Trajectories that are described and logged together say what each would say alone."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from pipelines.lake.trajectory import Infos, TrajectoryInfo
from pipelines.lake.wal import Log

VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.booleans())
VALUES |= st.dictionaries(st.text(), st.text(), max_size=2)
ARRAYS = npst.arrays(st.sampled_from(["<i8", "<f8", "?", "<u4"]), 5)


@pytest.mark.system
@given(
    st.lists(VALUES, min_size=5, max_size=5), ARRAYS, st.dictionaries(st.text(), VALUES, max_size=3), st.integers(1, 5)
)
def test_rows_that_are_logged_together_are_read_one_by_one(tmp_path_factory, values, array, shared, n):
    folder = tmp_path_factory.mktemp("log")
    each = {'na"me %s': values[:n], "array": array[:n]}
    shared = {key: value for key, value in shared.items() if key not in {*each, "crc"}}
    log = Log.create(folder / "a.wal", {}, tmp=folder)
    crc = zlib.crc32(b"ab")
    log.append(shared, each | {"crc": [crc] * n}, [b"ab"] * n)
    rows = [shared | {'na"me %s': values[i], "array": array[i].item(), "crc": crc} for i in range(n)]
    assert repr([row for row, _ in log.read().records]) == repr(rows)  # which tells 1.0, True, -0.0 and nan apart
    log.drop()


@pytest.mark.parametrize("values", [np.array([0.5, -0.0, np.nan]), np.array([-(2.0**63), np.inf, 0.1])])
def test_arrays_are_logged_as_they_are(tmp_path, values):
    log = Log.create(tmp_path / "a.wal", {}, tmp=tmp_path)
    whole = np.array([-(2**63), 2**63 - 1, 0])
    log.append({}, {"a": values, "b": whole, "crc": [0] * 3}, [b""] * 3)
    expected = [{"a": a, "b": b, "crc": 0} for a, b in zip(values.tolist(), whole.tolist(), strict=True)]
    assert repr([row for row, _ in log.read().records]) == repr(expected)
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
