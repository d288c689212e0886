from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import amago_cli
from amago_cli import checkup
from tests.cli.conftest import Amago

ROOT = Path(amago_cli.__file__).parent.parent
GROUPS = {"test", "dev", "docs", "bench", "clients", "suites", "trackers"}  # of tools, or of other extras


def described(monkeypatch: pytest.MonkeyPatch, requires: dict[str, list[str]], versions: dict[str, str]) -> None:
    """Let packages say that they require `requires`, and be installed in `versions`."""

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(checkup.metadata, "requires", lambda name: requires.get(name, []))
    monkeypatch.setattr(checkup.metadata, "version", version)


def problems(extra: str) -> list[str]:
    return [found for found in checkup._find_unmet("amago", extra, set()) if found is not None]


def test_an_extra_of_extras_needs_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = {"amago": ['amago[one]; extra == "both"', 'thing; extra == "one"']}
    described(monkeypatch, requires, {})
    assert problems("both") == ["thing is not installed"]
    described(monkeypatch, requires, {"thing": "1.0"})
    assert problems("both") == []


def test_an_extra_of_another_package_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = {"amago": ['suite[games]; extra == "one"'], "suite": ['engine; extra == "games"', 'docs; extra == "x"']}
    described(monkeypatch, requires, {"suite": "1.0"})
    assert problems("one") == ["engine is not installed"]


def test_the_wrong_version_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    described(monkeypatch, {"amago": ['thing>=2,<3; extra == "one"']}, {"thing": "1.4"})
    assert problems("one") == ["thing is 1.4, not <3,>=2"]


def test_modules_that_do_not_import_are_problems() -> None:
    assert "No module named 'no_such_module'" in (checkup._explain_import(("json", "no_such_module")) or "")
    assert checkup._explain_import(("json",)) is None


def test_an_extra_that_is_there_in_part_is_noted_with_what_is_missing(
    amago: Amago, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        checkup.Extra(name="whole", problem=None, is_found=True),
        checkup.Extra(name="part", problem="engine is not installed", is_found=True),
        checkup.Extra(name="other", problem="other is not installed", is_found=False),
    ]
    monkeypatch.setattr("amago_cli.checkup.find_extras", lambda: found)
    subjects = amago("doctor", "--output", "json").json["metrics"]
    assert subjects["extras"]["detail"].startswith("whole; not installed: other")
    assert subjects["extra part"]["status"] == "note"
    assert "engine is not installed" in subjects["extra part"]["detail"]


def test_every_extra_names_the_modules_that_it_brings() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for extra in set(document["project"]["optional-dependencies"]) - GROUPS:
        assert checkup.list_modules(extra), extra
