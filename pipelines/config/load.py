"""From TOML files, recipes and `key=value` assignments to one validated `Settings` document.

Precedence: defaults < recipe or file < `--set` and named options. All faults are reported at once.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from pipelines.config.problems import describe, refuse, unknown_key
from pipelines.config.settings import STAGE_OVERRIDES, Settings
from pipelines.errors import InputMissing, UsageError

# Tables of which one key decides what the others may be: with another value there, the old others go.
# Each with its default: a document that does not name it means that one.
TAGS = {("env",): ("name", ""), ("agent", "sequence"): ("kind", "transformer")}

# Gives the model that validates an environment's own parameters, or raises UsageError for an unknown name.
EnvModel = Callable[[str], type[BaseModel]]


def read_toml(path: Path) -> dict[str, Any]:
    """The document in `path`. InputMissing if it cannot be read, UsageError with line and column if wrong."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError as error:
        raise InputMissing(f"no configuration file '{path}'") from error
    except (IsADirectoryError, PermissionError) as error:
        raise InputMissing(f"cannot read configuration '{path}': {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"'{path}' is not valid TOML: {error}") from error


def parse_assignment(text: str) -> tuple[list[str], Any]:
    """`train.window=45` -> (["train", "window"], 45). The value is TOML; a bare word is a string."""
    key, separator, value = text.partition("=")
    path = key.strip().split(".")
    if not separator or not all(path):
        raise UsageError(f"'--set {text}' is not of the form key=value", hint="e.g. --set train.window=45")
    try:
        return path, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return path, value.strip()


def merge(base: Mapping[str, Any], over: Mapping[str, Any], *, where: tuple[str, ...] = ()) -> dict[str, Any]:
    """`over` laid on `base`, table by table; neither is changed. A new tag (`TAGS`) drops old parameters."""
    merged = copy.deepcopy(dict(base))
    for key, value in over.items():
        old = merged.get(key)
        if not (isinstance(value, Mapping) and isinstance(old, Mapping)):
            merged[key] = copy.deepcopy(value)
        elif _is_retagged(old, value, (*where, key)):
            merged[key] = copy.deepcopy(dict(value))
        else:
            merged[key] = merge(old, value, where=(*where, key))
    return merged


def _is_retagged(old: Mapping[str, Any], new: Mapping[str, Any], where: tuple[str, ...]) -> bool:
    if where not in TAGS:
        return False
    tag, default = TAGS[where]
    return tag in new and new[tag] != old.get(tag, default)


def assign(document: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set one dotted key in place; a number in the path is a place in a list (`stages.1.steps`)."""
    where: Any = document
    for part, following in zip(path, [*path[1:], None], strict=True):
        key: Any = part
        if isinstance(where, list):
            if not part.isdigit() or int(part) >= len(where):
                raise UsageError(f"'{'.'.join(path)}': '{part}' is not one of the list's {len(where)} places")
            key = int(part)
        elif not isinstance(where, dict):
            raise UsageError(f"'{'.'.join(path)}': '{part}' is not inside a table")
        if following is None:
            if isinstance(where, dict) and _is_retagged(where, {key: value}, tuple(path[:-1])):
                where.clear()
            where[key] = value
        else:
            where = where[key] if isinstance(where, list) else where.setdefault(key, {})


def resolve(
    document: Mapping[str, Any],
    assignments: Sequence[tuple[Sequence[str], Any]] = (),
    *,
    env_model: EnvModel,
    source: str = "defaults",
) -> Settings:
    """Validate `document` with `assignments` applied, the environment's and the stages' own keys included.

    Raises UsageError whose `problems` list every fault.
    """
    wanted: dict[str, Any] = copy.deepcopy(dict(document))
    for path, value in assignments:
        assign(wanted, path, value)
    problems: list[str] = []
    settings: Settings | None = None
    try:
        settings = Settings.model_validate(wanted)
    except ValidationError as error:
        problems += describe(error, Settings)
    problems += _environment_problems(wanted.get("env"), env_model)
    problems += _stage_problems(wanted)
    refuse(problems, source)
    assert settings is not None
    return _with_environment_defaults(settings, env_model)


def _with_environment_defaults(settings: Settings, env_model: EnvModel) -> Settings:
    if not settings.env.name:
        return settings
    params = env_model(settings.env.name).model_validate(settings.env.params).model_dump(exclude_none=True)
    env = type(settings.env).model_validate({"name": settings.env.name, **params})
    return settings.model_copy(update={"env": env})


def _environment_problems(table: Any, env_model: EnvModel) -> list[str]:
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str) or not table["name"]:
        stray = [key for key in table if key != "name"] if isinstance(table, Mapping) else []
        return [f"env.{key}: env.name is not set, so its parameters are unknown" for key in stray]
    try:
        model = env_model(table["name"])
    except UsageError as error:
        return [f"env.name: {error}"]
    try:
        model.model_validate({key: value for key, value in table.items() if key != "name"})
    except ValidationError as error:
        return describe(error, model, prefix="env")
    return []


def _stage_problems(document: Mapping[str, Any]) -> list[str]:
    problems = []
    entries = document.get("stages", [])
    for place, entry in enumerate(entries if isinstance(entries, list | tuple) else []):
        if not isinstance(entry, Mapping) or entry.get("stage") not in Settings.model_fields:
            continue  # the document's own validation names this fault
        model = type(Settings.model_fields[entry["stage"]].default)
        own = {"stage", "every", "start_epoch", "stop_epoch"}
        overrides = {key: value for key, value in entry.items() if key not in own}
        prefix = f"stages.{place}"
        allowed = STAGE_OVERRIDES.get(entry["stage"], frozenset(model.model_fields))
        for key in overrides.keys() - allowed:
            if key in model.model_fields:
                problems.append(f"{prefix}.{key}: one value holds for the whole run; set {entry['stage']}.{key}")
            else:
                problems.append(unknown_key(f"{prefix}.{key}", key, [*allowed, *own]))
        try:
            model.model_validate({k: v for k, v in overrides.items() if k in model.model_fields})
        except ValidationError as error:
            problems += describe(error, model, prefix=prefix)
    return problems
