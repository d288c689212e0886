from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from amago_cli import checkup
from tests.cli.conftest import Amago


@pytest.mark.system
def test_this_installation_works(amago: Amago) -> None:
    shown = amago("doctor", "--output", "json")
    assert shown.code == 0, shown.err
    subjects = shown.json["metrics"]
    assert {"amago", "package pipelines", "torch", "device", "threads", "attention", "disk"} <= set(subjects)


def test_a_missing_dependency_is_exit_1_with_the_table(amago: Amago, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "_CORE", ("torch", "no-such-package"))
    monkeypatch.setattr(checkup, "find_extras", list)  # each is imported in a process
    failed = amago("doctor")
    assert failed.code == 1
    assert "no-such-package" in failed.err
    assert "not installed" in failed.out


@pytest.mark.system
def test_a_folder_that_could_shadow_the_engine_is_noted(amago: Amago) -> None:
    Path("pipelines").mkdir()
    assert amago("doctor", "--output", "json").json["metrics"]["package pipelines"]["status"] == "note"


@pytest.mark.system
def test_little_disk_space_is_noted(amago: Amago, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert amago("doctor", "--output", "json").json["metrics"]["disk"]["status"] == "note"
