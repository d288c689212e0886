"""SQL over many runs. User SQL runs in a helper process, one for all of these tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipelines.errors import UsageError
from pipelines.lake.sql.sandbox import LimitReached, QueryLimits
from pipelines.runs.summary import summarize_runs
from pipelines.runs.tables import query, select_rows
from tests.runs.factory import make_run

pytestmark = pytest.mark.system


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    settings = [{"seed": seed, "train": {"learning_rate": 10.0**-seed}} for seed in (3, 4)]
    metrics = ("loss", "q@0.9")
    found = [
        make_run(Path(f"run-{place}"), scores={10: place / 10, 40: place / 5}, settings=each, metrics=metrics)
        for place, each in enumerate(settings, 1)
    ]
    with (found[0] / "metrics.jsonl").open("a") as file:
        file.write('{"update": "x"}\n[]\n{"update": 50, "stage": "train", "loss": NaN}\n{"update": 60, "sta')
    return found


def test_every_line_of_the_logs_is_there(runs: list[Path]) -> None:
    columns, rows = query(
        runs, 'select run, count(*), sum("q@0.9"), max("update") from metrics group by run order by run'
    )
    assert columns[0] == "run"
    total = pytest.approx(1 / 10 + 1 / 20 + 1 / 30 + 1 / 40)
    assert rows == [("run-1", 5, total, 50.0), ("run-2", 4, total, 40.0)]


def test_settings_and_evaluations_join_with_runs(runs: list[Path]) -> None:
    text = """
        select s.value::double, r.score, e.return_low, e.env_steps from runs r join settings s using (run)
        join evaluations e using (run) where s.key = 'train.learning_rate' and e."update" = 40 order by 1
    """
    assert query(runs, text)[1] == [(1e-4, 0.4, pytest.approx(0.3), 400.0), (1e-3, 0.2, pytest.approx(0.1), 400.0)]


def test_all_columns_of_all_tables_can_be_shown(runs: list[Path]) -> None:
    for table in ("runs", "settings", "evaluations", "metrics"):
        columns, rows = query(runs, f"select * from {table}")
        assert rows
        assert "run" in columns
    assert len(query(runs, "show tables")[1]) == 4


def test_no_runs_are_empty_tables(runs: list[Path]) -> None:
    assert query([], "select count(*), max(score) from runs")[1] == [(0, None)]
    assert query([], "select count(*) from metrics")[1] == [(0,)]
    assert query([], 'select run, stage, "update" from metrics')[1] == []


def test_runs_are_chosen_by_an_expression(runs: list[Path]) -> None:
    rows = summarize_runs(runs)
    assert [row["run"] for row in select_rows(rows, "score > 0.3 and state = 'finished'")] == ["run-2"]
    assert select_rows(rows, "score > 5") == []
    for text, message in {"scor > 1": "scor", "1": "predicate", "true; select 1": "SQL", "*": "one value"}.items():
        with pytest.raises(UsageError, match=message):
            select_rows(rows, text)


@pytest.mark.parametrize(
    "text",
    [
        "select * from read_text('/etc/hostname')",
        "select * from read_ndjson('metrics.jsonl')",
        "select * from 'run-1/metrics.jsonl'",
        "copy runs to 'stolen.csv'",
        "attach 'x.duckdb'",
        "set enable_external_access = true",
        "select 1; select 2",
        "install httpfs",
        "",
    ],
)
def test_a_query_can_neither_reach_a_file_nor_change_anything(runs: list[Path], text: str) -> None:
    query(runs, "select 1")  # makes the cache
    before = sorted(Path().rglob("*"))
    with pytest.raises(UsageError):
        query(runs, text)
    assert sorted(Path().rglob("*")) == before


def test_a_query_is_stopped_at_its_limit(runs: list[Path]) -> None:
    endless = "with recursive x as (select 1 as i union all select i + 1 from x) select max(i) from x"
    with pytest.raises(LimitReached):
        query(runs, endless, limits=QueryLimits(seconds=0.2, megabytes=256))
    assert query(runs, "select count(*) from runs")[1] == [(2,)]


def test_a_log_that_is_a_pipe_is_not_waited_for(runs: list[Path]) -> None:
    (runs[0] / "metrics.jsonl").unlink()
    os.mkfifo(runs[0] / "metrics.jsonl")
    assert query(runs, "select distinct run from metrics")[1] == [("run-2",)]


def test_names_of_foreign_logs_are_data(tmp_path: Path, runs: list[Path]) -> None:
    with (runs[0] / "metrics.jsonl").open("a") as file:
        file.write('\n{"update": 70, "stage": "train", "x\\": 1}, y": 3, "\'); drop table runs; --": 4, "run": 9}\n')
    (row,) = query(runs, 'select * from metrics where "update" = 70')[1]
    assert {3.0, 4.0} <= set(row)
    assert "run-1" in row
