from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import amago_cli
from amago_cli.app import build
from tests.cli.conftest import Amago

ROOT = Path(amago_cli.__file__).parent.parent
HEAVY = ("torch", "gymnasium", "duckdb", "pyarrow", "pydantic", "numpy", "vl_convert", "rich")


def commands() -> Iterator[tuple[str, Any]]:
    """Every command and group by its full name."""

    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        yield name, command
        for child, inner in getattr(command, "commands", {}).items():
            yield from walk(f"{name} {child}", inner)

    return walk("amago", build())  # not the one of `main`: parsing examples alone changes it


ALL = dict(commands())


def spawn(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False, **options
    )


@pytest.mark.parametrize("name", ALL)
def test_every_command_and_every_option_says_what_it_does(name: str) -> None:
    command = ALL[name]
    assert command.help
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{name}: {parameter.name} has no help"


@pytest.mark.parametrize("name", [name for name, command in ALL.items() if not hasattr(command, "commands")])
def test_every_command_shows_an_example_that_parses(name: str) -> None:
    found = re.search(rf"Example: ({name} .*|{name})$", ALL[name].help, re.MULTILINE)
    assert found, f"{name} has no example"
    words = shlex.split(found[1].partition(" > ")[0])
    ALL[name].make_context(name, words[len(name.split()) :])


def test_the_same_option_reads_the_same_everywhere() -> None:
    helps: dict[str, set[str]] = {}
    for command in ALL.values():
        for parameter in command.params:
            for option in parameter.opts:
                if option in ("--config", "--set", "--output", "--dry-run", "--quiet", "--from-lake", "--env"):
                    helps.setdefault(option, set()).add(parameter.help)
    assert all(len(texts) == 1 for texts in helps.values()), helps
    assert len(helps) == 7


def test_help_loads_nothing_heavy() -> None:
    code = (
        f"import sys\nfrom amago_cli.app import main\nmain(['--help'])\nprint([m for m in {HEAVY} if m in sys.modules])"
    )
    assert spawn("-c", code).stdout.splitlines()[-1] == "[]"


@pytest.mark.system
def test_help_answers_in_a_blink() -> None:
    """In a few times what Python takes to import typer, on a host of any speed."""

    def cpu_seconds(*arguments: str) -> float:
        before = os.times()
        assert spawn(*arguments).returncode == 0
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    both = [(cpu_seconds("-m", "amago_cli", "--help"), cpu_seconds("-c", "import typer.main")) for _ in range(4)]
    assert min(ours for ours, _ in both) < 4 * min(theirs for _, theirs in both)


def test_short_help_and_no_arguments_show_the_commands(amago: Amago) -> None:
    for arguments in (["-h"], ["lake", "-h"], ["collect", "-h"]):
        shown = amago(*arguments)
        assert shown.code == 0
        assert "Usage" in shown.out
    assert amago().out == amago("--help").out
    assert amago("lake").code == 2


def test_version(amago: Amago) -> None:
    shown = amago("--version")
    assert (shown.code, shown.out.split()[0]) == (0, "amago")


def test_an_unknown_command_is_a_usage_error_with_the_nearest_one(amago: Amago) -> None:
    failed = amago("colect")
    assert failed.code == 2
    assert "'collect'" in failed.err
    assert "Traceback" not in failed.err


def test_a_parse_error_is_json_too(amago: Amago) -> None:
    failed = amago("lake", "info", "--outptu", "--output", "json")
    assert failed.code == 2
    assert failed.json["status"] == "failed"
    assert failed.json["command"] == "lake info"
    assert failed.json["error"]["exit_code"] == 2


@pytest.mark.system
def test_a_reader_that_leaves_early_is_no_error(small: Path, amago: Amago) -> None:
    sql = "select * from range(200000)"
    pipe = f"{sys.executable} -m amago_cli lake sql small '{sql}' | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", pipe], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.stdout.split() == ["range", "141"]
    assert done.stderr == ""


@pytest.mark.system
def test_a_full_output_device_is_named(small: Path, amago: Amago) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "amago_cli", "lake", "ls", "."],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: No space left on device")
    assert "Traceback" not in done.stderr


def test_a_foreign_pipelines_package_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "__init__.py").write_text("raise RuntimeError('imported')")
    done = spawn("-m", "amago_cli", "examples", "--output", "json", cwd=tmp_path)
    assert done.returncode == 2
    assert f"'{tmp_path / 'pipelines'}' shadows" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["status"] == "failed"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["-q", "collect", "--env", "bandit", "--steps", "100", "--actors", "1", "--run", "r"], 0),
        (["--output", "json", "-q", "settings", "train.steps"], 0),
        (["--output=json", "lake", "ls"], 3),
        (["-v", "runs"], 0),
        (["--output", "json", "runs", "ls"], 0),
        (["-s", "train.x=1", "collect", "--env", "bandit", "--dry-run"], 2),
        (["--dry-run", "collect", "--env", "bandit"], 0),
        (["-c", "lake", "ls"], 2),  # "lake" is the file
        (["-q"], 2),
        (["--nothing", "collect"], 2),
    ],
)
def test_common_options_are_taken_before_and_after_the_command(amago: Amago, words: list[str], code: int) -> None:
    done = amago(*words)
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    if any(word.startswith("--output") for word in words):
        assert done.json is not None


@pytest.mark.system
def test_options_before_and_after_the_command_mean_the_same(amago: Amago) -> None:
    words = ("collect", "--env", "bandit", "--run", "r", "--dry-run")
    after = amago(*words, "--set", "collect.actors=3", "--output", "json").json
    before = amago("--set", "collect.actors=3", "--output", "json", *words).json
    again = {"seconds": 0, "measured": {}}  # how long something took
    assert before | again == after | again
