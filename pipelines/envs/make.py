"""Environments by name: `make` builds one, `find_settings_model` says which parameters it takes, `catalogue` lists
them.

A suite is a class in a module of `envs.suites` that has `Settings` and `make(name, settings, *, num_envs, seed,
split)`; the module is imported when one of its names is asked for. Installed packages add environments through entry
points `amago.environment`, whose value is a `module:attr` of the kind a user may also type.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import gymnasium
from pydantic import ValidationError

from pipelines.config.base import SettingsModel, describe_errors, refuse_problems
from pipelines.envs.constructor import Parameter
from pipelines.envs.env import Env
from pipelines.envs.repeated import Repeated
from pipelines.envs.suites.catalogue import ENTRIES, USER_ENTRY, Entry
from pipelines.errors import UsageError
from pipelines.nearest import did_you_mean, nearest
from pipelines.registry import entry_points

Split = Literal["train", "test"]
_KIND = "environment"  # entry points `amago.environment`


def make(
    name: str,
    *,
    num_envs: int,
    seed: int,
    split: Split = "train",
    params: Mapping[str, Any] | SettingsModel | None = None,
    drawn: bool = False,
    attempts: int = 1,
) -> Env:
    """Make `num_envs` actors of environment `name`, not yet reset.

    Tasks follow from (seed, split) and the episode's number alone. `drawn`: `Env.render` will be called, which some
    environments must know when they are made. `attempts`: how often each episode is played (`Repeated`). UsageError: no
    such environment, or wrong parameters (all listed); InputMissing: it needs a package that is not installed.

    >>> env = make("tmaze", num_envs=2, seed=0, params={"corridor": 5})
    >>> env.reset()["obs"].shape
    (2, 2)
    """
    target, entry = resolve(name)
    suite = entry.load(name)
    model = suite.Settings
    if isinstance(params, SettingsModel):
        params = params.model_dump()
    try:
        settings = model.model_validate(dict(params or {}))
    except ValidationError as error:
        refuse_problems(describe_errors(error, model, "env"), f"environment '{name}'")
    more: dict[str, Any] = {"label": name} if target != name else {}
    if drawn and "drawn" in inspect.signature(suite.make).parameters:
        more["drawn"] = True
    made: Env = suite.make(target, settings, num_envs=num_envs, seed=seed, split=split, **more)
    return made if attempts == 1 else Repeated(made, attempts)


def find_settings_model(name: str) -> type[SettingsModel]:
    """Find the model of the parameters of environment `name`. Errors as for `make`."""
    return resolve(name)[1].load(name).Settings


def parameters(name: str) -> list[Parameter]:
    """List the parameters of environment `name`: those of its model, and of a user's own constructor."""
    target, entry = resolve(name)
    suite = entry.load(name)
    listed = [
        Parameter(
            name=key,
            default=None if field.is_required() else field.get_default(call_default_factory=True),
            about=" ".join((field.description or "").split()),
            required=field.is_required(),
        )
        for key, field in suite.Settings.model_fields.items()
    ]
    return listed + (suite.list_parameters(target) if entry is USER_ENTRY else [])


def require_trust(name: str, params: Mapping[str, Any]) -> None:
    """Raise InputMissing if making environment `name` would import a module whose name was only read from a file.
    `make` checks this itself; a caller that has another process make it checks first."""
    target, entry = resolve(name)
    suite = entry.load(name)
    if hasattr(suite, "require_trust"):
        suite.require_trust(target, params)


def is_users(name: str) -> bool:
    """Whether environment `name` is code of the user's own: a class, an entry point, or a module that registers it.

    >>> is_users("tmaze"), is_users("mymaze:Maze"), is_users("gym:mymaze:Maze-v0")
    (False, True, True)
    """
    target, entry = resolve(name)
    return entry is USER_ENTRY or (target.startswith("gym:") and target.count(":") > 1)


def requirement(name: str) -> tuple[str | None, bool]:
    """Find the extra that environment `name` needs (None: none), and whether it is installed. UsageError: no such
    environment.

    >>> requirement("tmaze")
    (None, True)
    """
    target, entry = resolve(name)
    if entry.extra is None and target.startswith("gym:"):
        return entry.load(target).find_requirement(target)
    return entry.extra, entry.installed


def catalogue() -> list[Entry]:
    """List every environment that can be named, without importing any. An entry point with the name of one of ours,
    which `make` refuses, is not listed."""
    plugged = [
        replace(USER_ENTRY, name=point.name, suite="installed", about=point.value)
        for point in entry_points(_KIND)
        if _find_ours(point.name) is None
    ]
    return [*ENTRIES, *sorted(plugged, key=lambda entry: entry.name)]


def resolve(name: str) -> tuple[str, Entry]:
    """Find what to build (an entry point's target in place of its name) and the catalogue's entry for it."""
    if not name:
        raise UsageError("no environment is named", hint="give --env ENV (`amago envs` lists them)")
    entry = _find_ours(name)
    for point in entry_points(_KIND):
        if point.name == name and entry is not None:
            package = point.dist.name if point.dist is not None else "an installed package"
            raise UsageError(
                f"environment '{name}' is one of amago's suite '{entry.suite}' and one of {package}, '{point.value}'",
                hint=f"for the latter give '{point.value}'; for the former uninstall {package}",
            )
        if point.name == name:
            return point.value, USER_ENTRY
    if entry is not None:
        return name, entry
    module, _, attribute = name.partition(":")
    if module.replace(".", "").isidentifier() and attribute.isidentifier():
        return name, USER_ENTRY
    raise UsageError(f"unknown environment '{name}'", hint=_suggest_name(name))


def _find_ours(name: str) -> Entry | None:
    return next((entry for entry in ENTRIES if entry is not USER_ENTRY and entry.matches(name)), None)


def _suggest_name(name: str) -> str:
    """Write a hint for an unknown name: an ID of gymnasium without its prefix, else the nearest name."""
    if name in gymnasium.registry:
        return f"did you mean 'gym:{name}'?"
    for entry in ENTRIES:
        if entry.is_pattern and entry.prefix.rstrip("-:") == name:
            return f"did you mean '{entry.name}'?"
    bare = {id.rpartition("-v")[0].lower(): id for id in gymnasium.registry}  # the newest version comes last
    close = nearest(re.sub(r"^gym:|-v\d+$", "", name.lower()), bare, cutoff=0.85)
    if close is not None:
        return f"did you mean 'gym:{bare[close]}'?"
    return did_you_mean(name, [entry.name for entry in catalogue()], otherwise="amago envs lists them")
