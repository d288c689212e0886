import numpy as np
import pytest

from pipelines.files.memory import copy_rows


@pytest.mark.parametrize(("dtype", "shape"), [("u1", ()), ("f4", (3,)), ("i8", ()), ("f8", (2, 5)), ("u1", (0,))])
@pytest.mark.parametrize("longest", [1, 4, 9, 90])
def test_ranges_are_slices_of_many_arrays(dtype, shape, longest):
    rng = np.random.default_rng(longest)
    sources = [rng.integers(0, 100, (100, *shape)).astype(dtype) for _ in range(30)]
    target = np.full((40 * (longest + 1), *shape), 101, dtype=dtype)
    expected, other = target.copy(), np.zeros(len(target), dtype="i2")
    count_N, source_N = rng.integers(0, longest + 1, 40), rng.integers(0, 30, 40)
    start_N, row_N = rng.integers(0, 101 - count_N), (longest + 1) * rng.permutation(40)
    for row, source, start, count in zip(row_N, source_N, start_N, count_N, strict=True):
        expected[row : row + count] = sources[source][start : start + count]
    numbers = np.arange(100, dtype="i2")
    begin_N = np.array([source.ctypes.data for source in sources])[source_N]
    address_NC = np.stack([begin_N, np.full(40, numbers.ctypes.data)], axis=1)
    copy_rows(address_NC, start_N, count_N, [target, other], row_N)
    np.testing.assert_array_equal(target, expected)
    assert other.sum() == sum(sum(range(a, a + n)) for a, n in zip(start_N.tolist(), count_N.tolist(), strict=True))


def test_no_range_changes_nothing():
    target, none = np.ones((2, 3)), np.zeros(0, dtype=np.int64)
    copy_rows(np.zeros((0, 1), dtype=np.int64), none, none, [target], none)
    assert (target == 1).all()


@pytest.mark.parametrize("row", [-1, 3])
def test_rows_outside_the_target_are_refused(row):
    source, target = np.ones(2), np.zeros(4)
    address = np.array([[source.ctypes.data]])
    with pytest.raises(IndexError, match="outside a target"):
        copy_rows(address, np.array([0]), np.array([2]), [target], np.array([row]))
    assert not target.any()
