from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from pipelines.config.recipes import read_shipped_recipes
from pipelines.envs.make import requirement
from tests.cli.conftest import Amago
from tests.tiers import some


def test_the_list_says_what_each_recipe_is_about(amago: Amago) -> None:
    recipes = amago("examples", "--output", "json").json["metrics"]["recipes"]
    assert list(recipes) == list(read_shipped_recipes())
    assert all(recipe["about"] for recipe in recipes.values())
    assert recipes["cartpole"]["extra"] is None
    assert recipes["cartpole"]["installed"] is True
    assert recipes["lunarlander"]["extra"] == "box2d"


def test_the_list_says_which_extra_is_needed_and_is_missing(amago: Amago, monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, words in ((None, "[box2d], not installed"), (object(), "[box2d]")):
        monkeypatch.setattr("pipelines.envs.suites.gym.find_spec", lambda module, found=installed: found)
        line = next(line for line in amago("examples").out.splitlines() if line.startswith("lunarlander "))
        assert line.endswith(words)


def test_a_profile_is_printed_as_it_lies_over_its_recipe(amago: Amago) -> None:
    recipe = read_shipped_recipes()["quickstart"]
    shown = amago("examples", "quickstart", "--profile", "smoke")
    assert shown.code == 0, shown.err
    Path("mine.toml").write_text(shown.out)
    document = tomllib.loads(shown.out)
    assert document["profile"] == "smoke"
    assert document["epochs"] == recipe["profiles"]["smoke"]["epochs"]
    assert document["env"]["name"] == recipe["env"]["name"]
    assert (
        amago("run", "mine.toml", "--dry-run").out
        == amago("run", "quickstart", "--profile", "smoke", "--dry-run", "--run", "runs/mine").out
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quickstart", "--profile", "smk"], "did you mean 'smoke'"),
        (["--profile", "smoke"], "--profile needs the name of a recipe"),
    ],
)
def test_a_profile_that_is_not_there_is_a_usage_error(amago: Amago, arguments: list[str], words: str) -> None:
    failed = amago("examples", *arguments)
    assert failed.code == 2
    assert words in failed.err


@pytest.mark.parametrize("name", some(read_shipped_recipes(), 0, 1, 2))
def test_a_printed_recipe_is_toml_that_resolves(amago: Amago, name: str) -> None:
    shown = amago("examples", name)
    assert tomllib.loads(shown.out) == read_shipped_recipes()[name]
    resolved = amago("run", name, "--dry-run")
    extra, installed = requirement(read_shipped_recipes()[name]["env"]["name"])
    if resolved.code == 3:  # an environment's parameters are checked by its suite, which must be there
        assert not installed
        assert f'pip install "amago[{extra}]"' in resolved.err
    else:
        assert resolved.code == 0, resolved.err


def test_an_unknown_recipe_is_a_usage_error(amago: Amago) -> None:
    assert amago("examples", "nope").code == 2
