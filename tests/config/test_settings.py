from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError

from pipelines.config.base import Change, find_models
from pipelines.config.changes import STAGE_TABLES, find_mark, may_change
from pipelines.config.load import _validate, assign, parse_assignment, resolve
from pipelines.config.settings import Settings, StageSettings
from pipelines.errors import UsageError
from pipelines.rollout.environment import find_env_model


def models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for inner in find_models(field.annotation):
            yield from models(inner)


def test_defaults_are_valid_and_settings_are_frozen() -> None:
    settings = Settings()
    with pytest.raises(ValidationError):
        settings.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("model", sorted(set(models(Settings)), key=lambda model: model.__name__))
def test_every_model_refuses_unknown_keys_or_keeps_them_for_another_to_check(model: type[BaseModel]) -> None:
    assert model.model_config.get("frozen")
    assert model.model_config.get("extra") in ("forbid", "allow")


def test_stages_own_tables_that_exist() -> None:
    assert {table for tables in STAGE_TABLES.values() for table in tables} <= Settings.model_fields.keys()


@pytest.mark.parametrize(
    ("key", "scores", "changes", "in_collect"),
    [
        ("collect.workers", True, True, True),
        ("track.to", True, True, True),
        ("size", True, True, True),
        ("train.steps", False, True, True),
        ("lake.max_bytes", False, True, True),
        ("collect.greedy", False, False, True),
        ("exploration.start", False, False, True),
        ("train.batch_size", False, False, False),
        ("agent.sequence.d_model", False, False, False),
        ("env.corridor", False, False, False),
        ("stages.0.steps", False, False, False),
        ("collect.no_such_key", False, False, False),
    ],
)
def test_a_mark_says_what_another_invocation_may_change(
    key: str, scores: bool, changes: bool, in_collect: bool
) -> None:
    assert (find_mark(key) is Change.PACING) == scores
    assert (may_change(key), may_change(key, stage="collect")) == (changes, in_collect)


def test_marks_are_on_settings_only() -> None:
    assert find_mark("") is None
    assert find_mark("collect.steps.x") is find_mark("collect.steps")  # as of a table below a marked one


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


def numeric_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, set[type]]]:
    """Yield the dotted key of every number and boolean of the settings, and which of the types it accepts."""
    for name, field in model.model_fields.items():
        types = set(kinds(field.annotation))
        if types:
            yield f"{prefix}{name}", types
        for inner in find_models(field.annotation):
            if not get_origin(field.annotation) and inner is type(field.default):
                yield from numeric_fields(inner, f"{prefix}{name}.")


def kinds(annotation: Any) -> Iterator[type]:
    if annotation in (int, float, bool):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, Annotated):
        for part in get_args(annotation):
            yield from kinds(part)


FIELDS = dict(numeric_fields(Settings))


def test_numbers_of_all_tables_are_tested() -> None:
    assert {
        "seed",
        "train.steps",
        "train.learning_rate",
        "train.packing",
        "collect.steps",
        "train.publish",
    } <= FIELDS.keys()
    assert len(FIELDS) > 120


@pytest.mark.parametrize("value", [True, False, "5", "1.5", "true", "yes", 1, 0, 2.5])
def test_numbers_and_booleans_are_what_they_are_written_as(value: Any) -> None:
    """`true` is not 1, "5" is not 5, and 1 is not `true`, wherever the value comes from."""
    accepted, refused = [], []
    for key, types in FIELDS.items():
        if key in ("collect.tasks", "collect.opponents", "evaluate.opponents") and isinstance(value, str):
            continue  # the name of a task or a policy
        document: dict[str, Any] = {}
        assign(document, key.split("."), value)
        _, problems = _validate(document, find_env_model)
        is_of_type = type(value) in types or (type(value) is int and float in types)
        if not is_of_type and not any(key.rpartition(".")[2] in problem for problem in problems):
            accepted.append(key)
        if is_of_type and any(f"{key}: input should be a valid" in problem for problem in problems):
            refused.append(key)
    assert (accepted, refused) == ([], [])


@pytest.mark.parametrize(("key", "value"), [("train.steps", 2e4), ("collect.steps", 1e6), ("seed", np.int64(7))])
def test_a_whole_number_may_be_written_as_a_float(key: str, value: Any) -> None:
    document: dict[str, Any] = {}
    assign(document, key.split("."), value)
    table, _, name = key.rpartition(".")
    settings = Settings.model_validate(document)
    found = getattr(getattr(settings, table) if table else settings, name)
    assert (found, type(found)) == (int(value), int)


@pytest.mark.parametrize("text", ["corridor=true", 'corridor="5"', 'start="0"'])
def test_parameters_of_environments_are_strict_as_well(text: str) -> None:
    with pytest.raises(UsageError):
        resolve({"env": {"name": "tmaze"}}, [parse_assignment(f"env.{text}")], env_model=find_env_model)


def test_a_boolean_in_another_spelling_is_shown_as_toml_writes_it() -> None:
    _, problems = _validate({"train": {"compile": "True"}}, find_env_model)
    assert problems == ["train.compile: input should be a valid boolean, got 'True'; write true"]


def test_number_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(UsageError, match="1 error in the configuration"):
        resolve({"train": {"learning_rate": 10**400}}, env_model=find_env_model)
