"""A run that is trained on exactly the trajectories that a checkpoint of another run was trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from pipelines.config.run_directory import RunDirectory
from pipelines.errors import InputMissing, UsageError
from pipelines.lake import lineage
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.store import Lake
from pipelines.learning import checkpoint as checkpoints
from pipelines.report.lineage_tree import Node
from pipelines.runs.summary import summarize_runs
from pipelines.stages import library as stages
from pipelines.stages import run as chain
from tests.stages.recipes import tiny


@pytest.fixture
def trained(trained: Path) -> Path:
    """A run of its own: the record of a copy names the lake of the run that it was copied from."""
    [lake] = RunDirectory(trained).load_record()["lakes"]
    RunDirectory(trained).update_record(lakes=[{**lake, "lake": str(trained / "lake")}])
    return trained


def grow(run: Path, steps: int = 40) -> None:
    """Collect more, and rewrite the segments that were there."""
    stages.collect(run=run, add=steps)
    compact(Lake(run), grace_seconds=0)
    stages.collect(run=run, add=steps)


def assert_equal_weights(one: Path, other: Path) -> None:
    left, right = (checkpoints.load(run / "checkpoints").weights for run in (one, other))
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=0, atol=0, msg=name)


@pytest.mark.system
@pytest.mark.parametrize(
    "drawn", [{}, {"train.where": "length > 3", "train.weight": "length / sum(length) over ()"}], ids=["all", "some"]
)
def test_training_equals_one_on_the_lake_as_it_was(trained: Path, tmp_path: Path, drawn: dict[str, str]) -> None:
    source, before, was, now = trained, tmp_path / "before", tmp_path / "was", tmp_path / "now"
    if drawn:
        source = tmp_path / "source"
        stages.train(trained, run=source, steps=6, settings=drawn)
    shutil.copytree(trained, before, symlinks=True)
    given = {"seed": 5, "train.checkpoint_every": 3, "train.half_life": 50.0}
    stages.train(before, run=was, steps=6, settings=given | drawn)
    grow(trained)
    stages.train(like=f"{source}@6", run=now, steps=3, settings=given)
    grow(trained)
    assert stages.train(run=now, steps=6).metrics["updates"] == 6
    assert_equal_weights(was, now)
    assert list(lineage.trajectories(now)) == list(lineage.trajectories(source, "6"))
    other = tmp_path / "other"  # the test can tell them apart
    stages.train(trained, run=other, steps=6, settings=given | drawn)
    with pytest.raises(AssertionError):
        assert_equal_weights(was, other)


@pytest.mark.system
def test_checkpoint_is_recorded_and_shown_as_a_parent_is(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "new"
    stages.train(like=str(trained), run=run, steps=1)
    stages.train(trained, steps=7)
    assert stages.train(like=str(trained), run=run, steps=2).metrics["updates"] == 2
    like = f"{RunDirectory(trained).identity}@6"
    assert RunDirectory(run).load_document()["train"]["like"] == f"{trained}@6"
    assert summarize_runs([run])[0]["like"] == like
    assert Node.of_checkpoint(lineage.trace(run)).children[0].text == f"trained on what {like} was trained on"
    with pytest.raises(UsageError, match="differs from that of its last train"):
        stages.train(like=f"{trained}@7", run=run, steps=3)


@pytest.mark.system
def test_run_that_has_begun_does_not_need_the_other_one(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "new"
    stages.train(like=str(trained), run=run, steps=1)
    shutil.rmtree(trained / "checkpoints")
    assert stages.train(run=run, steps=2).metrics["updates"] == 2
    assert stages.train(like=f"{trained}@6", run=run, steps=3).metrics["updates"] == 3


def test_it_begins_with_other_weights_and_settings_if_told_so(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "new"
    given = {"init.source": str(trained), "train.batch_size": 2}
    stages.train(like=str(trained), run=run, steps=1, settings=given)
    document, record = RunDirectory(run).load_document(), RunDirectory(run).load_record()
    assert (document["train"]["batch_size"], document["train"]["context_length"]) == (2, 5)
    assert record["weights_from"] == record["like"] == {"policy": RunDirectory(trained).identity, "update": 6}


def test_expired_trajectories_are_counted_and_nothing_is_written(trained: Path, tmp_path: Path) -> None:
    run, lake = tmp_path / "new", Lake(trained)
    [[count]] = [list(row.values()) for row in lake.sql("select count(*) from trajectories")]
    uid = next(lineage.trajectories(trained))
    expire(lake, RetentionLimits(where=f"uid = '{uid}'"))
    with pytest.raises(InputMissing, match=f"'{lake.name}' no longer has 1 of its {count} trajectories") as caught:
        stages.train(like=str(trained), run=run, steps=1)
    assert "protect" in str(caught.value.hint)
    assert not (run / "config.toml").exists()
    assert not (run / "checkpoints").exists()


@pytest.mark.system
def test_predicate_that_depends_on_what_was_added_is_refused(trained: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    where = "length >= (select avg(length) from trajectories)"
    stages.train(trained, run=source, steps=1, settings={"train.where": where})
    stages.train(like=str(source), run=tmp_path / "same", steps=1)  # nothing was added
    assert list(lineage.trajectories(tmp_path / "same")) == list(lineage.trajectories(source))
    stages.collect(run=trained, add=20)
    with pytest.raises(UsageError, match="depends on other trajectories"):
        stages.train(like=str(source), run=tmp_path / "new", steps=1)


def test_another_selection_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        stages.train(like=str(trained), run=tmp_path / "new", steps=1, settings={"train.where": "success"})
    with pytest.raises(UsageError) as caught:
        stages.train(like=str(trained), run=tmp_path / "new", steps=1, settings={"train.follow": True})
    assert "like is a fixed set" in caught.value.problems[0]


def test_moved_lake_is_named_and_another_one_is_refused(trained: Path, tmp_path: Path) -> None:
    source, moved, other = tmp_path / "source", tmp_path / "moved", tmp_path / "other"
    stages.train(trained, run=source, steps=1)
    shutil.copytree(trained / "lake", other)
    header = json.loads((other / "lake.json").read_text())
    (other / "lake.json").write_text(json.dumps({**header, "id": "0" * 32}))
    (trained / "lake").rename(moved)
    with pytest.raises(InputMissing, match="is not at") as caught:
        stages.train(like=str(source), run=tmp_path / "new", steps=1)
    assert caught.value.hint == "say where it is: --from-lake LAKE"
    with pytest.raises(InputMissing, match="it did not draw from"):
        stages.train(other, like=str(source), run=tmp_path / "new", steps=1)
    assert stages.train(moved, like=str(source), run=tmp_path / "new", steps=1).metrics["updates"] == 1


@pytest.mark.parametrize(
    ("like", "words"),
    [("{}@5", "has not kept checkpoint 5"), ("nothing", "no run at 'nothing'"), ("{}@x", "'x' is not a checkpoint")],
)
def test_checkpoint_that_is_not_there_is_refused(trained: Path, tmp_path: Path, like: str, words: str) -> None:
    with pytest.raises((InputMissing, UsageError), match=words):
        stages.train(like=like.format(trained), run=tmp_path / "new", steps=1)
    assert not (tmp_path / "new").exists()


def test_chain_refuses_it(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"train\.like: a chain trains on the lakes that it fills"):
        chain.run(tiny(train={"like": str(trained)}, stages=[{"stage": "train"}]), run=tmp_path / "chain")


def test_fresh_training_forgets_where_the_old_one_came_from(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "new"
    stages.train(like=str(trained), run=run, steps=1, settings={"init.source": str(trained)})
    given = {"train.like": "", "init.source": ""}
    stages.train(trained, run=run, steps=1, settings=given, fresh=True)
    assert not {"like", "weights_from"} & RunDirectory(run).load_record().keys()
