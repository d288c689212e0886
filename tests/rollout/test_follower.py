"""collect --follow: the newest checkpoint acts, from between two steps on, with the memory it would have had."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.config.run_directory import RunDirectory
from pipelines.errors import InputMissing, Interrupted, StorageError, UsageError
from pipelines.events import Event, Listener, Notice, Progress, silent
from pipelines.lake.sql.catalog import query
from pipelines.lake.storage import LocalStorage
from pipelines.lake.store import Lake
from pipelines.learning.acting import AgentPolicy
from pipelines.rollout.collector import Collector
from pipelines.rollout.follower import CheckpointFollower, RunSource, find_policy_source
from pipelines.rollout.plan import CollectionPlan
from pipelines.stages import collect, train
from pipelines.stages import run as chain
from pipelines.stages.train import Source
from tests.stages.recipes import tiny


@pytest.fixture
def home(tmp_path: Path) -> Path:
    collect.run(tiny(), run=tmp_path / "run")
    return tmp_path


def learn(home: Path, steps: int) -> None:
    train.run(tiny(train={"steps": steps}), run=home / "run", lakes=[Source(home / "run" / "lake")])


def versions(lake: Path) -> list[tuple]:
    sql = "select policy_id, policy_version from trajectories where collector like 'c-%' group by all order by all"
    return query(Lake(lake), sql)[1]


def following(
    home: Path, collector: Collector, seconds: float = 1e-9, listener: Listener = silent, greedy: bool = False
) -> CheckpointFollower:
    return CheckpointFollower(
        RunSource(home / "run"), collector.env, seed=0, greedy=greedy, seconds=seconds, listener=listener
    )


def collector_at(home: Path, **tables: Any) -> Collector:
    return Collector(CollectionPlan(settings=tiny(**tables), place=home / "x", name="c"))


@pytest.mark.system
def test_checkpoints_are_taken_up_as_they_appear(home: Path) -> None:
    settings = tiny(collect={"follow": str(home / "run"), "reload_seconds": 1e-9, "steps": 10**9})
    told: list[str] = []
    progress = 0

    def listen(event: Event) -> None:
        nonlocal progress
        if isinstance(event, Notice):
            told.append(event.text)
        elif isinstance(event, Progress) and event.stage == "collect":
            progress += 1
            if progress == 9:
                raise Interrupted("enough")
            if progress in (3, 6):  # between two there are fractions of a second, and many episodes
                learn(home, progress)

    with pytest.raises(Interrupted, match="enough"):
        collect.run(settings, run=home / "c", lake=home / "c", listener=listen)
    assert "at random until" in told[0]
    identity = RunDirectory(home / "run").identity
    assert set(versions(home / "c")) == {("random", -1), (identity, 3), (identity, 6)}


@pytest.mark.system
def test_a_follower_gives_each_checkpoint_once_and_looks_no_more_often_than_it_is_told(home: Path) -> None:
    learn(home, 3)
    with collector_at(home) as collector:
        eager, calm = following(home, collector), following(home, collector, seconds=3600)
        first = eager.first()
        assert (first.version, first.run, first.policy_id) == (3, home / "run", RunDirectory(home / "run").identity)
        assert calm.first().version == 3
        assert eager.newer() is None
        learn(home, 6)
        assert calm.newer() is None
        newer = eager.newer()
        assert newer is not None
        assert newer.version == 6


@pytest.mark.system
def test_the_draws_of_a_new_checkpoint_go_on_where_those_of_the_last_ended(home: Path) -> None:
    learn(home, 3)
    with collector_at(home) as collector:
        follower = following(home, collector)
        first = follower.first()
        collector.act_by(first)
        collector.rollout.step()
        learn(home, 6)
        newer = follower.newer()
        assert newer is not None
        before, after = (each.policy.state_dict()["generator"].numpy() for each in (first, newer))
        np.testing.assert_array_equal(after, before)


@pytest.mark.system
def test_a_reload_in_mid_episode_acts_as_if_the_new_policy_had_always_watched(home: Path) -> None:
    """The actions after a reload are those of a policy that was given the episode's steps one by one."""
    learn(home, 3)
    with collector_at(home, collect={"greedy": True}) as collector:
        follower = following(home, collector, greedy=True)
        collector.act_by(follower.first())
        for _ in range(3):
            collector.rollout.step()
        learn(home, 6)
        newer = follower.newer()
        assert newer is not None
        collector.act_by(newer)
        slow = following(home, collector).first().policy
        assert isinstance(slow, AgentPolicy)
        slow.greedy = True
        prefixes = collector.rollout.prefixes()
        for t in range(3):
            rows = {name: np.stack([prefix[name][t] for prefix in prefixes]) for name in prefixes[0]}
            slow.act({"obs": rows["obs"]}, rows["action"], rows["reward"], np.full(4, t))
        (group,) = collector.rollout._groups
        assert group.observation is not None
        arguments = group.observation, group.action, group.reward, group.time
        np.testing.assert_array_equal(newer.policy.act(*arguments), slow.act(*arguments))


@pytest.mark.system
def test_what_cannot_be_read_is_said_once_and_acting_goes_on(home: Path) -> None:
    learn(home, 3)
    told: list[Event] = []
    with collector_at(home) as collector:
        follower = following(home, collector, listener=told.append)
        assert follower.first().version == 3
        broken = home / "run" / "checkpoints" / "000009"
        shutil.copytree(home / "run" / "checkpoints" / "000003", broken)
        assert follower.newer() is None
        assert follower.newer() is None
        warnings = [event for event in told if isinstance(event, Notice) and event.level == "warning"]
        assert len(warnings) == 1
        assert "damaged" in warnings[0].text
        shutil.rmtree(broken)
        learn(home, 6)
        newer = follower.newer()
        assert newer is not None
        assert newer.version == 6


