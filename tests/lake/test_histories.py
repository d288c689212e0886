"""Which history an episode belongs to stays with it through whatever happens to a lake."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.maintenance.copying import copy
from pipelines.lake.reading import Reader
from pipelines.lake.sql.catalog import query, rebuild
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from tests.lake.factories import SCHEMA, columns, derive
from tests.lake.histories import fill_histories

LENGTHS = {"c/0/left": [3, 5, 2], "c/1/right": [4, 4], "": [6]}
PLACES = "select uid, history, history_index from trajectories where base_uid is null order by uid"


@pytest.mark.system
@pytest.mark.parametrize("pieces", [0, 2])
def test_rewriting_copying_and_indexing_keep_histories(tmp_path: Path, pieces: int) -> None:
    lake, other = Lake.create(tmp_path / "lake"), Lake.create(tmp_path / "other")
    written = fill_histories(lake, LENGTHS, pieces=pieces)
    expected = sorted((uid, info.history, info.history_index) for uid, (_, info) in written.items())
    assert query(lake, PLACES)[1] == expected
    compact(lake, grace_seconds=0.0)
    assert query(lake, PLACES)[1] == expected
    rebuild(lake)
    assert query(lake, PLACES)[1] == expected
    copy(lake, other)
    assert query(other, PLACES)[1] == expected
    reader = Reader(other)
    assert [(uid, (info := reader.read(uid).info).history, info.history_index) for uid, *_ in expected] == expected


def test_a_relabelled_version_belongs_to_the_history_of_its_original(lake: Lake) -> None:
    written = fill_histories(lake, LENGTHS)
    derive(lake, {uid: {"reward": values["reward"] + 1} for uid, (values, _) in written.items()})
    text = "select base_uid, history, history_index from trajectories where base_uid is not null order by base_uid"
    assert query(lake, text)[1] == query(lake, PLACES)[1]
    assert [row[:3] for row in query(lake, "from histories order by history")[1]] == [
        ("c/0/left", "of c/0/left", 3),
        ("c/1/right", "of c/1/right", 2),
    ]


@pytest.mark.parametrize("pieces", [0, 2])
def test_histories_are_listed_with_their_first_and_last_return(lake: Lake, pieces: int) -> None:
    """Episodes that a collector's end cut short, and those of which a piece is missing, do not count."""
    written = fill_histories(lake, LENGTHS, pieces=pieces)
    returns: dict[tuple[str | None, int | None], float] = {}
    for values, info in written.values():
        place = info.history, info.history_index
        returns[place] = returns.get(place, 0.0) + float(values["reward"][1:].sum(dtype=np.float64))
    rng = np.random.default_rng(9)
    with lake.writer(SCHEMA) as writer:
        short = {"history": "c/1/right", "task": "of c/1/right"}
        writer.append(columns(rng, 3), TrajectoryInfo(**short, history_index=2, tags={"unfinished": "true"}))
        writer.append(columns(rng, 3), TrajectoryInfo(**short, history_index=3, episode="e", continues=True))
    found = query(lake, "from histories order by history")[1]
    assert [row[:3] for row in found] == [("c/0/left", "of c/0/left", 3), ("c/1/right", "of c/1/right", 2)]
    ends = [(returns[name, 0], returns[name, count - 1]) for name, _, count, *_ in found]
    np.testing.assert_allclose([row[3:] for row in found], ends, rtol=1e-6)


@pytest.mark.parametrize(
    "facts", [{"history": 3, "history_index": 0}, {"history": "h", "history_index": "0"}, {"history_index": 2**63}]
)
def test_other_types_are_refused(lake: Lake, facts: dict) -> None:
    with lake.writer(SCHEMA) as writer, pytest.raises(ValueError, match="'history"):
        writer.append(columns(np.random.default_rng(0), 3), TrajectoryInfo(**facts))
