"""collect: targets counted from the lake, resume, policies by name."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from pipelines.config.run_directory import RunDirectory
from pipelines.errors import InputMissing, Interrupted, Locked, UsageError
from pipelines.events import Event, Notice, Progress
from pipelines.lake import collectors
from pipelines.lake.reading import trajectories
from pipelines.lake.sql.catalog import query
from pipelines.lake.sql.sandbox import QueryLimits
from pipelines.lake.store import Lake
from pipelines.rollout.collector import count_stored_steps
from pipelines.stages import collect
from tests.stages.recipes import tiny
from tests.tiers import some


def rows(lake: Path, sql: str) -> list[tuple]:
    return query(Lake(lake), sql)[1]


def test_every_step_taken_is_in_the_lake(tmp_path: Path) -> None:
    result = collect.run(tiny(), run=tmp_path / "run")
    assert result.metrics["steps"] == 100
    assert rows(tmp_path / "run/lake", "select sum(length) from trajectories") == [(100,)]


def test_unfinished_episodes_are_truncated_and_tagged(tmp_path: Path) -> None:
    collect.run(tiny(collect={"steps": 12}), run=tmp_path / "run")  # 4 actors, 3 of 5 steps
    found = list(trajectories(Lake(tmp_path / "run/lake")))
    assert len(found) == 4
    for trajectory in found:
        assert trajectory.info.tags == {"unfinished": "true"}
        assert trajectory.columns["truncated"][-1] == 1
        assert trajectory.columns["terminated"].sum() == 0


def test_the_same_command_is_done_and_a_larger_target_goes_on_with_new_tasks(tmp_path: Path) -> None:
    settings = tiny(env={"corridor": 4})
    collect.run(settings, run=tmp_path / "run")
    skipped = collect.run(settings, run=tmp_path / "run")
    assert skipped.status == "skipped"
    assert skipped.metrics["return_mean"] is None
    more = collect.run(tiny(collect={"steps": 160}), run=tmp_path / "run")
    assert more.metrics["steps"] == 60
    actions = [t.columns["action"].tobytes() for t in trajectories(Lake(tmp_path / "run/lake"))]
    assert len(set(actions)) > len(actions) / 2


@pytest.mark.system
def test_an_interruption_keeps_all_steps(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, Progress):
            raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        collect.run(tiny(collect={"steps": 10_000_000}), run=tmp_path / "run", listener=stop)
    taken = rows(tmp_path / "run/lake", "select sum(length) from trajectories")[0][0]
    assert taken > 0
    done = collect.run(tiny(collect={"steps": taken + 8}), run=tmp_path / "run")
    assert done.metrics["steps"] == 8


@pytest.mark.system
@pytest.mark.usefixtures("trained")
def test_a_trained_policy_acts_and_is_recorded(tmp_path: Path) -> None:
    collect.run(tiny(collect={"policy": f"{tmp_path}/run@6"}), run=tmp_path / "run")
    versions = rows(
        tmp_path / "run/lake",
        "select policy_id, policy_version, sum(length) from trajectories group by all order by policy_version",
    )
    assert versions == [("random", -1, 100), (RunDirectory(tmp_path / "run").identity, 6, 100)]


@pytest.mark.system
def test_runs_of_one_name_on_one_lake_count_their_own_steps(tmp_path: Path) -> None:
    for place in ("x", "y"):
        assert collect.run(tiny(), run=tmp_path / place / "a", lake=tmp_path / "lake").metrics["steps"] == 100
    assert rows(tmp_path / "lake", "select count(distinct collector) from trajectories") == [(2,)]
    assert collect.run(tiny(), run=tmp_path / "x" / "a", lake=tmp_path / "lake").status == "skipped"


@pytest.mark.system
@pytest.mark.usefixtures("trained")
def test_a_lake_is_told_who_fills_it(tmp_path: Path) -> None:
    collect.run(tiny(), run=tmp_path / "other", lake=tmp_path / "run/lake")
    collect.run(tiny(collect={"steps": 120}), run=tmp_path / "other", lake=tmp_path / "run/lake")
    acting = tiny(collect={"policy": f"{tmp_path}/run@6"})
    trained = collect.run(acting, run=tmp_path / "other", lake=tmp_path / "run/lake").metrics["collector"]
    lake, other = Lake(tmp_path / "run"), RunDirectory(tmp_path / "other")
    found = collectors.read_all(lake)
    assert set(found) == {RunDirectory(tmp_path / "run").identity, other.identity, trained}
    record = found[other.identity]
    assert record["run"] == collectors.place(tmp_path / "other") | {"id": other.identity}
    assert (record["env"]["name"], record["env"]["corridor"], record["seed"]) == ("tmaze", 4, 0)
    assert (record["horizon"], record["behaviour"]["policy"]) == (5, "random")
    assert record["policies"] == {"random": None}
    source = collectors.place(tmp_path / "run")
    assert found[trained]["policies"] == {RunDirectory(tmp_path / "run").identity: source}
    assert found[trained]["behaviour"]["policy"] == f"{tmp_path}/run@6"
    assert [process["pid"] for process in record["processes"]] == [os.getpid()] * 2
    assert record["processes"][0]["versions"]["numpy"] == np.__version__
    told = rows(tmp_path / "run/lake", "select collector, run, env, processes from collectors order by processes")
    assert told[-1] == (other.identity, str(tmp_path / "other"), "tmaze", 2)


@pytest.mark.system
def test_lineage_in_sql_repeats_the_trajectories_by_segment_and_policy_version(tmp_path: Path) -> None:
    collect.run(tiny(), run=tmp_path / "run")
    expert = collect.run(tiny(collect={"policy": "expert"}), lake=tmp_path / "run/lake").metrics["collector"]
    sql = "select segment, collector, policy_id, policy_version, trajectories, steps, run from lineage order by all"
    found = rows(tmp_path / "run/lake", sql)
    wanted: dict = {}
    for *key, length in rows(
        tmp_path / "run/lake", "select segment, collector, policy_id, policy_version, length from trajectories"
    ):
        wanted.setdefault(tuple(key), []).append(length)
    assert {tuple(row[:4]): (row[4], row[5]) for row in found} == {k: (len(v), sum(v)) for k, v in wanted.items()}
    assert {row[1]: row[6] for row in found} == {
        RunDirectory(tmp_path / "run").identity: str(tmp_path / "run"),
        expert: None,
    }
    joined = "select count(*) from trajectories join lineage using (segment, collector) where run is not null"
    assert query(Lake(tmp_path / "run"), joined, limits=QueryLimits())[1][0][0] > 0


def test_a_named_policy_acts_as_it_is_unless_it_explores(tmp_path: Path) -> None:
    expert = collect.run(tiny(collect={"policy": "expert"}), lake=tmp_path / "lake").metrics
    assert (expert["return_mean"], expert["epsilon"], expert["policy"]) == (pytest.approx(1.0), 0.0, "expert")
    assert rows(tmp_path / "lake", "select max(epsilon) from trajectories") == [(0.0,)]
    shaken = tiny(collect={"policy": "expert", "explore": True}, exploration={"start": 0.5, "randomize": False})
    assert collect.run(shaken, lake=tmp_path / "lake").metrics["epsilon"] == pytest.approx(0.5, abs=1e-3)


def test_a_policy_that_could_explore_says_that_it_did_not(tmp_path: Path) -> None:
    heard: list[Event] = []
    collect.run(tiny(collect={"policy": "expert"}, exploration={"start": 0.5}), lake=tmp_path, listener=heard.append)
    assert any(isinstance(event, Notice) and "--explore" in event.text for event in heard)
    assert [event.metrics["epsilon"] for event in heard if isinstance(event, Progress)][-1] == 0.0


@pytest.mark.system
@pytest.mark.parametrize(
    "changed",
    some(
        [
            {"env": {"corridor": 4, "penalty": -0.1}},
            {"collect": {"policy": "expert"}},
            {"collect": {"explore": True}},
            {"collect": {"explore": True}, "exploration": {"start": 0.3}},
            {"seed": 1},
        ],
        0,
        3,
    ),
)
def test_a_changed_environment_policy_or_exploration_is_another_collector(tmp_path: Path, changed: dict) -> None:
    first = collect.run(tiny(), lake=tmp_path / "lake").metrics["collector"]
    other = collect.run(tiny(**changed), lake=tmp_path / "lake").metrics
    assert other["steps"] == 100
    assert rows(tmp_path / "lake", "select collector, sum(length) from trajectories group by all order by all") == [
        (name, 100) for name in sorted((first, other["collector"]))
    ]
    assert collect.run(tiny(**changed), lake=tmp_path / "lake").status == "skipped"
    assert collectors.read(Lake(tmp_path / "lake"), first)["env"] == tiny().env.model_dump()


@pytest.mark.system
@pytest.mark.parametrize("changed", some([{"collect": {"policy": "expert"}}, {"collect": {"explore": True}}], 1))
def test_another_policy_or_exploration_of_a_run_counts_its_own_steps(tmp_path: Path, changed: dict) -> None:
    collect.run(tiny(), run=tmp_path / "run")
    assert collect.run(tiny(**changed), run=tmp_path / "run").metrics["steps"] == 100
    assert collect.run(tiny(**changed), run=tmp_path / "run").status == "skipped"
    assert collect.run(tiny(), run=tmp_path / "run").status == "skipped"


@pytest.mark.usefixtures("trained")
def test_a_run_is_one_policy_from_wherever_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collect.run(tiny(collect={"policy": f"{tmp_path}/run@6"}), lake=tmp_path / "lake")
    monkeypatch.chdir(tmp_path)
    assert collect.run(tiny(collect={"policy": "run@6"}), lake=tmp_path / "lake").status == "skipped"


@pytest.mark.system
@pytest.mark.parametrize("place", some(["run", "lake"], 0))
def test_adding_collects_more_each_time(tmp_path: Path, place: str) -> None:
    taken = [collect.run(tiny(collect={"steps": 20}), **{place: tmp_path / "x"}, add=True).metrics for _ in range(3)]
    assert [(metrics["steps"], metrics["steps_total"]) for metrics in taken] == [(20, 20), (20, 40), (20, 60)]
    assert collect.run(tiny(collect={"steps": 60}), **{place: tmp_path / "x"}).status == "skipped"


@pytest.mark.system
def test_means_say_how_many_episodes_they_leave_out(tmp_path: Path) -> None:
    heard: list[Event] = []
    short = collect.run(tiny(collect={"steps": 12}), lake=tmp_path / "short", listener=heard.append).metrics
    assert (short["trajectories"], short["unfinished"], short["return_mean"]) == (0, 4, None)
    assert (short["unfinished_steps"], short["in_flight_share"]) == (12, 1.0)
    assert 0 < short["policy_share"] < 1 - short["env_share"] < 1
    assert "no episode ended in 3 steps of each of 4 actors, an episode takes up to 5" in notices(heard)
    walk = {"name": "tests.envs.breaking:Walk", "length": 40}
    heard.clear()
    cut = collect.run(tiny(env=walk, collect={"steps": 132}), lake=tmp_path / "cut", listener=heard.append).metrics
    assert cut["unfinished"] > cut["trajectories"] > 0
    assert f"means are over the {cut['trajectories']} episodes that ended; {cut['unfinished']}" in notices(heard)


def notices(heard: list[Event]) -> str:
    return "\n".join(event.text for event in heard if isinstance(event, Notice))


def scripted(observation, prev_action, prev_reward, time):  # type: ignore[no-untyped-def]
    return np.zeros(len(time), dtype=np.int32)


def test_a_scripted_policy_acts(tmp_path: Path) -> None:
    policy = "tests.stages.test_collect:scripted"
    collect.run(tiny(collect={"policy": policy}), lake=tmp_path / "lake")
    assert all(not t.columns["action"].any() for t in trajectories(Lake(tmp_path / "lake")))


@pytest.mark.parametrize(
    ("tables", "error", "message"),
    [
        ({"collect": {"policy": "runs/nowhere"}}, InputMissing, "no run"),
        ({"collect": {"policy": "nowhere:policy"}}, InputMissing, "no module"),
    ],
)
def test_a_policy_that_is_not_there_is_named(tmp_path: Path, tables: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        collect.run(tiny(**tables), lake=tmp_path / "lake")


def test_a_lake_of_other_spaces_is_refused(tmp_path: Path) -> None:
    collect.run(tiny(), lake=tmp_path / "lake")
    with pytest.raises(InputMissing, match="other spaces"):
        collect.run(tiny(env={"name": "dark-key-door"}), lake=tmp_path / "lake")


def test_a_changed_configuration_is_refused_with_a_diff(tmp_path: Path) -> None:
    collect.run(tiny(), run=tmp_path / "run")
    with pytest.raises(UsageError) as refused:
        collect.run(tiny(env={"corridor": 7}), run=tmp_path / "run")
    assert refused.value.problems == ("env.corridor: 4 -> 7",)
    assert collect.run(tiny(env={"corridor": 7}), run=tmp_path / "run", fresh=True).metrics["steps"] == 100


@pytest.mark.parametrize(
    ("tables", "error"),
    [
        ({"env": {"name": "gym:Nothing-v7", "corridor": 1}}, UsageError),
        ({"collect": {"policy": "runs/nowhere"}}, InputMissing),
    ],
)
def test_nothing_is_made_for_what_cannot_be_collected(tmp_path: Path, tables: dict, error: type) -> None:
    for places in ({"run": tmp_path / "runs/a"}, {"lake": tmp_path / "lakes/a"}):
        with pytest.raises(error):
            collect.run(tiny(**tables), **places)
    assert list(tmp_path.iterdir()) == []


def test_a_fresh_start_that_cannot_be_made_destroys_nothing(tmp_path: Path) -> None:
    collect.run(tiny(), run=tmp_path / "run")
    with pytest.raises(InputMissing):
        collect.run(tiny(collect={"policy": "runs/nowhere"}), run=tmp_path / "run", fresh=True)
    assert collect.run(tiny(), run=tmp_path / "run").status == "skipped"


def test_a_run_that_was_moved_goes_on(tmp_path: Path) -> None:
    collect.run(tiny(), run=tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert collect.run(tiny(collect={"steps": 120}), run=tmp_path / "b").metrics["steps"] == 20


@pytest.mark.system
def test_a_run_given_as_the_lake_is_counted_as_well(tmp_path: Path) -> None:
    collect.run(tiny(), run=tmp_path / "run")
    first = collect.run(tiny(), lake=tmp_path / "run")
    assert first.metrics["steps"] == 100
    assert collect.run(tiny(), lake=tmp_path / "run").status == "skipped"


@pytest.mark.parametrize("place", ["run", "lake"])
def test_one_collector_at_a_time(tmp_path: Path, place: str) -> None:
    places = {place: tmp_path / place}

    def again(event: Event) -> None:
        if isinstance(event, Progress):
            with pytest.raises(Locked, match=f"pid {os.getpid()}"):
                collect.run(tiny(), **places)
            raise Interrupted("seen")

    with pytest.raises(Interrupted, match="seen"):
        collect.run(tiny(), **places, listener=again)


@pytest.mark.system
def test_a_bounded_lake_keeps_the_newest_and_the_target_counts_what_went(tmp_path: Path) -> None:
    settings = tiny(collect={"steps": 2000, "seal_seconds": 0.01}, lake={"max_steps": 300, "grace_seconds": 0.0})
    result = collect.run(settings, run=tmp_path / "run")
    assert result.metrics["steps"] == 2000
    (kept,) = rows(tmp_path / "run/lake", "select sum(length) from trajectories")[0]
    assert 250 <= kept <= 600
    assert collect.run(settings, run=tmp_path / "run").status == "skipped"
    more = collect.run(
        tiny(collect={"steps": 2400, "seal_seconds": 0.01}, lake={"max_steps": 300, "grace_seconds": 0.0}),
        run=tmp_path / "run",
    )
    assert more.metrics["steps"] == 400
    assert count_stored_steps(Lake(tmp_path / "run/lake"), RunDirectory(tmp_path / "run").identity) == 2400
