from __future__ import annotations

import tomllib

import pytest

from pipelines.config.recipes import shipped_recipes
from tests.cli.conftest import Amago


def test_the_list_says_what_each_recipe_is_about(amago: Amago) -> None:
    recipes = amago("examples", "--output", "json").json["metrics"]["recipes"]
    assert list(recipes) == list(shipped_recipes())
    assert all(recipes.values())


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_printed_recipe_is_toml_that_resolves(amago: Amago, name: str) -> None:
    shown = amago("examples", name)
    assert tomllib.loads(shown.out) == shipped_recipes()[name]
    resolved = amago("run", name, "--dry-run")
    assert resolved.code == 0, resolved.err


def test_an_unknown_recipe_is_a_usage_error(amago: Amago) -> None:
    assert amago("examples", "nope").code == 2
