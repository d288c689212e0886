"""Tables of JSON objects with odd values."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pipelines.lake.arrow import table_of_objects


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([1, 2**70], ["1", str(2**70)]),
        ([0.5, 10**400], ["0.5", str(10**400)]),
        (["a", "\ud800"], ["a", "\\ud800"]),
        ([{"a": 1}, None], ['{"a": 1}', None]),
        ([1, 2], [1, 2]),
        ([1, 0.5], [1.0, 0.5]),
    ],
)
def test_what_no_column_of_numbers_holds_becomes_text(values: list, shown: list) -> None:
    assert table_of_objects([{"x": value} for value in values], {})["x"].to_pylist() == shown
    if 0.5 not in values:
        assert table_of_objects([{"x": value} for value in values], {"x": pa.int64()})["x"].to_pylist() == shown
