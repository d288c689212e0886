"""The suggestion after a command: what it says, and when it says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from amago_cli.next_step import suggest_command
from amago_cli.render.output import Document
from pipelines.stages.result import Result
from tests.cli.conftest import Amago

RUN = Path("runs/a b")


@pytest.mark.parametrize(
    ("result", "step"),
    [
        (Result(command="collect", run=RUN), "amago train --from-lake 'runs/a b'"),
        (Result(command="collect", lake="s3://bucket/x", status="skipped"), "amago train --from-lake s3://bucket/x"),
        (Result(command="relabel", lake="lakes/x"), "amago train --from-lake lakes/x"),
        (Result(command="train", run=RUN), "amago evaluate 'runs/a b'"),
        (Result(command="evaluate", run=RUN), "amago watch 'runs/a b'"),
        (Result(command="run", run=Path("runs/x")), "amago report runs/x"),
        (Result(command="sweep", run=RUN), "amago compare 'runs/a b' --to curves.png"),
        (Result(command="tune", run=RUN, outputs=["runs/t/best.toml"]), "amago run runs/t/best.toml"),
        (Result(command="run", run=RUN, outputs=[RUN, RUN / "report.html"]), "amago watch 'runs/a b'"),
        (Result(command="report", run=Path("runs/x")), "amago export runs/x"),
        (Result(command="export", run=RUN, outputs=[RUN / "export"]), "amago evaluate 'runs/a b/export'"),
    ],
)
def test_result_suggests_the_next_stage(result: Result, step: str) -> None:
    assert suggest_command(result) == step


@pytest.mark.parametrize(
    "outcome",
    [Result(command="lake info"), Result(command="train", run=RUN, status="failed"), Document(text="x")],
)
def test_answers_and_failures_suggest_nothing(outcome: Result | Document) -> None:
    assert suggest_command(outcome) is None


@pytest.mark.parametrize(
    ("env", "option"),
    [
        ("tmaze", ""),
        ("gym:CartPole-v1", ""),
        ("mymaze:Maze", " --env mymaze:Maze"),
        ("gym:mine:X-v0", " --env gym:mine:X-v0"),
    ],
)
def test_evaluating_an_environment_of_the_user_s_own_names_its_module(tmp_path: Path, env: str, option: str) -> None:
    (tmp_path / "config.toml").write_text(f'env.name = "{env}"\n')
    assert suggest_command(Result(command="train", run=tmp_path)) == f"amago evaluate {tmp_path}{option}"


def test_an_exported_page_is_opened(tmp_path: Path) -> None:
    (tmp_path / "page.html").touch()
    assert suggest_command(Result(command="export", outputs=[tmp_path])) == f"python -m webbrowser {tmp_path}/page.html"


def test_relabelling_the_lake_of_a_run_suggests_the_run(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    assert (
        suggest_command(Result(command="relabel", lake=str(tmp_path / "lake"))) == f"amago train --from-lake {tmp_path}"
    )


def test_suggestion_is_on_stderr_and_neither_quiet_nor_in_json(amago: Amago) -> None:
    words = ("collect", "--env", "tmaze", "--steps", 22, "--actors", 2, "--workers", 0)
    done = amago(*words)
    assert "next: amago train --from-lake runs/tmaze" in done.err.splitlines()
    assert "next:" not in done.out
    assert "next:" not in amago(*words, "-q").err + amago(*words, "--output", "json").err
