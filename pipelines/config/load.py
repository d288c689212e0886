"""Loading TOML files, recipes and `key=value` assignments into one validated `Settings` document.

Precedence: defaults < the run's own < recipe or file < its profile < `--set` and named options. All errors are reported
at once.
"""

from __future__ import annotations

import copy
import functools
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from pipelines.config import sizes
from pipelines.config.base import describe_errors, describe_unknown_key, refuse_problems
from pipelines.config.changes import STAGE_OVERRIDES
from pipelines.config.own_runs import OwnRun
from pipelines.config.places import is_run, split_checkpoint, suggest
from pipelines.config.policy_files import PolicySource
from pipelines.config.settings import TABLES, EnvSettings, Settings, expand_stages
from pipelines.errors import InputMissing, UsageError
from pipelines.files.malformed import read_limited, reason
from pipelines.nearest import did_you_mean

# Tables in which one key determines which others are valid: when it changes, the old others are dropped.
# Each with its default, which a document without the key means.
TAGS = {("env",): ("name", ""), ("agent", "sequence"): ("kind", "transformer")}

# Table of a recipe's profiles: tables of settings, one of which may be applied over the rest.
PROFILES = "profiles"

_MOST_BYTES = 4 << 20
_MOST_DEEP = 64
_DEEP_KEY = re.compile(rf"""(?<![\w"'-])(?:[\w"'-]+[ \t]*\.[ \t]*){{{_MOST_DEEP}}}""")

# Returns the model that validates an environment's own parameters, or raises UsageError for an unknown name.
EnvModel = Callable[[str], type[BaseModel]]


def read_toml(path: Path) -> dict[str, Any]:
    """Read the document in `path`. InputMissing if it cannot be read, UsageError with line and column if invalid."""
    try:
        content = read_limited(path, _MOST_BYTES)
    except FileNotFoundError as error:
        raise InputMissing(f"no configuration file '{path}'") from error
    except OSError as error:
        raise InputMissing(f"cannot read configuration '{path}': {error.strerror}") from error
    try:
        return _parse_toml(content.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"'{path}' is not valid TOML: {reason(error)}") from error


