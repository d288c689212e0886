from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.errors import IntegrityError
from pipelines.lake.schema import Column
from pipelines.lake.segment import MOST_BYTES, BlobCache, BlobFile
from tests.tiers import examples

WIDE = Column(name="obs.image", dtype="uint8", shape=(64, 64, 3), role="observation")
FLOATS = Column(name="obs.scan", dtype="float32", shape=(700,), role="observation")


def values(columns: list[Column], rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {c.name: rng.integers(0, 200, (rows, *c.shape)).astype(c.dtype) for c in columns}


def written(path: Path, columns: list[Column], rows: int, cache: BlobCache | None = None) -> BlobFile:
    with path.open("wb") as file:
        BlobFile.write(file, columns, values(columns, rows))
    return BlobFile(path, columns, rows, scattered=True, cache=cache)


def rows_of(file: BlobFile, column: Column, start: int, stop: int) -> np.ndarray:
    out = np.empty((stop - start, *column.shape), column.dtype)
    file.copy_rows(column.name, start, stop, out)
    return out


@examples(40)
@given(
    rows=st.integers(1, 90),
    columns=st.sampled_from([[WIDE], [FLOATS], [WIDE, FLOATS]]),
    cache=st.sampled_from([1, 300_000, 1 << 30]),
    data=st.data(),
)
def test_any_range_is_what_was_written(tmp_path_factory, rows: int, columns: list[Column], cache: int, data) -> None:
    file = written(tmp_path_factory.mktemp("blob") / "x", columns, rows, BlobCache(limit_bytes=cache))
    truth = values(columns, rows)
    for _ in range(6):
        start = data.draw(st.integers(0, rows - 1))
        stop = data.draw(st.integers(start, rows))
        column = data.draw(st.sampled_from(columns))
        np.testing.assert_array_equal(rows_of(file, column, start, stop), truth[column.name][start:stop])


@pytest.mark.system
@pytest.mark.parametrize(
    ("shape", "rows"), [((64, 64, 3), 21), ((84, 84, 4), 9), ((1024,), 32), ((400, 400, 3), 1)], ids=str
)
def test_rows_are_compressed_together_as_long_as_they_are_small(tmp_path: Path, shape: tuple, rows: int) -> None:
    column = Column(name="obs", dtype="uint8", shape=shape, role="observation")
    assert written(tmp_path / "x", [column], 40).batch_rows == rows
    assert rows == 1 or rows * column.step_bytes <= MOST_BYTES


def test_a_file_of_another_segment_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "x", [WIDE], 30)
    for columns, rows in (([WIDE], 60), ([FLOATS], 30), ([WIDE, FLOATS], 30)):
        with pytest.raises(IntegrityError, match="another segment"):
            BlobFile(tmp_path / "x", columns, rows, scattered=True, cache=None)
    with pytest.raises(IntegrityError, match="rows"):
        rows_of(BlobFile(tmp_path / "x", [WIDE], 31, scattered=True, cache=None), WIDE, 25, 31)


def test_the_cache_keeps_what_was_used_last_within_its_bytes() -> None:
    decoded: list[int] = []

    def batch(number: int):
        def decode():
            decoded.append(number)
            return np.full(10, number, np.uint8)

        return cache.get((Path("f"), "x", number), decode)[0]

    cache = BlobCache(limit_bytes=25)
    assert [batch(n) for n in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert decoded == [1, 2, 3, 2]  # 3 pushed 2 out, not 1


def test_one_batch_larger_than_the_cache_is_still_given() -> None:
    cache = BlobCache(limit_bytes=1)
    assert cache.get((Path("f"), "x", 0), lambda: np.zeros(100)).size == 100
