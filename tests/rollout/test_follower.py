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
from pipelines.errors import InputMissing, Interrupted, UsageError
from pipelines.events import Event, Listener, Notice, Progress, silent
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.learning.acting import AgentPolicy
from pipelines.rollout.follower import CheckpointFollower
from pipelines.stages import collect, train
from pipelines.stages import run as chain
from pipelines.stages.collect import Collector
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
    return query(Lake.open(lake), sql)[1]


def following(
    home: Path, collector: Collector, seconds: float = 1e-9, listener: Listener = silent, greedy: bool = False
) -> CheckpointFollower:
    return CheckpointFollower(home / "run", collector.env, seed=0, greedy=greedy, seconds=seconds, listener=listener)


def collector_at(home: Path, **tables: Any) -> Collector:
    return collect.make_collector(tiny(**tables), home / "x", name="c")


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


def test_two_processes_feed_each_other(tmp_path: Path) -> None:
    """A trainer that waits for experience, and a collector that waits for nothing, both begun with nothing there."""
    trainer = subprocess.Popen([sys.executable, "-c", _TRAIN, str(tmp_path)], cwd=Path(__file__).parents[2])
    newest = "select max(policy_version) from trajectories"

    def listen(event: Event) -> None:
        if trainer.poll() is None:
            return
        assert trainer.returncode == 0
        if query(Lake.open(tmp_path / "c"), newest)[1][0][0] > 0:
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
