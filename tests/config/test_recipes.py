from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config import recipes
from pipelines.config.load import resolve
from pipelines.errors import InputMissing, UsageError
from pipelines.stages.environment import env_model

FILE = '[one]\nabout = "first"\n[two]\nabout = "second"\n'


@pytest.mark.parametrize("name", recipes.shipped_recipes())
def test_every_shipped_recipe_resolves_and_says_what_it_is_about(name: str) -> None:
    settings = resolve(recipes.shipped_recipes()[name], env_model=env_model)
    assert settings.about
    assert settings.stages
    assert settings.env.name


def test_a_name_a_file_and_a_table_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    assert recipes.find(str(path)) == ("mine", {"one": {"about": "first"}, "two": {"about": "second"}})
    assert recipes.find(f"{path}:two") == ("two", {"about": "second"})
    name = next(iter(recipes.shipped_recipes()))
    assert recipes.find(name) == (name, recipes.shipped_recipes()[name])


def test_a_written_configuration_has_the_name_of_its_run(tmp_path: Path) -> None:
    (tmp_path / "cartpole").mkdir()
    (tmp_path / "cartpole" / "config.toml").write_text("seed = 3")
    assert recipes.find(str(tmp_path / "cartpole" / "config.toml")) == ("cartpole", {"seed": 3})


def test_what_is_not_there_is_named_with_what_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    with pytest.raises(UsageError, match=r"no recipe 'three'.*it has: one, two"):
        recipes.find(f"{path}:three")
    with pytest.raises(UsageError, match="unknown recipe 'zzz'"):
        recipes.find("zzz")
    with pytest.raises(InputMissing, match="no configuration file"):
        recipes.find(str(tmp_path / "absent.toml"))


def test_the_recipes_are_found_inside_the_package_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "pipelines"
    package.mkdir(parents=True)
    monkeypatch.setattr(recipes.resources, "files", lambda name: package)
    with pytest.raises(InputMissing, match="install amago again"):
        recipes.shipped_path()
    (package.parent / "examples.toml").write_text("")
    assert recipes.shipped_path() == package.parent / "examples.toml"
    (package / "examples.toml").write_text("")
    assert recipes.shipped_path() == package / "examples.toml"
