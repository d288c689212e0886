"""README and the tutorial, typed whole and in order in a fresh directory.

The default tier types the commands of amago alone, in this process, with fewer steps and with smoke profiles; the slow
tier types every line as it stands in a shell, and expects each to exit with 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Amago
from tests.cli.pages import ROOT, Typed, install, script, typed

PAGES = ("README.md", "docs/tutorial.md")
PLUGINS = "CONTRIBUTING.md"


def shorter(words: list[str]) -> list[str]:
    """The arguments of a command that does the same with less."""
    command, *rest = words
    budget = next((rest.index(option) for option in ("--minutes", "--steps") if option in rest), None)
    if command == "run" and budget is not None:
        return [command, *rest[:budget], "--steps", "300", *rest[budget + 2 :]]
    if command == "run" and "--profile" not in rest:
        return [*words, "--profile", "smoke", "--run", f"runs/{Path(rest[0]).stem}"]
    shares = {"collect": {"--steps": 10, "--add": 10}, "train": {"--steps": 200}, "evaluate": {"--episodes": 10}}
    short = list(words)
    for option, share in shares.get(command, {}).items():
        if option in words:
            place = words.index(option) + 1
            short[place] = str(max(int(words[place]) // share, 1))
    if "--require" in words:
        del short[words.index("--require") : words.index("--require") + 2]
    return short


@pytest.fixture
def own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of the directories that a page makes are forgotten after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in ("mymaze", "corridor", "plugins"):
        if name not in before:
            sys.modules.pop(name, None)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize("page", [*PAGES, PLUGINS])
def test_the_commands_of_a_page_follow_one_another(page: str, amago: Amago) -> None:
    for one in typed(page):
        if one.file:
            Path(one.file).write_text(one.text)
        elif one.language == "sh":
            for part in one.text.split("&&"):
                _type(Typed(one.place, part.strip(), "sh"), amago)


def _type(one: Typed, amago: Amago) -> None:
    """Type one command of amago, or change the directory."""
    if one.words[0] == "cd":
        os.chdir(one.words[1])
    elif one.words[0] == "amago":
        done = amago(*shorter(one.words[1:]), "--output", "json")
        assert done.code == 0, f"{one.place}: {done.err}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_typed_from_top_to_bottom_exits_with_0_at_every_line(page: str, tmp_path: Path) -> None:
    commands, home = tmp_path / "bin", tmp_path / "amago"
    commands.mkdir()
    home.mkdir()
    install(commands)
    environment = os.environ | {"PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment["CHECKOUT"] = str(home.resolve())
    done = subprocess.run(
        ["bash"], input=script(page), cwd=home, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_every_command_of_a_page_can_fail_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n```sh\ntrue && true  # fine\nfalse && true\ntouch after\n```\n")
    done = subprocess.run(["bash"], input=script(str(page)), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{page}:5 exits with 1, not 0" in done.stderr
    assert not (tmp_path / "after").exists()
