"""An index that is damaged, or that another version left: the answers are those of the segments."""

from __future__ import annotations

import os
from pathlib import Path

import duckdb
import numpy as np
import pytest

from pipelines.events import Notice
from pipelines.lake.sql import catalog
from pipelines.lake.sql.selection import select
from pipelines.lake.store import Lake
from tests.lake.factories import fill
from tests.tiers import trials

EVERYTHING = "select * from trajectories order by uid"


@pytest.mark.system
@pytest.mark.trials
@pytest.mark.parametrize("how", ["flipped", "cut"])
def test_a_damaged_index_never_answers_wrong(lake: Lake, how: str) -> None:
    fill(lake, [3, 4, 5, 6], seal_every=2)
    expected, chosen = catalog.query(lake, EVERYTHING), select(lake, "length > 4").uids.tolist()
    index = lake.path / "index.duckdb"
    content, rng = index.read_bytes(), np.random.default_rng(0)
    for trial in range(trials(60, quick=4)):
        data = bytearray(content)
        if how == "cut":
            del data[int(rng.integers(len(data))) :]
        else:
            for place in rng.integers(len(data), size=1 + trial % 3).tolist():
                data[place] ^= 1 << int(rng.integers(8))
        index.write_bytes(data)
        index.with_suffix(".duckdb.wal").unlink(missing_ok=True)
        assert catalog.query(lake, EVERYTHING) == expected
        if trial % 20 == 0:
            index.write_bytes(data)
            assert select(lake, "length > 4").uids.tolist() == chosen


@pytest.mark.system
def test_a_newer_index_is_left_as_it_is(lake: Lake) -> None:
    fill(lake, [3, 4])
    expected, index = catalog.query(lake, EVERYTHING), lake.path / "index.duckdb"
    with duckdb.connect(str(index)) as connection:
        connection.execute("update bookkeeping.about set version = 99")
    content, told = index.read_bytes(), []
    assert catalog.query(lake, EVERYTHING, listener=told.append) == expected
    assert any(isinstance(event, Notice) and "upgrade amago" in event.text for event in told)
    assert index.read_bytes() == content
    catalog.rebuild(lake)
    assert catalog.query(lake, EVERYTHING) == expected
    assert index.read_bytes() != content


@pytest.mark.system
def test_a_strangers_file_in_place_of_the_index_is_replaced(lake: Lake, tmp_path: Path) -> None:
    fill(lake, [3, 4])
    expected, index = catalog.query(lake, EVERYTHING), lake.path / "index.duckdb"
    for content in (b"", b"x", os.urandom(5000)):
        index.write_bytes(content)
        assert catalog.query(lake, EVERYTHING) == expected
