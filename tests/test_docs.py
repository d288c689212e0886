"""The documentation's site, as far as it can be checked without building it: `mkdocs build --strict` does the rest."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from amago_cli.app import command as whole
from pipelines.config.recipes import read_shipped_recipes
from pipelines.config.settings import Settings
from pipelines.stages.recipe import requirement
from tests.test_architecture import LAYERS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_navigation_lists_every_page(site: ModuleType) -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = re.findall(r"[\w-]+\.md", navigation)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted({*pages, *site.PAGES, "commands.md"})


def test_the_reference_of_commands_describes_every_command(site: ModuleType) -> None:
    reference = site.commands()
    command = whole()
    names = {"amago", *(f"amago {name}" for name in command.commands)}
    names |= {f"amago {group} {name}" for group in ("lake", "runs") for name in command.commands[group].commands}
    assert set(re.findall(r"^## `(.*)`$", reference, re.MULTILINE)) == names
    assert reference.count("-h, --help") == len(names)


@pytest.mark.parametrize(
    ("page", "link", "target"),
    [
        ("index.md", "docs/lake.md", "lake.md"),
        ("index.md", "docs/curves.png", "curves.png"),
        ("index.md", "CONTRIBUTING.md", "contributing.md"),
        ("lake.md", "../README.md#two-commands", "index.md#two-commands"),
        ("lake.md", "tutorial.md", "tutorial.md"),
        ("contributing.md", "docs/settings.md", "settings.md"),
        ("contributing.md", "https://example.com/docs/x.md", "https://example.com/docs/x.md"),
    ],
)
def test_links_of_the_repository_lead_to_pages_of_the_site(site: ModuleType, page: str, link: str, target: str) -> None:
    assert site.for_site(f"[text]({link})", page) == f"[text]({target})"


@pytest.mark.system
def test_readme_names_recipes_with_the_extras_they_need() -> None:
    rows = re.findall(r"^\|(?:[^|]*\|){4}([^|]*)\|([^|]*)\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    shown = {
        name: extra
        for names, extras in rows[2:]  # after the header and the line below it
        for name, extra in zip(re.findall(r"`(.*?)`", names), re.findall(r"none|[\w,]+(?=`)", extras), strict=True)
    }
    assert len(shown) > 15
    assert shown == {name: requirement(read_shipped_recipes()[name])[0] or "none" for name in shown}


def test_the_architecture_page_lists_the_layers_in_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = [re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)]
    listed = [package for row in rows for package in row]
    assert sorted(listed) == sorted(package for packages in LAYERS for package in packages if package != "nearest")
    level = {package: number for number, packages in enumerate(LAYERS) for package in packages}
    assert [level[package] for package in listed] == sorted(level[package] for package in listed)


def test_the_migration_page_names_settings_with_their_defaults() -> None:
    defaults = dict(
        re.findall(
            r"^\| `([\w.]+)` \| (`.*?`|required|unset) \|", (ROOT / "docs/settings.md").read_text(), re.MULTILINE
        )
    )
    page = (ROOT / "docs" / "migrating.md").read_text().partition("### Settings")[2].partition("###")[0]
    rows = re.findall(r"^\| (`[A-Z].*?) \| .*? \| `([\w.]+)`.*? \| (.+?) \|$", page, re.MULTILINE)
    assert len(rows) > 50
    differing = {
        ours: stated for _, ours, stated in rows if not stated.startswith(defaults.get(ours, "no such setting"))
    }
    assert differing == {}


def test_the_recipe_of_the_migration_page_is_valid() -> None:
    [text] = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "migrating.md").read_text(), re.DOTALL)
    settings = Settings.model_validate(tomllib.loads(text))
    assert (settings.collect.steps, settings.stages[2].every) == (24 * 500, 10)


# results.md is written by its benchmark.
USER_PAGES = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "results.md"]


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.name)
def test_numbers_below_one_have_their_zero(page: Path) -> None:
    prose = re.sub(r"^```.*?^```|`[^`]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"(?<![\w.)\]/*~$-])-?\.\d.{0,20}", prose) == []


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.name)
def test_extras_are_installed_in_one_way(page: Path) -> None:
    """`-e ".[x]"` works in a clone only; `amago[x]` adds to the amago that is installed, a clone too, anywhere."""
    found = re.findall(r"pip install\s+[^\s`]*\[\w+\][^\s`]*", page.read_text())
    assert [text for text in found if not re.fullmatch(r'pip install\s+"amago\[\w+\]"[),;:.]*', text)] == []
