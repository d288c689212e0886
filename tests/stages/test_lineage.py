"""Lineage over real runs: what a checkpoint could draw, who collected it, and which checkpoints acted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.config.load import resolve
from pipelines.config.run_directory import RunDirectory
from pipelines.errors import InputMissing, UsageError
from pipelines.files.checksums import seal
from pipelines.lake.lineage import CheckpointLineage, split, trace, trajectories
from pipelines.lake.reading import Reader
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.rollout.environment import find_env_model
from pipelines.stages import collect, relabel, train
from pipelines.stages.train import Source
from tests.lake.factories import remove
from tests.stages.recipes import TINY, tiny


@pytest.fixture(scope="module")
def _prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a` learns from random steps; `b` collects with it, learns from both, and goes on after `a` collected more."""
    home = tmp_path_factory.mktemp("lineage")
    a, b = home / "a", home / "b"
    collect.run(tiny(), run=a)
    learn(a, a / "lake", 6)
    collect.run(tiny(collect={"policy": f"{a}@3"}), run=b)
    learn(b, b / "lake", 6)
    collect.run(tiny(collect={"steps": 160, "policy": f"{a}@6"}), run=b)
    learn(b, b / "lake", 12)
    return home


def learn(run: Path, lake: Path, steps: int) -> None:
    settings = tiny(train={"steps": steps, "checkpoint_every": 3, "keep_checkpoints": 2})
    train.run(settings, run=run, lakes=[Source(lake)])


@pytest.fixture
def home(_prepared: Path, tmp_path: Path) -> Path:
    shutil.copytree(_prepared, tmp_path / "home", symlinks=True)
    for record in (tmp_path / "home").rglob("*.json"):  # as if all had happened here
        text = record.read_text().replace(str(_prepared), str(tmp_path / "home"))
        if record.name == "checkpoint.json":
            files = {name: (record.parent / name).read_bytes() for name in json.loads(text).pop("files")}
            whole = {key: value for key, value in json.loads(text).items() if key != "checksum"}
            record.write_bytes(seal(whole, files))
        else:
            record.write_text(text)
    return tmp_path / "home"


def runs(origin: CheckpointLineage) -> Iterator[tuple[str, int]]:
    yield Path(origin.run).name, origin.checkpoint
    for drawn in origin.lakes:
        for behaviour in drawn.behaviour:
            if behaviour.origin is not None:
                yield from runs(behaviour.origin)


@pytest.mark.system
def test_a_checkpoint_leads_to_the_runs_whose_policies_acted(home: Path) -> None:
    found = trace(home / "b")
    assert list(runs(found)) == [("b", 12), ("a", 6)]
    (drawn,) = found.lakes
    (source_3, source_6) = drawn.sources
    a, b = RunDirectory(home / "a").identity, RunDirectory(home / "b").identity
    assert [(s.policy_id, s.policy_version, s.steps) for s in drawn.sources] == [(a, 3, 100), (a, 6, 160)]
    named = [source_3.collector, source_6.collector]  # each checkpoint that acts is a collector of its own
    assert named[0] != named[1]
    assert all(name.startswith(f"{b}-") for name in named)
    assert set(source_3.segments).isdisjoint(source_6.segments)
    (behaviour,) = drawn.behaviour
    assert (behaviour.versions, behaviour.kept) == ((3, 6), (3, 6))
    assert {drawn.collectors[name]["run"]["absolute"] for name in named} == {str(home / "b")}
    assert behaviour.origin is not None
    (first,) = behaviour.origin.lakes
    assert [(s.policy_id, s.policy_version, s.steps) for s in first.sources] == [("random", -1, 100)]


def test_an_update_whose_checkpoint_is_gone_is_told_by_a_later_one(home: Path) -> None:
    kept = trace(home / "b", "12")
    assert not (home / "b" / "checkpoints" / "000006").exists()
    earlier = trace(home / "b", "6")
    assert (earlier.checkpoint, earlier.told_by) == (6, 9)
    assert [s.policy_version for s in earlier.lakes[0].sources] == [3]
    assert [s.policy_version for s in kept.lakes[0].sources] == [3, 6]


def test_trajectories_are_those_of_the_lake_at_that_update(home: Path) -> None:
    _, rows = query(Lake(home / "b"), "select uid, policy_version from trajectories")
    assert set(trajectories(home / "b")) == {uid for uid, _ in rows}
    assert set(trajectories(home / "b", "6")) == {uid for uid, version in rows if version == 3}