def test_another_space_and_two_policies_are_refused(home: Path) -> None:
    learn(home, 3)
    other = tiny(collect={"follow": str(home / "run")}, env={"name": "dark-key-door"})
    with pytest.raises(InputMissing, match="other spaces"):
        collect.run(other, lake=home / "other")
    both = tiny(collect={"follow": str(home / "run"), "policy": "random"})
    with pytest.raises(UsageError, match="--policy or --follow"):
        collect.run(both, lake=home / "other")
    assert not (home / "other").exists()
    with pytest.raises(UsageError, match="always acts with the agent it trains"):
        chain.run(tiny(collect={"follow": "x"}, stages=[{"stage": "collect"}]), run=home / "chain")


_TRAIN = """
import sys
from pathlib import Path
from pipelines.stages import train
from pipelines.stages.train import Source
from tests.stages.recipes import tiny
home = Path(sys.argv[1])
settings = tiny(train={"steps": 60, "checkpoint_every": 5, "follow": True})
train.run(settings, run=home / "t", lakes=[Source(home / "c" / "lake")])
"""


@pytest.mark.full
def test_two_processes_feed_each_other(tmp_path: Path) -> None:
    """A trainer that waits for experience, and a collector that waits for nothing, both begun with nothing there."""
    trainer = subprocess.Popen([sys.executable, "-c", _TRAIN, str(tmp_path)], cwd=Path(__file__).parents[2])
    newest = "select max(policy_version) from trajectories"

    def listen(event: Event) -> None:
        if trainer.poll() is None:
            return
        assert trainer.returncode == 0
        if query(Lake(tmp_path / "c"), newest)[1][0][0] > 0:
            raise Interrupted("enough")

    settings = tiny(collect={"follow": str(tmp_path / "t"), "reload_seconds": 0.1, "seal_seconds": 0.2, "steps": 10**9})
    try:
        with pytest.raises(Interrupted, match="enough"):
            collect.run(settings, run=tmp_path / "c", listener=listen)
    finally:
        trainer.kill()
        trainer.wait()
    first, *others = versions(tmp_path / "c")
    assert first == ("random", -1)
    assert {id for id, _ in others} == {RunDirectory(tmp_path / "t").identity}


@pytest.mark.system
def test_a_lake_s_policies_act_from_the_lake_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector on another host sees nothing but the lake."""
    lake = home / "run" / "lake"
    settings = tiny(train={"steps": 3, "publish": True})
    identity = RunDirectory(home / "run").identity
    with collector_at(home) as collector:
        source = find_policy_source(str(lake))
        follower = CheckpointFollower(source, collector.env, seed=0, greedy=False, seconds=1e-9, listener=silent)
        assert follower.first().policy_id == "random"
        train.run(settings, run=home / "run", lakes=[Source(lake)])
        shutil.move(home / "run" / "checkpoints", home / "away")
        newer = follower.newer()
        assert newer is not None
        assert (newer.version, newer.policy_id, newer.run) == (3, identity, None)
        assert follower.newer() is None
        named = CheckpointFollower(
            find_policy_source(f"{lake}/{identity}"), collector.env, seed=0, greedy=False, seconds=1e-9, listener=silent
        )
        assert named.first().version == 3


@pytest.mark.system
def test_a_policy_published_for_other_spaces_is_refused_in_a_line(home: Path) -> None:
    train.run(tiny(train={"steps": 3, "publish": True}), run=home / "run", lakes=[Source(home / "run" / "lake")])
    settings = tiny(env={"name": "goal-frozen-lake"})
    with Collector(CollectionPlan(settings=settings, place=home / "y", name="c")) as collector:
        follower = CheckpointFollower(
            find_policy_source(str(home / "run" / "lake")), collector.env, seed=0, greedy=False, listener=silent
        )
        with pytest.raises(InputMissing, match="was trained for other spaces"):
            follower.first()


@pytest.mark.system
def test_a_store_that_cannot_be_read_is_said_once_and_acting_goes_on(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Event] = []
    with collector_at(home) as collector:
        source = find_policy_source(str(home / "run" / "lake"))
        follower = CheckpointFollower(source, collector.env, seed=0, greedy=False, seconds=1e-9, listener=told.append)
        train.run(tiny(train={"steps": 3, "publish": True}), run=home / "run", lakes=[Source(home / "run" / "lake")])
        assert follower.first().version == 3
        with monkeypatch.context() as broken:
            broken.setattr(LocalStorage, "find", lambda *_, **__: (_ for _ in ()).throw(StorageError("no connection")))
            assert [follower.newer() for _ in range(3)] == [None] * 3
        assert [event.text for event in told if isinstance(event, Notice) and event.level == "warning"] == [
            "no connection; acting goes on with what is here"
        ]
        train.run(tiny(train={"steps": 6, "publish": True}), run=home / "run", lakes=[Source(home / "run" / "lake")])
        newer = follower.newer()
        assert newer is not None
        assert newer.version == 6


def test_publishing_what_another_process_publishes_is_a_warning_and_training_ends(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Event] = []
    monkeypatch.setattr(LocalStorage, "swap", lambda *_: (_ for _ in ()).throw(FileExistsError()))
    done = train.run(
        tiny(train={"steps": 3, "publish": True}),
        run=home / "run",
        lakes=[Source(home / "run" / "lake")],
        listener=told.append,
    )
    assert done.metrics["updates"] == 3
    warnings = [event.text for event in told if isinstance(event, Notice) and event.level == "warning"]
    assert [text for text in warnings if "another process publishes policies of this run" in text]
