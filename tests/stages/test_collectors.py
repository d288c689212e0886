"""Several collectors: shares, seeds, names, restarts, one maintainer; as threads in the quick tier, as processes in
others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.config.run_directory import RunDirectory
from pipelines.envs.exploration import Exploration
from pipelines.errors import AmagoError, Interrupted
from pipelines.events import Event, Notice
from pipelines.lake.maintenance import retention_thread
from pipelines.lake.reading import trajectories
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.rollout import collector as rollout_collector
from pipelines.rollout.collector import Collector, add_number, count_by_collector, count_stored_steps
from pipelines.rollout.plan import CollectionPlan, draw_seeds
from pipelines.stages import run as chain
from pipelines.stages.collectors import CollectorFailed, CollectorGroup, level
from tests.stages.killing import (
    stored_by,
    survives_a_killed_collector,
    survives_a_killed_driver,
    survives_a_killed_fork_server,
    total,
    uids,
)
from tests.stages.recipes import stopping, tiny
from tests.stages.threads import ThreadEngine


def group_at(place: Path, engine: Any = None, *, collectors: int = 2, **tables: Any) -> CollectorGroup:
    settings = tiny(collect={"collectors": collectors, "workers": 0}, **tables)
    plan = CollectionPlan(settings=settings, place=place, name="c", behaviour={})
    return CollectorGroup(plan, ends=True, engine=engine or ThreadEngine())


def heard(sentences: list[str]) -> Callable[[Event], None]:
    return lambda event: sentences.append(event.text) if isinstance(event, Notice) else None


@pytest.mark.parametrize(
    ("stored", "target", "shares"),
    [
        ([0, 0, 0], 11, [4, 4, 3]),
        ([3000, 2000], 10_000, [5000, 5000]),
        ([7, 0, 0], 10, [7, 2, 1]),
        ([9, 9], 10, [9, 9]),
        ([0, 5, 9], 20, [6, 5, 9]),
        ([0, 5, 9], 30, [10, 10, 10]),
    ],
)
def test_shares_are_as_equal_as_what_is_stored_allows(stored: list[int], target: int, shares: list[int]) -> None:
    assert level(stored, target) == shares


def test_collectors_have_seeds_of_their_own_and_one_alone_those_that_it_had() -> None:
    drawn = {tuple(draw_seeds(0, before, number=k)) for before in (0, 1, 2) for k in (None, 0, 1, 2)}
    assert len(drawn) == 12
    assert draw_seeds(7, 100) == [522968303, 81659292, 1203649202]


def test_shares_are_exact_and_trajectories_distinct(tmp_path: Path) -> None:
    with group_at(tmp_path / "lake", collectors=3) as group:
        metrics = group.collect(240, lambda event: None)
    assert (metrics["steps"], metrics["steps_total"], metrics["restarts"], metrics["lost_steps"]) == (240, 240, 0, 0)
    assert [each["steps"] for each in metrics["collectors"]] == [80, 80, 80]
    lake = Lake(tmp_path / "lake")
    assert count_by_collector(lake, "c") == {"c.0": 80, "c.1": 80, "c.2": 80}
    found = uids(lake)
    assert len(found) == len(set(found)) == metrics["trajectories"] + metrics["unfinished"]
    played = {t.columns["action"].tobytes() for t in trajectories(lake)}
    assert len(played) > len(found) / 2  # nobody repeats what another played


def test_a_collector_that_dies_is_started_again_and_plays_what_is_missing(tmp_path: Path) -> None:
    told: list[str] = []
    engine = ThreadEngine(lambda number, kind: (number, kind) == (1, "collected"))
    with group_at(tmp_path / "lake", engine) as group:
        metrics = group.collect(400, heard(told))
    assert [text for text in told if "again" in text] == [
        "collector 1 (pid 0 on here) was killed by a test; starting it again"
    ]
    stored = count_by_collector(Lake(tmp_path / "lake"), "c")
    assert stored["c.0"] == 200 <= stored["c.1"] < 200 + 4
    assert metrics["steps"] == metrics["steps_total"] == sum(stored.values()) == total(tmp_path / "lake")
    assert metrics["restarts"] == 1


@pytest.mark.system
def test_one_that_dies_again_and_again_ends_all_with_their_steps_stored(tmp_path: Path) -> None:
    engine = ThreadEngine(lambda number, kind: number > 0 and kind == "ready")
    told: list[str] = []
    with (
        pytest.raises(CollectorFailed, match="6 times in a row without having stored a step"),
        group_at(tmp_path / "lake", engine) as group,
    ):
        group.collect(400, heard(told))
    assert len([text for text in told if "again" in text]) == 5
    assert count_stored_steps(Lake(tmp_path / "lake"), "c") > 0


def test_what_is_wrong_for_all_is_reported_once_and_nothing_is_written(tmp_path: Path) -> None:
    broken = tiny(collect={"collectors": 2, "workers": 0, "policy": str(tmp_path / "nothing")})
    plan = CollectionPlan(settings=broken, place=tmp_path / "lake", name="c", behaviour={})
    with (
        pytest.raises(AmagoError, match="no run or bundle at") as caught,
        CollectorGroup(plan, engine=ThreadEngine()) as group,
    ):
        group.collect(400, lambda event: None)
    assert caught.value.exit_code == 3
    assert Lake.find(tmp_path / "lake") is None


@pytest.mark.system
def test_an_interruption_stores_what_all_have(tmp_path: Path) -> None:
    with pytest.raises(Interrupted), group_at(tmp_path / "lake") as group:
        group.collect(10**9, stopping(3))
    stored = count_by_collector(Lake(tmp_path / "lake"), "c")
    assert set(stored) == {"c.0", "c.1"}
    assert list((tmp_path / "lake" / "wal").iterdir()) == []
    with group_at(tmp_path / "lake") as group:
        whole = -sum(stored.values()) % 8  # two collectors play whole steps of four actors each
        assert group.collect(sum(stored.values()) + 80 + whole, lambda event: None)["steps"] == 80 + whole


@pytest.mark.system
def test_another_number_of_collectors_counts_the_steps_of_all(tmp_path: Path) -> None:
    for count, steps in ((2, 80), (3, 120), (2, 160)):
        with group_at(tmp_path / "lake", collectors=count) as group:
            group.collect(steps, lambda event: None)
        assert count_stored_steps(Lake(tmp_path / "lake"), "c") == total(tmp_path / "lake") == steps
    plan = CollectionPlan(settings=tiny(collect={"workers": 0}), place=tmp_path / "lake", name="c", behaviour={})
    with Collector(plan) as alone:
        assert alone.before == 160
        assert alone.collect(200, lambda event: None)["steps"] == 40
    assert count_stored_steps(Lake(tmp_path / "lake"), "c") == 200
    assert add_number("c", 12) == "c.12"


def test_only_the_driver_keeps_the_lake_within_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    class Counted(retention_thread.RetentionThread):
        def __enter__(self) -> Any:
            started.append(threading.current_thread().name)
            return super().__enter__()

    monkeypatch.setattr(rollout_collector, "RetentionThread", Counted)
    with group_at(tmp_path / "lake", lake={"max_steps": 100}) as group:
        group.collect(400, lambda event: None)
    assert started == [threading.main_thread().name]
    kept = total(tmp_path / "lake")
    assert count_stored_steps(Lake(tmp_path / "lake"), "c") == 400 > kept


def test_exploration_is_annealed_over_the_steps_of_all(tmp_path: Path) -> None:
    settings = tiny(collect={"collectors": 2, "workers": 0}, exploration={"steps": 100, "randomize": False})
    plan = CollectionPlan(settings=settings, place=tmp_path / "a", name="c", number=0, before=0)
    with Collector(plan) as collector:
        assert isinstance(collector.exploration, Exploration)
        collector.collect(40, lambda event: None)  # ten steps of each actor, of fifty
        assert collector.exploration.progress == pytest.approx(0.2)


@pytest.mark.system
def test_killed_collectors_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    survives_a_killed_collector(tmp_path / "run", kills=2, seed=0)


@pytest.mark.slow
def test_collectors_killed_at_ten_moments_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    survives_a_killed_collector(tmp_path / "run", kills=10, seed=1)


@pytest.mark.full
def test_collectors_outlive_the_process_that_they_are_forked_from(tmp_path: Path) -> None:
    survives_a_killed_fork_server(tmp_path / "run")


@pytest.mark.full
def test_collectors_end_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    survives_a_killed_driver(tmp_path / "run", kills=1, seed=2)


@pytest.mark.slow
def test_collectors_end_with_a_driver_that_is_killed_ten_times(tmp_path: Path) -> None:
    survives_a_killed_driver(tmp_path / "run", kills=10, seed=3)


@pytest.mark.system
def test_a_chain_collects_with_several_processes_by_the_agent_it_trains(tmp_path: Path) -> None:
    stages = [{"stage": "collect"}, {"stage": "train"}]
    tables = {"stages": stages, "collect": {"collectors": 2, "workers": 0}}
    result = chain.run(tiny(epochs=3, **tables), run=tmp_path / "run")
    assert result.metrics["steps"] == 304  # each collector's share is a multiple of its four actors
    versions = query(Lake(tmp_path / "run"), "select distinct policy_version from trajectories order by 1")[1]
    assert versions == [(0,), (6,), (12,)]
    identity = RunDirectory(tmp_path / "run").identity
    assert set(stored_by(tmp_path / "run")) == {f"{identity}.0", f"{identity}.1"}
    more = chain.run(tiny(epochs=4, **tables), run=tmp_path / "run")
    assert more.metrics["updates"] == 24
