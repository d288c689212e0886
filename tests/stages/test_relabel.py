"""relabel: overlays that train reads, once for each original however often the command is repeated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelines.envs.goals import GOAL_RULES
from pipelines.errors import InputMissing, UsageError
from pipelines.events import Event, Notice, Progress
from pipelines.lake.maintenance.compaction import CompactionRules, compact
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.reading import Reader, trajectories
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.stages import collect, relabel, train
from tests.stages.recipes import tiny

GOALS = {"name": "goal-frozen-lake"}


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    collect.run(tiny(env=GOALS, collect={"steps": 400}), lake=tmp_path / "lake")
    return tmp_path / "lake"


def derived(lake: Path) -> list:
    return list(trajectories(Lake(lake), "base_uid is not null"))


def test_every_relabelled_trajectory_obeys_the_goal_rule(lake: Path) -> None:
    result = relabel.run(tiny(env=GOALS), lake=lake)
    found = derived(lake)
    assert result.metrics["trajectories"] == len(found) > 10
    for trajectory in found:
        reward, success = GOAL_RULES.get("goal-frozen-lake").outcome(trajectory.columns)
        np.testing.assert_array_equal(trajectory.columns["reward"], reward)
        np.testing.assert_array_equal(np.flatnonzero(success), [trajectory.length])
        assert trajectory.columns["terminated"][-1] == 1


@pytest.mark.system
def test_repeating_adds_nothing_and_more_copies_add_the_difference(lake: Path) -> None:
    relabel.run(tiny(env=GOALS), lake=lake)
    count = len(derived(lake))
    assert relabel.run(tiny(env=GOALS), lake=lake).metrics["trajectories"] == 0
    relabel.run(tiny(env=GOALS, relabel={"copies": 2}), lake=lake)
    assert len(derived(lake)) == 2 * count


@pytest.mark.system
def test_a_predicate_and_a_share_choose(lake: Path) -> None:
    relabel.run(tiny(env=GOALS, relabel={"where": "not success", "fraction": 0.5}), lake=lake)
    bases = query(
        Lake(lake),
        "select b.success from trajectories t join trajectories b on t.base_uid = b.uid",
    )[1]
    total = query(Lake(lake), "select count(*) from trajectories where not success and base_uid is null")[1][0][0]
    assert 0 < len(bases) < total
    assert not any(success for (success,) in bases)


@pytest.mark.system
def test_train_draws_from_overlays(lake: Path, tmp_path: Path) -> None:
    relabel.run(tiny(env=GOALS), lake=lake)
    result = train.run(tiny(env=GOALS), run=tmp_path / "run", lakes=[(lake, 1.0)])
    assert result.metrics["updates"] == 6


def test_what_cannot_be_relabelled_is_named(lake: Path, tmp_path: Path) -> None:
    collect.run(tiny(), lake=tmp_path / "tmaze")
    with pytest.raises(InputMissing, match="'tmaze' has no goal rule"):
        relabel.run(tiny(), lake=tmp_path / "tmaze")
    with pytest.raises(UsageError):
        relabel.run(tiny(env=GOALS, relabel={"relabeler": "hindsigth"}), lake=lake)
    with pytest.raises(UsageError):
        relabel.run(tiny(env=GOALS, relabel={"where": "drop table trajectories"}), lake=lake)


@pytest.mark.system
def test_a_lake_may_be_compacted_and_lose_trajectories_while_it_is_relabelled(lake: Path) -> None:
    store, told = Lake(lake), []
    before = len(list(trajectories(store)))
    for number in range(3):  # several segments, so that some files are not open yet
        collect.run(tiny(env=GOALS, seed=number + 1, collect={"steps": 100}), lake=lake)

    def maintain(event: Event) -> None:
        told.append(event)
        if isinstance(event, Progress) and sum(isinstance(one, Progress) for one in told) == 1:
            expire(store, RetentionLimits(max_trajectories=10), grace_seconds=0.0)
            compact(store, CompactionRules(settle_seconds=0.0), grace_seconds=0.0)

    relabel.run(tiny(env=GOALS), lake=lake, listener=maintain)
    assert any(isinstance(event, Notice) and "expired before" in event.text for event in told)
    left = Reader(store).uids()
    originals = {row[0] for row in query(store, "select uid from trajectories where base_uid is null")[1]}
    bases = {row[0] for row in query(store, "select base_uid from trajectories where base_uid is not null")[1]}
    assert len(originals) == 10
    assert bases <= originals
    assert len(left) == len(originals) + len(derived(lake))
    assert before > 10
