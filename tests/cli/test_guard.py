from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from amago_cli import guard


def test_ours_is_ours() -> None:
    assert guard.shadow() is None


def test_a_foreign_package_that_comes_first_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    for name in [name for name in sys.modules if name.split(".")[0] == "pipelines"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert guard.shadow() == tmp_path / "pipelines"
    assert str(tmp_path / "pipelines") in guard.explain(tmp_path / "pipelines")


def test_a_folder_without_code_does_not_shadow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pipelines").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert guard.shadow() is None


@pytest.mark.parametrize("name", ["torch.py", "duckdb/__init__.py", "gymnasium.py"])
@pytest.mark.parametrize("way", ["-m", "PYTHONPATH"])
def test_a_file_of_the_current_directory_that_is_named_like_a_library_is_not_executed(
    tmp_path: Path, name: str, way: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("open('executed', 'w')")
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root if way == "-m" else f".{os.pathsep}{root}"}
    call = "from amago_cli.app import main; raise SystemExit(main())"
    command = [sys.executable, *(["-m", "amago_cli"] if way == "-m" else ["-P", "-c", call]), "lake", "info", "x"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert name.partition("/")[0] in done.stderr
    assert not (tmp_path / "executed").exists()


def test_a_folder_of_data_that_is_named_like_a_library_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "torch")
    assert guard.shadow() is None


def test_another_system_is_refused_in_one_line() -> None:
    code = "import os; os.name = 'nt'; import amago_cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: amago runs on Linux and macOS; on Windows use it in WSL 2\n"
