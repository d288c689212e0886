from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from amago_cli.commands.runs import table
from pipelines.runs.summary import COLUMNS
from tests.cli.conftest import Amago
from tests.runs.factory import make_run


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "cache"))


def test_a_row_for_each_run(amago: Amago) -> None:
    recipe = {"name": "quickstart", "profile": "smoke", "changed": {"train.learning_rate": [1e-3, 2e-3]}}
    make_run(Path("runs/a"), scores={10: 0.5, 20: 0.25}, recipe=recipe)
    make_run(Path("runs/b"), status="failed", error="no space left on the disk")
    shown = amago("runs")
    assert shown.code == 0
    for text in (
        *("runs/a", "quickstart (smoke)", "finished", "0.25 [0.15, 0.35]", "0.5 [0.4, 0.6] at 10"),
        *("train.learning_rate=0.002", "failed: no space left on the disk", "400"),
    ):
        assert text in shown.out
    assert amago("runs", "ls", "runs").out == shown.out


def test_rows_are_sorted_and_those_without_a_value_come_last(amago: Amago) -> None:
    for name, scores in {"a": {10: 0.1}, "b": None, "c": {10: 0.9}}.items():
        make_run(Path("runs") / name, scores=scores)
    for column, expected in {"score": "acb", "-score": "cab", "-run": "cba"}.items():
        rows = amago("runs", f"--sort={column}", "--output", "json").json["metrics"]["runs"]
        assert "".join(Path(row["run"]).name for row in rows) == expected
    wrong = amago("runs", "--sort", "scor")
    assert wrong.code == 2
    assert "'score'" in wrong.err


def test_csv_has_every_column(amago: Amago) -> None:
    make_run(Path("elsewhere/a"), scores={10: 0.5}, status="failed", error='a, "b"\nc')
    (row,) = csv.DictReader(io.StringIO(amago("runs", "elsewhere", "--output", "csv").out))
    assert row.keys() == COLUMNS.keys()
    assert (row["score"], row["reason"], row["seconds_left"]) == ("0.5", 'a, "b"\nc', "")


def test_no_runs_is_an_empty_list_and_a_missing_place_an_error(amago: Amago) -> None:
    assert amago("runs", "--output", "json").json["metrics"]["runs"] == []
    assert amago("runs").code == 0
    make_run(Path("runs/maze"))
    missing = amago("runs", "runs/mase", "--output", "json")
    assert missing.code == 3
    assert missing.json["command"] == "runs"
    assert "runs/maze" in missing.json["error"]["hint"]


def test_escapes_in_a_foreign_record_do_not_reach_the_terminal(amago: Amago) -> None:
    recipe = {"name": "\x1b[31mred", "changed": {"\x1b]0;title\x07": [1, "\x1b[2J"]}}
    make_run(Path("runs/a"), recipe=recipe, status="failed", error="\x1b[2Jgone\n\nsecond line")
    shown = amago("runs")
    assert shown.code == 0
    assert "\x1b" not in shown.out
    assert len(shown.out.splitlines()) == 3


@pytest.mark.system
def test_where_is_sql(amago: Amago) -> None:
    make_run(Path("runs/a"), scores={10: 0.1})
    make_run(Path("runs/b"), scores={10: 0.7})
    rows = amago("runs", "--where", "score > 0.5", "--output", "json").json["metrics"]["runs"]
    assert [row["run"] for row in rows] == ["runs/b"]
    assert amago("runs", "--where", "score >").code == 2


@pytest.mark.system
def test_listing_imports_neither_torch_nor_duckdb(amago: Amago) -> None:
    import subprocess
    import sys

    make_run(Path("runs/a"), scores={10: 0.1})
    code = (
        "import sys; from amago_cli.app import main; main(['runs']);"
        "print({'torch', 'duckdb', 'pyarrow', 'gymnasium'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_narrow_terminal_shows_fewer_columns() -> None:
    row = dict.fromkeys(COLUMNS) | {
        **{
            "run": "runs/maze",
            "recipe": "tmaze-20",
            "state": "failed",
            "reason": "no space",
            "changed": "train.steps=7",
        },
        **{"score": 0.5, "age": 90.0, "bytes": 1e6, "evaluations": 1, "scored_on": "test tasks"},
        **{"env_steps": 1000, "updates": 10, "seed": 3},
    }
    wide, narrow, narrowest = (table([row], width) for width in (None, 80, 10))
    assert len(wide.columns) == 13
    assert {"env steps", "updates"}.isdisjoint(narrow.columns)
    assert list(narrowest.columns) == ["run", "state", "score", "changed", "age"]
    assert narrowest.rows == [["runs/maze", "failed: no space", "0.5", "train.steps=7", "90s"]]


def test_a_run_of_this_user_is_known_before_it_is_listed(
    amago: Amago, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = amago("evaluate", small, "--episodes", 2, "--output", "json").json["metrics"]
    monkeypatch.setattr("pipelines.runs.summary.read_run", lambda path: pytest.fail("it was read"))
    (row,) = amago("runs", small, "--output", "json").json["metrics"]["runs"]
    assert (row["state"], row["score"]) == ("finished", evaluated["return_mean"])
