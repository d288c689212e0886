"""`amago init` writes a project whose own test passes and whose recipe runs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.cli.conftest import Amago

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def project(amago: Amago) -> Path:
    made = amago("init", "my-maze")
    assert made.code == 0, made.err
    assert "next: cd my-maze && pytest && amago run recipe.toml --minutes 2" in made.out
    return Path("my-maze").resolve()


def test_the_files_are_named_after_the_project(project: Path) -> None:
    assert {path.name for path in project.iterdir()} == {"my_maze.py", "recipe.toml", "test_my_maze.py"}
    text = "".join(path.read_text() for path in project.iterdir())
    assert "my_env" not in text
    assert "MyEnv" not in text
    classes = [
        node.name for node in ast.parse((project / "my_maze.py").read_text()).body if isinstance(node, ast.ClassDef)
    ]
    assert classes == ["MyMaze"]
    assert tomllib.loads((project / "recipe.toml").read_text())["env"]["name"] == "my_maze:MyMaze"


@pytest.mark.system
def test_the_recipe_runs_and_the_test_passes(project: Path) -> None:
    """As a user types it, in processes of their own: a module of the current directory is found."""
    run = "import sys; from amago_cli.app import main; sys.exit(main(['run', 'recipe.toml', '--steps', '600', '-q']))"
    checked = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for command in (["-P", "-c", run], checked):
        done = subprocess.run(
            [sys.executable, *command], cwd=project, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert (project / "runs/recipe/report.html").is_file()


def test_what_it_wrote_in_json(amago: Amago) -> None:
    made = amago("init", "mine", "--output", "json").json
    assert made["outputs"] == ["mine/mine.py", "mine/recipe.toml", "mine/test_mine.py"]
    Path("empty").mkdir()
    assert amago("init", "empty").code == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("full", "'full' already exists"),
        ("json", "a module 'json' is already installed"),
        ("1maze", "'1maze' is not a valid name for a Python module"),
        ("class", "'class' is not a valid name for a Python module"),
        ("a/b c!", "'b c!' is not a valid name for a Python module"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(amago: Amago, name: str, words: str) -> None:
    Path("full").mkdir()
    Path("full/mine.txt").write_text("x")
    refused = amago("init", name)
    assert refused.code == 2, refused.err
    assert words in refused.err
    assert [path.name for path in Path().iterdir()] == ["full"]
    assert [path.name for path in Path("full").iterdir()] == ["mine.txt"]
