from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines.config.run_directory import RunDirectory
from pipelines.runs import summary as module
from pipelines.runs.summary import COLUMNS, format_setting, measure_disk, summarize_runs
from tests.runs.factory import make_run, write_evaluation


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "cache"))


def test_a_row_has_every_column(tmp_path: Path) -> None:
    recipe = {"name": "tmaze-20", "profile": "", "changed": {"train.steps": [5, 7], "env.name": ["a", "b"]}}
    path = make_run(tmp_path / "run", scores={10: 0.75, 20: 0.5}, settings={"env": {"name": "tmaze"}}, recipe=recipe)
    (row,) = summarize_runs([path])
    assert row.keys() == COLUMNS.keys()
    assert (row["run"], row["recipe"], row["env"], row["state"]) == (str(path), "tmaze-20", "tmaze", "finished")
    assert (row["score"], row["score_low"], row["score_high"]) == (0.5, 0.4, 0.6)
    assert (row["best"], row["best_update"], row["evaluations"]) == (0.75, 10, 2)
    assert (row["changed"], row["updates"], row["env_steps"], row["progress"]) == ("train.steps=7", 40, 400, 1.0)
    assert 0 <= row["age"] < 3600
    assert row["bytes"] == measure_disk(path) > 0


def test_another_metric_gives_other_scores(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", scores={10: 0.75})
    assert summarize_runs([path])[0]["score"] == 0.75
    assert summarize_runs([path], metric="episodes")[0]["score"] == 50
    assert summarize_runs([path], metric="nothing")[0]["score"] is None


def test_an_unchanged_run_is_not_read_a_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [make_run(tmp_path / name, scores={10: 0.75}) for name in ("a", "b")]
    first = summarize_runs(paths)
    read: list[Path] = []
    monkeypatch.setattr(module, "read_run", lambda path: read.append(path) or pytest.fail(f"read {path}"))
    second = summarize_runs(paths)
    assert [row | {"age": 0} for row in first] == [row | {"age": 0} for row in second]
    assert not read


def test_a_changed_run_is_read_again_and_a_running_one_is_live(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", scores={10: 0.75})
    summarize_runs([path])
    write_evaluation(path, 30, 0.9)
    assert summarize_runs([path])[0]["score"] == 0.9
    with RunDirectory(path).lock("run"):
        (path / "progress.json").write_text(json.dumps({"share": 0.25, "seconds_left": 30.0}))
        (row,) = summarize_runs([path])
    assert (row["state"], row["progress"], row["seconds_left"]) == ("running", 0.25, 30.0)
    (row,) = summarize_runs([path])
    assert (row["state"], row["progress"], row["seconds_left"]) == ("finished", 1.0, None)


@pytest.mark.parametrize("damage", [b"", b"not a database" * 100])
def test_a_damaged_cache_is_replaced(tmp_path: Path, damage: bytes) -> None:
    path = make_run(tmp_path / "run", scores={10: 0.75})
    summarize_runs([path])
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(damage)
    for _ in range(2):
        assert summarize_runs([path])[0]["score"] == 0.75
    assert file.read_bytes().startswith(b"SQLite format 3")


def test_a_run_whose_name_the_locale_hides_is_cached(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r\udcc3\udcb6", scores={10: 0.75})
    for _ in range(2):
        assert summarize_runs([path])[0]["score"] == 0.75


def test_without_a_place_for_the_cache_runs_are_listed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "file"))
    assert summarize_runs([make_run(tmp_path / "run", scores={10: 0.75})])[0]["score"] == 0.75


def test_a_damaged_run_is_a_row_with_its_problems(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", scores={10: 0.75})
    (path / "run.json").write_text("{")
    (path / "config.toml").write_text("=")
    (path / "evaluations" / "000010-9318ba67.json").write_text("")
    (row,) = summarize_runs([path])
    assert row["state"] == "interrupted"
    assert all(name in row["problems"] for name in ("config.toml", "run.json", "000010-9318ba67.json"))


def test_targets_of_links_are_not_counted_as_space(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "file").write_bytes(b"0" * 100_000)
    path = make_run(tmp_path / "run")
    before = measure_disk(path)
    (path / "lake").symlink_to(tmp_path / "large")
    assert measure_disk(path) < before + 50_000


def test_values_are_written_briefly() -> None:
    assert [format_setting(value) for value in (0.001234567, True, "uniform", "a b", "", None, [1])] == [
        *("0.00123457", "true", "uniform", '"a b"', '""', "(unset)", "[1]")
    ]
