"""CONTRIBUTING.md: what it names exists, and what it says to type works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pipelines.config import reference
from tests.cli.pages import typed

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_path_exists() -> None:
    named = re.findall(r"[`(]((?:pipelines|amago_cli|tests|docs|\.ci)/[\w./-]*)", TEXT)
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_module_name_is_imported_from_where_it_is_said_to_be() -> None:
    """A name in capitals or of a class before a path in brackets is defined in that file."""
    pairs = re.findall(r"`([A-Z]\w+)`\s+\(`([\w./]+\.py)`\)", TEXT)
    assert pairs
    for name, path in pairs:
        assert re.search(rf"^(class {name}\b|{name}\b.*=)", (ROOT / path).read_text(), re.MULTILINE), (name, path)


def test_every_setting_exists() -> None:
    known = {setting.key for setting in reference.list_settings()}
    tables = {key.rpartition(".")[0] for key in known}
    named = re.findall(r"(?:--set|-s)\s+([a-z_.]+)=", TEXT) + re.findall(r"under\s+`([a-z_.]+)`", TEXT)
    assert named
    assert [key for key in named if key not in known | tables] == []


def test_every_marker_is_described() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = {marker.partition(":")[0] for marker in options["markers"]}
    described = set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE))
    assert described == markers - {"smoke"}
    quick = re.search(r"-m '([^']*)'", options["addopts"])
    assert quick is not None
    assert set(re.findall(r"not (\w+)", quick[1])) == described - {"trials", "extras"}  # these are in the quick tier


@pytest.mark.full
def test_a_command_is_a_file_and_a_name_in_the_application(tmp_path: Path) -> None:
    [program] = re.findall(r"```python\n# amago_cli/commands/count.py\n(.*?)```", TEXT, re.DOTALL)
    for package in ("amago_cli", "pipelines"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "amago_cli" / "commands" / "count.py").write_text(program)
    application = tmp_path / "amago_cli" / "app.py"
    text = application.read_text().replace("    collect,\n", "    collect,\n    count,\n", 1)
    application.write_text(text.replace("(init.init,)", "(init.init, count.count)", 1))
    code = "import sys; from amago_cli.app import main; sys.exit(main(sys.argv[1:]))"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    lake = tmp_path / "lake"
    make = f"from pipelines import Lake; Lake.create({str(lake)!r})"
    subprocess.run([sys.executable, "-P", "-c", make], env=environment, cwd=tmp_path, check=True)
    for arguments, words in (
        (["count", str(lake), "--output", "json"], '"trajectories": 0'),
        (["--help"], "Count the trajectories"),
    ):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert words in done.stdout


def test_the_page_has_commands_to_type() -> None:
    """`tests/cli/test_pages.py` types them."""
    found = list(typed("CONTRIBUTING.md"))
    assert {one.file for one in found} >= {"plugins.py"}
    assert sum(one.language == "sh" for one in found) >= 6


def test_ci_tests_every_python_that_is_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    matrix = re.search(r"^ +python: \[(.*)\]$", workflow, re.MULTILINE)
    assert matrix is not None
    assert re.findall(r"3\.\d+", matrix[1]) == named
    assert f"Linux with Python {named[0]} to {named[-1]} is supported" in (ROOT / "README.md").read_text()
    assert project["requires-python"] == f">={named[0]}"
