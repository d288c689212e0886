"""Stages as calls of a program: what they default to and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.errors import InputMissing, UsageError
from pipelines.lake.store import Lake
from pipelines.stages.library import (
    choose_training_run,
    collect,
    evaluate,
    label_source,
    name_default_run,
    shares,
    train,
)


@pytest.mark.parametrize(
    ("name", "folder"),
    [("gym:CartPole-v1", "gym-CartPole-v1"), ("gym:ALE/Pong-v5", "gym-ALE-Pong-v5"), ("../..", "run"), ("a b", "a-b")],
)
def test_default_run_is_a_folder_of_runs(name: str, folder: str) -> None:
    assert name_default_run(name) == Path("runs") / folder


@pytest.mark.parametrize(
    ("source", "label"),
    [("d4rl:data/hopper-v2.hdf5", "hopper-v2"), ("parquet:logs/*.parquet", "logs"), ("own:", "own")],
)
def test_run_is_labelled_after_its_source(source: str, label: str) -> None:
    assert label_source(source) == label


def test_training_belongs_to_the_run_of_the_only_lake(tmp_path: Path) -> None:
    run = tmp_path / "maze"
    run.mkdir()
    (run / "config.toml").touch()
    assert choose_training_run([str(run)], None) == (run, run)
    assert choose_training_run([f"{run}:0.5", "other"], None) == (Path("runs/train"), run)
    assert choose_training_run(["s3://bucket/lake"], None) == (Path("runs/train"), None)
    assert choose_training_run([], Path("mine")) == (Path("mine"), None)


def test_training_without_a_lake_is_refused() -> None:
    with pytest.raises(UsageError, match="no lake given"):
        shares([], Path("run"))


def test_mistakes_are_listed_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        collect("tmaze", settings={"collect.stpes": 3, "seed": -1})
    assert len(caught.value.problems) == 2
    with pytest.raises(UsageError, match="exclude each other"):
        collect("tmaze", steps=1, add=1)
    with pytest.raises(UsageError, match="no environment given"):
        collect()
    with pytest.raises(InputMissing, match="no run at"):
        evaluate("runs/none")
    with pytest.raises(UsageError, match="no lake given"):
        train()
    assert not list(tmp_path.iterdir())


@pytest.mark.system
def test_repeated_collecting_resumes_and_add_collects_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    few = {"collect.actors": 4, "collect.workers": 0}
    assert collect("tmaze", steps=40, settings=few).run == Path("runs/tmaze")
    assert collect(run="runs/tmaze", steps=40).status == "skipped"
    assert collect(run="runs/tmaze", add=20).metrics["steps"] == 20
    assert len(Lake("runs/tmaze").sql("select * from steps")) >= 60
