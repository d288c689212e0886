from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from pipelines.config.load import resolve
from pipelines.config.recipes import describe_recipe

RECIPE: dict[str, Any] = {
    "train": {"steps": 50, "learning_rate": 1e-3},
    "stages": [{"stage": "train"}],
    "profiles": {"smoke": {"train": {"steps": 5}}},
}


def env_model(name: str) -> type[BaseModel]:
    raise AssertionError(name)


def departures(*assignments: tuple[str, Any], recipe: dict[str, Any] = RECIPE) -> dict[str, Any]:
    given = [(key.split("."), value) for key, value in assignments]
    settings = resolve(recipe, given, env_model=env_model)
    return describe_recipe("maze", recipe, given, settings, env_model=env_model)


def test_only_changed_settings_are_listed() -> None:
    assert departures() == {"name": "maze", "profile": "", "changed": {}}
    found = departures(("train.steps", 7), ("seed", 3), ("profile", "smoke"))
    assert found == {"name": "maze", "profile": "smoke", "changed": {"seed": [0, 3], "train.steps": [5, 7]}}


def test_a_size_is_one_change_whatever_it_stands_for() -> None:
    assert departures(("size", "tiny"))["changed"] == {"size": ["", "tiny"]}
    found = departures(recipe=RECIPE | {"size": "tiny"})
    assert found["changed"] == {}
