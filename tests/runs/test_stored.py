from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.errors import InputMissing
from pipelines.runs.stored import read_run
from tests.runs.factory import make_run


def test_a_run_is_read_as_its_files_say(tmp_path: Path) -> None:
    settings = {"seed": 7, "env": {"name": "tmaze"}, "train": {"learning_rate": 3e-4}}
    run = read_run(make_run(tmp_path / "maze", scores={10: 0.5, 20: 0.75}, settings=settings))
    assert (run.name, run.env, run.seed, run.updates, run.env_steps) == ("maze", "tmaze", 7, 40, 400)
    assert run.changed == {"train.learning_rate": (1e-4, 3e-4)}
    assert [each.update for each in run.evaluations] == [10, 20]
    assert run.problems == ()
    assert run.damaged_evaluations == ()


def test_the_recipe_and_what_differs_from_it_are_those_recorded(tmp_path: Path) -> None:
    recipe = {"name": "quickstart", "profile": "smoke", "changed": {"train.steps": [20, 30], "seed": [0, 3]}}
    run = read_run(make_run(tmp_path / "q", recipe=recipe))
    assert run.recipe == "quickstart (smoke)"
    assert run.changed == {"train.steps": (20, 30)}


def test_no_run_is_an_error_with_a_hint(tmp_path: Path) -> None:
    make_run(tmp_path / "maze")
    with pytest.raises(InputMissing, match="maze"):
        read_run(tmp_path / "mase")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\x00", b"[" * 100_000, b'{"stages": 5, "recipe": []}'])
def test_a_damaged_record_does_not_hide_the_rest_of_a_run(tmp_path: Path, content: bytes) -> None:
    path = make_run(tmp_path / "maze", scores={10: 0.5})
    (path / "run.json").write_bytes(content)
    run = read_run(path)
    assert run.updates == 40
    assert run.state.status == "interrupted"
    assert run.recipe == ""
    assert len(run.evaluations) == 1


def test_files_of_another_kind_are_reported_and_not_waited_for(tmp_path: Path) -> None:
    path = make_run(tmp_path / "maze", scores={10: 0.5})
    for name in ("run.json", "metrics.jsonl", "evaluations/000010-9318ba67.json"):
        (path / name).unlink()
        os.mkfifo(path / name)
    (path / "config.toml").write_text("seed = ")
    run = read_run(path)
    assert len(run.problems) == 2
    assert run.damaged_evaluations == ("evaluations/000010-9318ba67.json is damaged",)
    assert run.updates is None
    assert run.seed is None
    assert run.metrics.rows == 0


@pytest.mark.parametrize("damage", [{"metrics": 5}, {"update": "x"}, {"metrics": None}])
def test_evaluations_of_another_form_are_listed_as_damaged(tmp_path: Path, damage: dict[str, object]) -> None:
    path = make_run(tmp_path / "maze", scores={10: 0.5, 20: 0.75})
    file = path / "evaluations" / "000010-9318ba67.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    run = read_run(path)
    assert [each.update for each in run.evaluations] == [20]
    assert len(run.damaged_evaluations) == 1


@pytest.mark.system
def test_reading_runs_imports_neither_torch_nor_pyarrow() -> None:
    code = (
        "import sys, pipelines.runs.stored, pipelines.runs.find; print({'torch', 'pyarrow', 'duckdb'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_updates_are_those_of_the_newest_checkpoint_if_it_was_saved_between_lines_of_the_log(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", lines=4)
    assert read_run(path).updates == 40
    for name in ("000030", "000047", ".tmp-000099-12", "best"):
        (path / "checkpoints" / name).mkdir(parents=True)
        (path / "checkpoints" / name / "checkpoint.json").write_text("{}")
    (path / "checkpoints" / "000055").mkdir()  # half written
    assert read_run(path).updates == 47
