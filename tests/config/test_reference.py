from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pipelines.config import reference
from pipelines.config.load import assign
from pipelines.config.recipes import read_shipped_recipes
from pipelines.config.settings import Settings
from pipelines.errors import UsageError

SCHEMA = reference.make_schema()
_PYTHON = {"integer": int, "number": int | float, "boolean": bool, "string": str, "array": list, "object": dict}


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether `value` is valid by those keywords of JSON Schema that ours uses for its structure."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return fits(value, SCHEMA if name == "#" else SCHEMA["$defs"][name])
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, _PYTHON[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        return False
    if isinstance(value, list):
        return all(fits(item, schema.get("items", {})) for item in value)
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        return all(
            fits(item, known[key]) if key in known else others is True or (others and fits(item, others))
            for key, item in value.items()
        )
    return True


@pytest.mark.parametrize("name", read_shipped_recipes())
def test_every_recipe_fits_the_schema(name: str) -> None:
    assert fits(read_shipped_recipes()[name], SCHEMA)


def test_what_a_run_writes_fits_the_schema() -> None:
    assert fits(Settings().document(), SCHEMA)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.stpes", 3),
        ("train.steps", "many"),
        ("agent.sequence.d_modle", 64),
        ("agent.trace", "long"),
        ("profiles.smoke.train.stpes", 3),
    ],
)
def test_a_mistake_does_not_fit_the_schema(key: str, value: Any) -> None:
    document: dict[str, Any] = {}
    assign(document, key.split("."), value)
    assert not fits(document, SCHEMA)


def test_every_setting_has_a_meaning_and_says_what_it_accepts() -> None:
    for setting in reference.list_settings():
        assert setting.about, setting.key
        assert setting.accepts not in ("", "any"), setting.key


def test_the_defaults_are_those_of_the_settings() -> None:
    listed = {setting.key: setting.default for setting in reference.list_settings()}
    assert listed["train.steps"] == "1000"
    assert listed["train.device"] == '"auto"'
    assert listed["agent.critic.kind"] == "unset"
    assert reference.find_default("agent.sequence.kind") == "transformer"


def test_a_key_a_table_and_the_end_of_a_key_are_found() -> None:
    assert [setting.key for setting in reference.find("train.steps")] == ["train.steps"]
    assert {setting.table for setting in reference.find("export")} == {"export"}
    assert {"agent.actor.hidden", "agent.critic.hidden"} < {setting.key for setting in reference.find("hidden")}
    assert {setting.kind for setting in reference.find("agent.sequence.num_layers")} >= {"transformer", "gru"}


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("train.stpes", "did you mean 'train.steps'?"),
        ("learning_rat", "did you mean 'train.learning_rate'?"),
        ("env.corridor", "amago envs ENV lists them"),
        ("zzz", "amago settings lists all"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(key: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        reference.find(key)
    assert caught.value.hint == hint
