import numpy as np
import pytest

from pipelines.files.memory import copy_blocks


@pytest.mark.parametrize(("dtype", "shape"), [("u1", ()), ("f4", (3,)), ("i8", ()), ("f8", (2, 5)), ("u1", (0,))])
def test_blocks_are_slices_of_many_arrays(dtype, shape):
    rng = np.random.default_rng(0)
    sources = [rng.integers(0, 100, (20, *shape)).astype(dtype) for _ in range(30)]
    target = np.full((50, 7, *shape), 101, dtype=dtype)
    expected = target.copy()
    place_N, source_N, first_N = rng.permutation(50)[:40], rng.integers(0, 30, 40), rng.integers(0, 14, 40)
    for place, source, first in zip(place_N, source_N, first_N, strict=True):
        expected[place] = sources[source][first : first + 7]
    begin_N = np.array([source.ctypes.data for source in sources])[source_N]
    copy_blocks(begin_N + first_N * sources[0].strides[0], target, place_N)
    np.testing.assert_array_equal(target, expected)


def test_no_block_changes_nothing():
    target = np.ones((2, 3))
    copy_blocks(np.zeros(0, dtype=np.int64), target, np.zeros(0, dtype=np.int64))
    assert (target == 1).all()
