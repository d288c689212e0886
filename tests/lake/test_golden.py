"""The format of a lake, by lakes in this repository and by a reader that shares no code with ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipelines.errors import InputMissing
from pipelines.lake.live import LiveTable
from pipelines.lake.log import read_log
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.maintenance.verify import verify
from pipelines.lake.manifest import Manifests
from pipelines.lake.reading import Reader
from pipelines.lake.sql import catalog
from pipelines.lake.store import Lake
from tests.lake import outsider
from tests.lake.factories import derive, fill, flip_a_bit, quarantine
from tests.lake.golden import EXPECTED, LAKES, NUMBERS
from tests.tiers import some


@pytest.fixture(params=NUMBERS)
def number(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture
def golden(number: int, tmp_path: Path) -> Lake:
    return Lake(shutil.copytree(LAKES / str(number) / "lake", tmp_path / "lake"))


def test_golden_lake_has_its_content(golden: Lake, number: int) -> None:
    expected, reader = json.loads((LAKES / str(number) / EXPECTED).read_text()), Reader(golden)
    assert sorted(reader.uids()) == sorted(expected)
    for uid, sums in expected.items():
        values = reader.read(uid).columns
        assert len(values["reward"]) == sums.pop("rows")
        assert {name: float(np.asarray(array, float).sum()) for name, array in values.items()} == pytest.approx(sums)
    assert outsider.count(golden.path).keys() == expected.keys()
    assert catalog.query(golden, "select uid from trajectories order by uid")[1] == [(uid,) for uid in sorted(expected)]
    log = read_log(golden.storage)
    assert (len(log.quarantined), len(log.whole), len(log.dead), [*log.protected]) == (1, 1, 1, ["run@1"])
    assert log.steps == {"c": 7}


def test_golden_lake_has_a_history(golden: Lake) -> None:
    """Its second episode has expired; the first one has a relabelled version, which belongs to the history, too."""
    text = "select history, history_index, base_uid is null from trajectories where history is not null order by all"
    assert catalog.query(golden, text)[1] == [("c/0/t", 0, False), ("c/0/t", 0, True), ("c/0/t", 2, True)]
    [(history, task, episodes, first, last)] = catalog.query(golden, "from histories")[1]
    assert (history, task, episodes) == ("c/0/t", "t", 2)
    text = "select \"return\" from trajectories where history = 'c/0/t' and base_uid is null order by history_index"
    assert [(first,), (last,)] == catalog.query(golden, text)[1]


@pytest.mark.parametrize("number", NUMBERS[1:], indirect=True)
def test_golden_lake_has_manifests_that_agree_with_its_footers(golden: Lake) -> None:
    manifests = Manifests(golden.storage, golden.id)
    manifests.load()
    live = LiveTable(golden)
    live.refresh()
    listed = [segment.file for segment in live.segments if manifests.names(segment.file)]
    assert len(listed) == len({segment.file for segment in live.segments}) == 4
    shutil.rmtree(golden.path / "manifests")
    again = LiveTable(golden)
    again.refresh()
    for one, other in zip(live.segments, again.segments, strict=True):
        for name in ("uids", "row0", "length", "first_step", "episode", "bases"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("number", NUMBERS[1:], indirect=True)
def test_golden_lake_has_pieces_wide_columns_and_an_added_column(golden: Lake) -> None:
    text = "select chunks, length, complete from episodes where episode = 'e'"
    assert catalog.query(golden, text)[1] == [(2, 7, True)]
    assert len(list((golden.path / "segments").glob("*/*.blob.arrow"))) >= 2
    assert [len(spaces.observation) for spaces in golden.list_spaces()].count(4) == 1
    text = 'select count(*), sum("obs.wind"[1]), sum("obs.place"[1]) from steps where "obs.wind" is not null'
    [(rows, wind, place)] = catalog.query(golden, text)[1]
    text = """select sum("obs.place"[1]), count(*) from steps where uid =
        (select base_uid from trajectories where relabel_method like 'column:%')"""
    assert catalog.query(golden, text)[1] == [(place, rows)]
    assert (rows, wind) == (4, 2.0)


def test_golden_lake_can_be_maintained(golden: Lake) -> None:
    before = Reader(golden).uids()
    assert len(verify(golden).corrupt) == 1
    compact(golden, grace_seconds=0.0)
    assert sorted(Reader(golden).uids()) == sorted(before)
    fill(golden, [4], schema=golden.only_schema())
    assert len(Reader(golden).uids()) == len(before) + 1


@pytest.mark.parametrize("version", [1, 2, 3])
def test_earlier_format_is_refused(golden: Lake, version: int) -> None:
    header = golden.path / "lake.json"
    header.write_text(json.dumps(json.loads(header.read_text()) | {"version": version}))
    with pytest.raises(InputMissing, match="earlier version of amago"):
        Lake(golden.path)


@pytest.mark.system
@pytest.mark.parametrize("seed", some(range(4), 0))
def test_outsider_counts_the_same_trajectories(lake: Lake, seed: int) -> None:
    """After each of many changes, by docs/architecture.md alone: pyarrow and JSON."""
    rng = np.random.default_rng(seed)
    for change in ["fill", *rng.permutation(["fill", "derive", "compact", "expire", "quarantine", "release"] * 4)]:
        uids, log = Reader(lake).uids(), read_log(lake.storage)
        grace = float(rng.choice([0, 1e9]))
        if change == "fill":
            fill(lake, rng.integers(1, 9, 6).tolist(), seed=int(rng.integers(1 << 30)), seal_every=2)
        elif change == "derive" and uids:
            bases = [uid for uid in uids if Reader(lake).row(uid)["base_uid"] is None]
            derive(lake, {uid: {"reward": Reader(lake).read(uid).columns["reward"] + 1} for uid in bases[:2]})
        elif change == "compact":
            compact(lake, grace_seconds=grace)
        elif change == "expire":
            expire(lake, RetentionLimits(max_trajectories=max(1, len(uids) - 3)), grace_seconds=grace)
        elif change == "quarantine" and uids:
            segment, _ = Reader(lake).locate(uids[int(rng.integers(len(uids)))])
            quarantine(lake, segment.file)
        elif change == "release" and log.quarantined:
            quarantine(lake, next(iter(log.quarantined)), None)
        reader = Reader(lake)
        expected = {uid: len(reader.read(uid).columns["reward"]) for uid in reader.uids()}
        assert outsider.count(lake.path) == expected, change
        (found,) = catalog.query(lake, "select count(*), coalesce(sum(length + 1), 0)::bigint from trajectories")[1]
        assert found == (len(expected), sum(expected.values())), change


def test_outsider_does_not_count_damaged_segments(lake: Lake) -> None:
    written = fill(lake, [5, 6], seal_every=1)
    flip_a_bit(lake, written[next(iter(written))]["obs.state"])
    verify(lake)
    assert outsider.count(lake.path) == {list(written)[1]: 7}