def _parse_toml(text: str) -> dict[str, Any]:
    """Parse `text`. ValueError or RecursionError if it is invalid or nested too deeply."""
    if _DEEP_KEY.search(text):  # because parsing takes time quadratic in its parts
        raise ValueError(f"a key has more than {_MOST_DEEP} parts")
    document = tomllib.loads(text)
    level: list[Any] = [document]
    for _ in range(_MOST_DEEP):
        level = [
            part
            for value in level
            if isinstance(value, dict | list)
            for part in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return document
    raise ValueError(f"it is nested more than {_MOST_DEEP} deep")


def parse_assignment(text: str) -> tuple[list[str], Any]:
    """Parse `train.context_length=45` into (path, value). The value is TOML; a bare word is a string."""
    key, separator, value = text.partition("=")
    path = key.strip().split(".")
    if not separator or not all(path):
        raise UsageError(f"'--set {text}' is not of the form key=value", hint="e.g. --set train.context_length=45")
    if len(path) > _MOST_DEEP:
        raise UsageError(f"'--set {text[:60]}...' has a key of more than {_MOST_DEEP} parts")
    try:
        return path, _parse_toml(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return path, value.strip()
    except (ValueError, RecursionError) as error:
        raise UsageError(f"'--set {text[:60]}...': {reason(error)}") from error


def merge(base: Mapping[str, Any], over: Mapping[str, Any], *, where: tuple[str, ...] = ()) -> dict[str, Any]:
    """Merge `over` into `base`, table by table, without changing either. A new tag (`TAGS`) drops old parameters."""
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
    """Set one dotted key in place; a number in the path is an index of a list (`stages.1.steps`)."""
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


Assignments = Sequence[tuple[Sequence[str], Any]]


def fold(
    recipe: Mapping[str, Any],
    assignments: Assignments = (),
    *,
    stored: Mapping[str, Any] | None = None,
    size: str = "",
    source: str = "defaults",
) -> dict[str, Any]:
    """Lay the layers of a call over each other: what a run has `stored`, the network of the policy that it begins with
    (`init.source`), a network `size` for a recipe that names none, the recipe or file, its profile, and the
    assignments. Folding the result again changes nothing.

    Where a layer names a size, the settings that the size stands for replace those of the layers below.

    Raises:
        UsageError: an assignment has no place in the document, or the recipe has no profile of the chosen name.
    """
    document = _copy_stored(recipe, stored)
    profile = _find_profile(recipe, document, assignments, source)
    document = _lay_warm_start(document, (recipe, profile), assignments)
    plain = {key: value for key, value in recipe.items() if key != PROFILES}
    for layer in ({"size": size} if size else {}, plain, profile):
        document = _lay(document, functools.partial(merge, over=layer), layer.get("size"))
    chosen = {tuple(path): value for path, value in assignments}
    if any(len(path) > 1 and path[0] == "stages" for path in chosen) and "stages" in document:
        document["stages"] = expand_stages(document["stages"])

    def assign_all(below: Mapping[str, Any]) -> dict[str, Any]:
        assigned = copy.deepcopy(dict(below))
        # The tag of a table comes first, since it drops the table's old keys.
        for path, value in sorted(assignments, key=lambda item: TAGS.get((*item[0][:-1],), ("",))[0] != item[0][-1]):
            assign(assigned, path, value)
        return assigned

    document = _lay(document, assign_all, chosen.get(("size",)))
    table = document.get("init")
    if isinstance(table, Mapping) and isinstance(origin := table.get("source"), str) and origin:
        document["init"] = {**table, "source": PolicySource(origin).pin(stored)}
    table = document.get("agent")
    if isinstance(table, Mapping) and isinstance(near := table.get("reference"), str) and near:
        document["agent"] = {**table, "reference": PolicySource(near, "agent.reference").pin(stored)}
    table = document.get("train")
    if isinstance(table, Mapping) and isinstance(like := table.get("like"), str) and like:
        drawn, place = PolicySource(like, "train.like"), Path(split_checkpoint(like)[0])
        if not drawn.is_stored(stored) and not is_run(place):
            known = "give RUN[@CHECKPOINT], whose trajectories the new run is to draw from"
            where = suggest(place, is_run, inside="it contains runs", otherwise=known)
            raise InputMissing(f"train.like: no run at '{place}'", hint=where)
        document["train"] = {**table, "like": drawn.pin(stored)}
    return document


def resolve(
    recipe: Mapping[str, Any],
    assignments: Assignments = (),
    *,
    env_model: EnvModel,
    stored: Mapping[str, Any] | None = None,
    size: str = "",
    source: str = "defaults",
) -> Settings:
    """Validate the layers of a call (see `fold`) over the defaults, including the keys of the environment, the stages,
    and the other profiles of the recipe.

    Raises UsageError whose `problems` list every error.
    """
    wanted = fold(recipe, assignments, stored=stored, size=size, source=source)
    if wanted.get("size") in sizes.SIZES:  # what no layer gives
        wanted = merge(sizes.make_preset(wanted["size"], sizes.find_sequence_kind(wanted)), wanted)
    settings, problems = _validate(wanted, env_model)
    whole = merge(_copy_stored(recipe, stored), recipe) | ({"size": size} if size and "size" not in recipe else {})
    profiles = whole.pop(PROFILES, {})
    if not isinstance(profiles, Mapping):
        problems.append(f"{PROFILES}: input should be a table of profiles")
    elif profiles:  # those that are not chosen may have errors beyond those of the recipe itself
        plain = {key: value for key, value in whole.items() if key != "profile"}
        known = set(_validate(plain, env_model)[1])
        for name, profile in profiles.items():
            if not isinstance(profile, Mapping):
                problems.append(f"{PROFILES}.{name}: input should be a table")
            elif name != wanted.get("profile"):
                faults = _validate(merge(plain, profile), accept_missing_packages(env_model))[1]
                problems += [f"{PROFILES}.{name}.{fault}" for fault in faults if fault not in known]
    refuse_problems(problems, source)
    assert settings is not None
    env = settings.env
    if env.name:
        params = env_model(env.name).model_validate(env.params).model_dump(exclude_none=True)
        env = EnvSettings.model_validate({"name": env.name, **params})
    return settings.model_copy(update={"env": env})


def _lay_warm_start(
    stored: dict[str, Any], layers: Iterable[Mapping[str, Any]], assignments: Assignments
) -> dict[str, Any]:
    """Replace the network of a run by that of its `init.source`, unless the run has begun with it."""
    tables = (layer.get("init") for layer in layers)
    given = [table["source"] for table in tables if isinstance(table, Mapping) and "source" in table]
    given += [value for path, value in assignments if list(path) == ["init", "source"]]
    if not given or not isinstance(given[-1], str) or not given[-1] or PolicySource(given[-1]).is_stored(stored):
        return stored
    origin = Path(split_checkpoint(given[-1])[0])
    if is_run(origin):  # a run of this user's may name modules that were typed when it was made
        OwnRun(origin, read_toml(origin / "config.toml")).grant()
    network = PolicySource(given[-1]).read_network()
    return merge({key: value for key, value in stored.items() if key not in ("agent", "size")}, network)


def _copy_stored(recipe: Mapping[str, Any], stored: Mapping[str, Any] | None) -> dict[str, Any]:
    """Copy what a run has stored, without its profile where the recipe has others."""
    return {key: value for key, value in (stored or {}).items() if key != "profile" or PROFILES not in recipe}


def _lay(below: dict[str, Any], lay: Callable[[Mapping[str, Any]], dict[str, Any]], size: Any) -> dict[str, Any]:
    """Lay a layer over those below, whose network the layer's `size` replaces."""
    laid = lay(below)
    if not below or size not in sizes.SIZES:
        return laid
    # The kind of encoder, to which the widths belong, is known only once the layer is laid.
    return lay(merge(below, sizes.make_preset(size, sizes.find_sequence_kind(laid))))


def _find_profile(
    recipe: Mapping[str, Any], stored: Mapping[str, Any], assignments: Assignments, source: str
) -> dict[str, Any]:
    """Find the profile that an assignment, or else the recipe, chooses; empty if none.

    A document that names a profile but has none was recorded by a run, with the profile already applied.
    """
    profiles, recorded = recipe.get(PROFILES), recipe.get("profile", stored.get("profile", ""))
    name = next((value for path, value in reversed(assignments) if list(path) == ["profile"]), recorded)
    profiles = profiles if isinstance(profiles, Mapping) else {}
    if not isinstance(name, str) or not name or (name == recorded and not profiles):
        return {}
    if not isinstance(profiles.get(name), Mapping):
        known = f"it has: {', '.join(profiles)}" if profiles else "it has none"
        raise UsageError(
            f"no profile '{name}' in the configuration ({source})",
            hint=did_you_mean(name, profiles, otherwise=known),
        )
    return {**profiles[name], "profile": name}


def accept_missing_packages(env_model: EnvModel) -> EnvModel:
    """Wrap `env_model` such that an environment whose packages are missing accepts any parameter."""

    def model(name: str) -> type[BaseModel]:
        try:
            return env_model(name)
        except InputMissing:
            return create_model("Anything", __config__=ConfigDict(extra="allow"))

    return model


def _validate(document: Mapping[str, Any], env_model: EnvModel) -> tuple[Settings | None, list[str]]:
    """Validate the settings; return them, unless they have errors, and all errors."""
    problems: list[str] = []
    settings: Settings | None = None
    try:
        settings = Settings.model_validate(document)
    except ValidationError as error:
        problems += describe_errors(error, Settings)
    table = document.get("env")
    if isinstance(table, Mapping) and isinstance(name := table.get("name"), str) and name:
        try:
            model = env_model(name)
        except UsageError as error:
            problems.append(f"env.name: {error}")
        else:
            try:
                model.model_validate({key: value for key, value in table.items() if key != "name"})
            except ValidationError as error:
                problems += describe_errors(error, model, prefix="env")
    problems += _check_stages(document)
    endless = dict(_find_infinite(document))  # reported once, whatever else a model reports about it
    problems = [text for text in problems if text.partition(":")[0] not in endless]
    problems[:0] = [f"{key}: input should be a finite number, got {value}" for key, value in endless.items()]
    return settings, problems


def _find_infinite(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield the keys of NaN or infinite values, which no setting may have."""
    if isinstance(value, float) and not math.isfinite(value):
        yield key, value
    elif isinstance(value, Mapping | list | tuple):
        for name, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _find_infinite(part, f"{key}.{name}" if key else str(name))


def _check_stages(document: Mapping[str, Any]) -> list[str]:
    """List errors of the entries of a chain: keys that their stage does not have, or that hold for the whole run."""
    problems = []
    entries = document.get("stages", [])
    for place, entry in enumerate(entries if isinstance(entries, list | tuple) else []):
        stage = entry.get("stage") if isinstance(entry, Mapping) else None
        if not isinstance(stage, str) or (table := TABLES.get(stage, stage)) not in Settings.model_fields:
            continue  # the document's own validation reports this
        model = type(Settings.model_fields[table].default)
        own = {"stage", "every", "start_epoch", "stop_epoch"}
        overrides = {key: value for key, value in entry.items() if key not in own}
        prefix = f"stages.{place}"
        allowed = STAGE_OVERRIDES.get(stage, frozenset(model.model_fields))
        for key in overrides.keys() - allowed:
            if key in model.model_fields:
                problems.append(f"{prefix}.{key}: one value holds for the whole run; set {table}.{key}")
            else:
                problems.append(describe_unknown_key(f"{prefix}.{key}", key, [*allowed, *own]))
        try:
            model.model_validate({k: v for k, v in overrides.items() if k in model.model_fields})
        except ValidationError as error:
            problems += describe_errors(error, model, prefix=prefix)
    return problems
