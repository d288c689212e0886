"""What a call imports before it answers: help and mistakes come at once, however slow the libraries are to import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from amago_cli.app import command
from tests.cli.conftest import Amago, _prepared, amago, small  # noqa: F401

pytestmark = pytest.mark.system

# Standard modules that are slow to import, and that help does not need.
SLOW = {"asyncio", "decimal", "hashlib", "http.client", "logging", "multiprocessing", "secrets", "socket", "webbrowser"}
LIBRARIES = {"torch", "numpy", "gymnasium", "duckdb", "pyarrow", "pydantic", "optuna", "rich", "starlette", "tqdm"}
PROBE = """
import json, shutil, sys
from amago_cli.app import main
found = []
for words in json.loads(sys.argv[1]):
    code = main(words)
    found.append([code, sorted(sys.modules)])
    shutil.rmtree("runs", ignore_errors=True)
sys.stdout.flush()
print("\\n" + json.dumps(found))
"""


def modules(*words: object) -> tuple[int, set[str]]:
    """Call amago in a process of its own; return its exit code and the modules that it has imported."""
    [found] = modules_of_calls([words])
    return found


def modules_of_calls(calls: Sequence[Sequence[object]]) -> list[tuple[int, set[str]]]:
    """Call amago several times in one process; return the exit code of each call, and what is imported after it."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([[str(word) for word in words] for words in calls])],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    return [(code, set(names)) for code, names in json.loads(done.stdout.splitlines()[-1])]


def typer_modules() -> set[str]:
    text = "import sys, typer; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout.split())


def test_help_imports_little_more_than_its_parser() -> None:
    code, found = modules("--help")
    assert code == 0
    assert not found & LIBRARIES
    assert not (found - typer_modules()) & SLOW


@pytest.mark.parametrize("words", [("--version",), ("lake", "--help"), ("runs", "--help"), ("train", "--help")])
def test_help_of_a_command_imports_no_library_of_the_engine(words: tuple[str, ...]) -> None:
    code, found = modules(*words)
    assert code == 0
    assert not found & (LIBRARIES - {"pydantic"})  # the parser itself uses that to read options


# A mistake of every command: none needs more than arguments, configuration and paths.
MISTAKES: dict[str, list[tuple[object, ...]]] = {
    "init": [("init", "1x/2")],
    "collect": [
        ("collect",),
        ("collect", "--env", "nothing"),
        ("collect", "--env", "bandit", "--steps", "many"),
        ("collect", "--env", "bandit", "--set", "collect.x=1"),
        ("collect", "--from", "a.hdf5", "--policy", "random"),
        ("collect", "--run", "small", "--engine", "ray", "--add", 5),
        ("collect", "--run", "small", "--env", "bandit"),
    ],
    "relabel": [("relabel",), ("relabel", "--from-lake", "nothing"), ("relabel", "--from-lake", "small", "-s", "x=1")],
    "train": [
        ("train",),
        ("train", "--from-lake", "nothing"),
        ("train", "--from-lake", "small", "--set", "train.steps=true"),
        ("train", "--from-lake", "small", "--steps", 5, "--add", 5),
        ("train", "--from-lake", "small", "--size", "tiny", "--set", "train.batch_size=7"),
    ],
    "evaluate": [
        ("evaluate", "nothing"),
        ("evaluate", "small", "--episodes", "x"),
        ("evaluate", "small", "--require", "x"),
        ("evaluate", "small", "--to", "videos"),
        ("evaluate", "small", "--form", "onnx"),
        ("evaluate", "small", "--checkpoint", 7),
        ("evaluate", "small", "--checkpoint", "newest"),
        ("evaluate", "packed", "--checkpoint", 3),
        ("evaluate", "packed", "--set", "evaluate.x=1"),
        ("evaluate", "packed", "--video", 1),
    ],
    "export": [
        ("export", "nothing"),
        ("export", "small", "--format", "foo"),
        ("export", "small", "--where", "success"),
        ("export", "small", "--checkpoint", 7),
        ("export", "small", "--checkpoint", "best"),
        ("export", "small", "--set", "export.x=1"),
        ("export", "packed"),
        ("export", "packed", "--to", "packed"),
    ],
    "run": [("run", "nothing"), ("run", "quickstart", "--profile", "nothing")],
    "sweep": [("sweep", "nothing"), ("sweep", "quickstart", "--vary", "seed=1,2")],
    "tune": [("tune", "quickstart"), ("tune", "quickstart", "--space", "nothing.toml")],
    "serve": [("serve", "nothing"), ("serve", "packed", "--port", "x")],
    "compare": [("compare", "nothing")],
    "report": [("report", "nothing")],
    "view": [("view", "nothing")],
    "watch": [("watch", "nothing")],
    "verify": [("verify", "nothing"), ("verify", "small")],
    "envs": [("envs", "nothing")],
    "examples": [("examples", "nothing")],
    "settings": [("settings", "nothing")],
    "doctor": [("doctor", "x")],
    "completion": [("completion", "x")],
    "lake": [
        ("lake", "info", "nothing"),
        ("lake", "sql", "nothing"),
        ("lake", "sql", "nothing", "select 1"),
        ("lake", "verify", "nothing"),
        ("lake", "expire", "small"),
        ("lake", "copy", "nothing", "else"),
    ],
    "runs": [("runs", "rm", "nothing"), ("runs", "nothing"), ("runs", "prune", "nothing")],
}


def test_mistakes_of_all_commands_are_listed() -> None:
    assert set(MISTAKES) == set(command().commands)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_before_torch_is_imported(
    amago: Amago,  # noqa: F811
    small: Path,  # noqa: F811
    name: str,
) -> None:
    if any("packed" in words for words in MISTAKES[name]):
        assert amago("export", small, "--to", "packed").code == 0
    for words, (code, found) in zip(MISTAKES[name], modules_of_calls(MISTAKES[name]), strict=True):
        assert code in (2, 3), (words, code)
        assert "torch" not in found, words
