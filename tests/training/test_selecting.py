"""Selecting only what is new, against selecting everything again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.config.settings import TrainSettings
from pipelines.data.mixture import Share
from pipelines.events import silent
from pipelines.lake.maintenance.compaction import CompactionRules, compact
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.sql.selection import select
from pipelines.lake.store import Lake
from pipelines.training.data import TrainingData, make_mixture
from tests.lake.factories import INFO, SCHEMA, columns, derive, fill
from tests.lake.pieces import split
from tests.stages.recipes import tiny
from tests.tiers import examples

ROW_WISE = [
    "length > 5 and success",
    "task in ('t0', 't1') or \"return\" < 0",
    "not success and policy_version between 0 and 1",
    "trajectories.length % 2 = 0 and base_uid is null",
    "coalesce(tags['note'], task) like 't%'",
    "case when success then length > 4 else contains(task, '2') end",
    "t_commit > 0 and substr(uid, 1, 1) < '8'",
    "attempts[1] is null and length::double / 2 > 2.5",
]
OTHERS = [
    "length > (select avg(length) from trajectories)",
    "epoch(now()) - t_commit < 1000",
    "random() < 2",
    "current_date > date '2020-01-01'",
    "segment like '2%'",
    "row0 >= 0",
    "exists (select 1 from segments)",
    "list_sum(attempts) is null",
    "age(to_timestamp(0)) is not null",
    "trajectories is not null",
    "vector_type(length) is not null",
    "stats(length) is not null",
]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def fill_pieces(lake: Lake, length: int) -> None:
    """Store an episode in pieces of 5 actions."""
    with lake.writer(SCHEMA, seal_seconds=1e9) as writer:
        for values, info in split(
            columns(np.random.default_rng(length), length), INFO, 5, episode=f"e{time.time_ns()}"
        ):
            writer.append(values, info)


@pytest.mark.parametrize("where", ROW_WISE + OTHERS)
@pytest.mark.system
def test_expressions_of_a_row_are_told_from_others(lake: Lake, where: str) -> None:
    fill(lake, [5])
    assert select(lake, where).by_row is (where in ROW_WISE)
    assert select(lake, "", f"({where})::int").by_row is (where in ROW_WISE)


@pytest.mark.system
def test_a_weight_over_all_trajectories_is_not_one_of_a_row(lake: Lake) -> None:
    fill(lake, [5, 6])
    assert select(lake, "", "1.0 / length").by_row
    assert not select(lake, "length > 2", "1.0 / count(*) over (partition by task)").by_row


@pytest.mark.system
def test_outcomes_of_pieces_depend_on_other_rows(lake: Lake) -> None:
    fill_pieces(lake, 10)
    assert not select(lake, '"return" > 0').by_row
    assert select(lake, "length > 2").by_row


ACTION = st.one_of(
    st.tuples(st.just("append"), st.lists(st.integers(2, 9), min_size=1, max_size=4)),
    st.tuples(st.just("derive"), st.integers(0, 99)),
    st.tuples(st.just("pieces"), st.integers(6, 12)),
    st.tuples(st.just("expire"), st.integers(0, 99)),
    st.tuples(st.just("compact"), st.sampled_from([0.0, 600.0])),
)


@pytest.mark.system
@examples(30)
@given(actions=st.lists(ACTION, min_size=2, max_size=8), where=st.sampled_from(ROW_WISE), weighted=st.booleans())
def test_selecting_what_is_new_equals_selecting_everything(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, Any]], where: str, weighted: bool
) -> None:
    lake = Lake.create(tmp_path_factory.mktemp("lakes") / "lake")
    fill(lake, [3, 8, 6], seal_every=2)
    weight = "length / 3 + coalesce(success, false)::int" if weighted else ""
    settings = tiny(train={"where": where, "weight": weight}).train
    mixture = make_mixture([(lake, Share())], SCHEMA, settings, seed=0, listener=lambda event: None)
    view = mixture.parts[0].view
    mixture.refresh(0)
    for number, (what, value) in enumerate(actions):
        uids = sorted(select(lake, "base_uid is null").uids.tolist())
        picked = uids[value % len(uids)].ljust(16, b"\0").hex() if what in ("derive", "expire") and uids else ""
        if what == "append":
            fill(lake, value, seed=number + 1, seal_every=2)
        elif what == "pieces":
            fill_pieces(lake, value)
        elif what == "derive" and picked:
            [(length,)] = lake.sql(f"select length from trajectories where uid = '{picked}'").rows
            derive(lake, {picked: {"reward": np.full(length + 1, number, np.float32)}}, copy=number)
        elif what == "expire" and picked:
            expire(lake, RetentionLimits(where=f"uid = '{picked}'"), grace_seconds=0)
        elif what == "compact":
            compact(lake, CompactionRules(settle_seconds=0.0), grace_seconds=value)
        for _ in range(2):  # a file that is gone counts until the second look
            mixture.refresh(number + 1)
        expected = select(lake, where, weight, SCHEMA.id).weights_of(view.uids())
        np.testing.assert_array_equal(view.table["weight"], expected.astype(np.float32))


def test_a_lake_in_a_directory_is_read_as_often_as_costs_little(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.training.data._QUICK_SECONDS", 50.0)
    fill(lake, [5])
    settings = TrainSettings(follow=True, refresh_seconds=200.0)
    data = TrainingData([(lake, 1.0)], SCHEMA, settings, seed=0, listener=silent)
    data.prepare([1.0], update=0, listener=silent)

    def find_interval(took: float) -> int:
        """Find after how many tens of seconds a look is due."""
        data._took = took
        for tens in range(100):
            data._refreshed = time.monotonic() - 10 * tens
            if data.is_due:
                return tens
        raise AssertionError

    assert [find_interval(took) for took in (0.0, 5.0, 100.0)] == [5, 10, 20]
    data._is_near = False
    assert [find_interval(took) for took in (0.0, 100.0)] == [20, 20]
