from __future__ import annotations

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
