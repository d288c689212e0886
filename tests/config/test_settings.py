from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import BaseModel, ValidationError

from pipelines.config.changes import EXTENSIBLE, STAGE_TABLES
from pipelines.config.problems import _models_in
from pipelines.config.settings import Settings, StageSettings


def models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for inner in _models_in(field.annotation):
            yield from models(inner)


def test_defaults_are_valid_and_settings_are_frozen() -> None:
    settings = Settings()
    with pytest.raises(ValidationError):
        settings.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("model", sorted(set(models(Settings)), key=lambda model: model.__name__))
def test_every_model_refuses_unknown_keys_or_keeps_them_for_another_to_check(model: type[BaseModel]) -> None:
    assert model.model_config.get("frozen")
    assert model.model_config.get("extra") in ("forbid", "allow")


def test_every_named_key_exists() -> None:
    fields = Settings.model_fields
    assert {table for tables in STAGE_TABLES.values() for table in tables} <= fields.keys()
    for key in EXTENSIBLE:
        table, _, name = key.partition(".")
        assert table in fields
        assert not name or name in type(fields[table].default).model_fields


def test_an_entry_of_a_chain_overrides_its_own_table_only() -> None:
    settings = Settings.model_validate({"train": {"steps": 7}, "stages": [{"stage": "train", "steps": 3}]})
    entry = settings.stages[0]
    assert entry.overrides == {"steps": 3}
    assert settings.for_stage(entry).train.steps == 3
    assert settings.for_stage(entry).collect == settings.collect
    assert settings.for_stage(StageSettings(stage="train")) is settings


def test_the_environment_keeps_its_parameters_apart() -> None:
    settings = Settings.model_validate({"env": {"name": "tmaze", "corridor": 3}})
    assert (settings.env.name, settings.env.params) == ("tmaze", {"corridor": 3})


def test_copies_that_would_all_be_alike_are_refused() -> None:
    with pytest.raises(ValueError, match="'copies' of hindsight:final would all be alike"):
        Settings.model_validate({"relabel": {"relabeler": "hindsight:final", "copies": 3}})
    Settings.model_validate({"relabel": {"relabeler": ["hindsight:random"], "copies": 3}})