@pytest.mark.system
def test_a_chain_that_feeds_itself_ends(home: Path) -> None:
    collect.run(tiny(collect={"steps": 140, "policy": f"{home}/a@6"}), run=home / "a")
    learn(home / "a", home / "a" / "lake", 9)
    found = trace(home / "a")
    assert list(runs(found)) == [("a", 9)]
    itself = [b for b in found.lakes[0].behaviour if b.run]
    assert [b.note for b in itself] == ["its own lineage is shown above"]
    assert itself[0].versions == (6,)


def test_depth_ends_the_walk(home: Path) -> None:
    found = trace(home / "b", depth=1)
    assert list(runs(found)) == [("b", 12)]
    assert [b.note for b in found.lakes[0].behaviour] == ["not followed further"]


def test_what_expired_is_gone_with_its_reason(home: Path) -> None:
    lake = Lake(home / "b")
    first, second = (segment for (segment,) in query(lake, "select segment from segments order by segment")[1])
    remove(lake, time=7.0, reason="older than a day", segments=(first,))
    (uid,) = query(lake, f"select any_value(uid) from trajectories where segment = '{second}'")[1][0]
    before = sum(1 for _ in trajectories(home / "b"))
    remove(lake, time=8.0, reason="no use", trajectories={second: (uid,)})
    (drawn,) = trace(home / "b").lakes
    assert [(gone.segment, gone.reason, gone.time) for gone in drawn.gone] == [
        (first, "expired: older than a day", 7.0)
    ]
    assert drawn.segments == 2
    assert uid not in set(trajectories(home / "b"))
    assert drawn.trajectories == before - 1


@pytest.mark.system
def test_derived_trajectories_show_their_method_and_their_bases(tmp_path: Path) -> None:
    document = {**TINY, "env": {"name": "goal-frozen-lake", "size": 3, "holdout": 0}}
    settings = resolve(document, env_model=find_env_model)
    collect.run(settings, run=tmp_path / "g")
    relabel.run(settings, lake=tmp_path / "g" / "lake")
    train.run(settings, run=tmp_path / "g", lakes=[Source(tmp_path / "g" / "lake")])
    original, derived = trace(tmp_path / "g").lakes[0].sources
    assert original.relabel_method is None
    assert derived.relabel_method is not None
    assert derived.relabel_method.startswith("hindsight")
    _, rows = query(Lake(tmp_path / "g"), "select base_uid from trajectories where base_uid is not null")
    assert (derived.trajectories, derived.bases) == (len(rows), len({base for (base,) in rows}))
    assert derived.base_segments == original.segments


def test_a_selection_leaves_out_what_it_left_out(home: Path) -> None:
    settings = tiny(train={"steps": 3, "where": "policy_version = 6"})
    train.run(settings, run=home / "c", lakes=[Source(home / "b")])
    (drawn,) = trace(home / "c").lakes
    assert drawn.where == "policy_version = 6"
    assert [source.policy_version for source in drawn.sources] == [6]
    reader = Reader(Lake(home / "b"))
    assert {reader.read(uid).info.policy_version for uid in trajectories(home / "c")} == {6}


def test_a_lake_that_was_moved_is_found_where_the_user_says(home: Path) -> None:
    train.run(tiny(train={"steps": 3}), run=home / "c", lakes=[Source(home / "b" / "lake")])
    (home / "b" / "lake").rename(home / "elsewhere")
    with pytest.raises(InputMissing, match=r"is not at .*--lake"):
        trace(home / "c")
    assert trace(home / "c", lakes=[home / "elsewhere"]).lakes[0].steps == 260


def test_a_run_whose_policy_s_run_is_gone_says_so(home: Path) -> None:
    shutil.rmtree(home / "a")
    (behaviour,) = trace(home / "b").lakes[0].behaviour
    assert behaviour.run == str(home / "a")
    assert "no longer at" in behaviour.note


@pytest.mark.parametrize(("which", "error"), [("77", InputMissing), ("best", InputMissing), ("x", UsageError)])
def test_a_checkpoint_that_is_not_there(home: Path, which: str, error: type) -> None:
    with pytest.raises(error):
        trace(home / "a", which)


def test_a_name_is_split_at_its_last_sign(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "a@b").record("train", tiny())
    assert split(f"{tmp_path}/a@b") == (tmp_path / "a@b", "latest")
    assert split(f"{tmp_path}/a@b@7") == (tmp_path / "a@b", "7")
    assert split("runs/x@best") == (Path("runs/x"), "best")
