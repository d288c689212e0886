from __future__ import annotations

import json
import uuid
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from amago_cli.invocation import Invocation
from amago_cli.render.output import Document, JsonOutput, Rows, TextOutput, dumps, figure
from pipelines.stages.result import Result, Table

RESULT = Result(
    command="evaluate",
    run=Path("runs/a"),
    metrics={"episodes": 1500, "return_mean": np.float32(0.5), "return_ci95": (0.25, 0.75), "per_task": {"x": 1}},
    outputs=(Path("runs/a/evaluations/1.json"),),
    tables=(Table(title="attempts", columns=("attempt", "success"), rows=((1, 0.25), (2, None))),),
    seconds=12.34,
)


def test_text_shows_figures_tables_and_files(capsys: pytest.CaptureFixture[str]) -> None:
    TextOutput(Invocation()).show(RESULT)
    assert capsys.readouterr().out.splitlines() == [
        "evaluate: done in 12.3 s -> runs/a",
        "  episodes     1,500",
        "  return_mean  0.5",
        "  return_ci95  [0.25, 0.75]",
        "",
        "attempts",
        "attempt  success",
        "────────────────",
        "      1     0.25",
        "      2        -",
        "  wrote runs/a/evaluations/1.json",
    ]


def test_json_has_every_field_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    JsonOutput(Invocation(command="evaluate")).show(RESULT)
    assert json.loads(capsys.readouterr().out) == {
        "schema": "amago/1",
        "command": "evaluate",
        "status": "done",
        "run": "runs/a",
        "lake": None,
        "metrics": {"episodes": 1500, "return_mean": 0.5, "return_ci95": [0.25, 0.75], "per_task": {"x": 1}},
        "outputs": ["runs/a/evaluations/1.json"],
        "seconds": 12.34,
    }


def test_rows_are_a_table_or_a_list_of_objects(capsys: pytest.CaptureFixture[str]) -> None:
    rows = Rows(columns=("uid", "seed"), rows=[("a", 1000003), ("b", None)])
    TextOutput(Invocation()).show(rows)
    assert capsys.readouterr().out.splitlines()[2:] == ["a    1000003", "b          -"]
    JsonOutput(Invocation()).show(rows)
    assert json.loads(capsys.readouterr().out) == [{"uid": "a", "seed": 1000003}, {"uid": "b", "seed": None}]


def test_a_document_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    document = Document(text="[a]\nb = 1\n", fields={"settings": {"a": 1}}, status="skipped")
    TextOutput(Invocation()).show(document)
    assert capsys.readouterr().out == "[a]\nb = 1\n"
    JsonOutput(Invocation(command="run")).show(document)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["status"], shown["settings"]) == ("skipped", {"a": 1})


def test_json_is_strict() -> None:
    value = {"nan": float("nan"), "array": np.arange(2), "path": Path("x"), "uid": uuid.UUID(int=1), 1: True}
    assert json.loads(dumps(value)) == {
        "nan": None,
        "array": [0, 1],
        "path": "x",
        "uid": "00000000-0000-0000-0000-000000000001",
        "1": True,
    }
    assert json.loads(dumps(datetime(2020, 1, 2))) == "2020-01-02 00:00:00"


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "yes"), (12345, "12,345"), (0.123456, "0.1235"), ([1, 2.5], "[1, 2.5]"), ([], "none"), ("x", "x")],
)
def test_figures_are_short(value: object, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize("value", [None, float("nan"), {"a": 1}, [1, 2, 3], [{"a": 1}]])
def test_what_needs_a_table_is_no_figure(value: object) -> None:
    assert figure(value) is None


COLLECTED = Result(
    command="collect",
    run=Path("runs/a"),
    metrics={"steps": 0, "return_mean": 0.0, "steps_per_second": 0.0, "damaged": [], "dry_run": False, "whole": True},
    outputs=(Path("runs/a/lake"),),
    seconds=0.5,
)


def test_counts_of_nothing_are_left_out_and_a_mean_of_nothing_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    TextOutput(Invocation()).show(COLLECTED)
    assert capsys.readouterr().out.splitlines() == [
        "collect: done in 0.5 s -> runs/a",
        "  return_mean  0",
        "  whole        yes",
        "  wrote runs/a/lake",
    ]
    JsonOutput(Invocation()).show(COLLECTED)
    assert json.loads(capsys.readouterr().out)["metrics"]["steps"] == 0


def test_nothing_to_do_has_written_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    TextOutput(Invocation()).show(replace(COLLECTED, status="skipped", seconds=0.0))
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == "collect: nothing to do -> runs/a"
    assert "wrote" not in shown


def test_quiet_prints_no_result_of_an_action_but_every_answer(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = TextOutput(Invocation(quiet=True))
    quiet.show(COLLECTED)
    quiet.show(replace(COLLECTED, status="skipped", seconds=0.0))
    assert capsys.readouterr().out == ""
    quiet.show(replace(COLLECTED, command="lake info", seconds=0.0))
    assert "return_mean" in capsys.readouterr().out
    JsonOutput(Invocation(command="collect", quiet=True)).show(COLLECTED)
    assert json.loads(capsys.readouterr().out)["command"] == "collect"
