"""Unknown gymnasium ids: the module of an installed package is named, and none is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipelines.envs.gymnasium_env import explain_unknown_id
from pipelines.envs.make import make
from pipelines.errors import UsageError


def install(
    site: Path, name: str, module: str, source: str, *, requires: str = "gymnasium>=1", points: str = ""
) -> None:
    """Write a package as an installer does; importing it would be noticed."""
    package, info = site / module, site / f"{name.replace('-', '_')}-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "registration.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {requires}\n")
    (info / "RECORD").write_text(f"{module}/__init__.py,,\n{module}/registration.py,,\n{info.name}/METADATA,,\n")
    if points:
        (info / "entry_points.txt").write_text(points)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


REGISTERS = "from gymnasium import register\nregister(id='odd-road-v0', entry_point='x:Y')\n"


def test_the_module_that_registers_an_id_is_named_and_not_imported(site: Path) -> None:
    install(site, "odd-road", "oddroad", REGISTERS)
    with pytest.raises(UsageError, match=r"unknown environment 'gym:odd-road-v0'; .* give gym:oddroad:odd-road-v0$"):
        make("gym:odd-road-v0", num_envs=1, seed=0)
    assert not [name for name in sys.modules if name.startswith("oddroad")]


def test_a_package_that_only_offers_entry_points_is_searched(site: Path) -> None:
    install(site, "odd", "odd", REGISTERS, requires="numpy", points="[gymnasium.envs.__root__]\nodd = odd:register\n")
    assert explain_unknown_id("odd-road-v0").endswith("give gym:odd:odd-road-v0")


def test_packages_that_do_not_need_gymnasium_are_left_alone(site: Path) -> None:
    install(site, "odd-other", "oddother", REGISTERS, requires="numpy")
    assert "oddother" not in explain_unknown_id("odd-road-v0")


def test_a_package_of_a_similar_name_is_named(site: Path) -> None:
    install(site, "odd-road", "oddroad", "")
    hint = explain_unknown_id("odd-roads-v3")
    assert "gym:MODULE:odd-roads-v3" in hint
    assert "installed is odd-road, whose module is oddroad" in hint


@pytest.mark.parametrize("id", ["../x", "(", "a" * 10_000, "NoSuch/Thing-v0", "", "é-v0"])
def test_any_text_is_answered(site: Path, id: str) -> None:
    install(site, "odd-road", "oddroad", REGISTERS)
    assert "gym:MODULE:" in explain_unknown_id(id)


def test_damaged_packages_are_passed_over(site: Path) -> None:
    install(site, "odd-road", "oddroad", REGISTERS)
    info = next(site.glob("*.dist-info"))
    (info / "METADATA").write_bytes(b"\xff\xfe")
    (info / "RECORD").write_text("missing/file.py,,\n")
    assert "gym:MODULE:" in explain_unknown_id("odd-road-v0")


def test_what_gymnasium_itself_means_is_kept() -> None:
    with pytest.raises(UsageError, match="Did you mean: `CartPole`"):
        make("gym:CartPoles-v1", num_envs=1, seed=0)
