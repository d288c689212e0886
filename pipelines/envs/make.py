"""Environments by name: `make` builds one, `settings_model` says which parameters it takes, `catalogue` lists
them.

A suite is one module of `envs.suites` with `settings_model(name)` and `make(name, settings, *, num_envs,
seed, split)`; it is imported when one of its names is asked for. Installed packages add environments through
entry points `amago.environment`, whose value is a `module:attr` of the kind a user may also type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

import gymnasium
from pydantic import ValidationError

from pipelines.config.base import SettingsModel
from pipelines.config.problems import describe, refuse
from pipelines.envs.constructor import Parameter
from pipelines.envs.env import Env
from pipelines.envs.suites.catalogue import OWN_CLASS, SUITES
from pipelines.envs.suites.suite import Suite
from pipelines.errors import UsageError
from pipelines.nearest import did_you_mean, nearest

Split = Literal["train", "test"]
_GROUP = "amago.environment"
_EXACT = {suite.pattern for suite in SUITES if suite.is_exact}


def make(
    name: str,
    *,
    num_envs: int,
    seed: int,
    split: Split = "train",
    params: Mapping[str, Any] | SettingsModel | None = None,
) -> Env:
    """`num_envs` actors of environment `name`, not yet reset.

    Tasks follow from (seed, split) and the episode's number alone. UsageError: no such environment, or wrong
    parameters (all listed); InputMissing: it needs a package that is not installed.

    >>> env = make("tmaze", num_envs=2, seed=0, params={"corridor": 5})
    >>> env.reset()["obs"].shape
    (2, 2)
    """
    target, suite = _resolve(name)
    module = suite.load(name)
    model = module.settings_model(target)
    if isinstance(params, SettingsModel):
        params = params.model_dump()
    try:
        settings = model.model_validate(dict(params or {}))
    except ValidationError as error:
        refuse(describe(error, model, "env"), f"environment '{name}'")
    label = {"label": name} if target != name else {}
    return module.make(target, settings, num_envs=num_envs, seed=seed, split=split, **label)


def settings_model(name: str) -> type[SettingsModel]:
    """The model of the parameters of environment `name`. Errors as for `make`."""
    target, suite = _resolve(name)
    return suite.load(name).settings_model(target)


def parameters(name: str) -> list[Parameter]:
    """The parameters of environment `name`: those of its model, and those of a constructor of the user's own."""
    target, suite = _resolve(name)
    module = suite.load(name)
    listed = [
        Parameter(
            name=key,
            default=None if field.is_required() else field.get_default(call_default_factory=True),
            about=" ".join((field.description or "").split()),
            required=field.is_required(),
        )
        for key, field in module.settings_model(target).model_fields.items()
    ]
    return listed + (module.constructor(target) if suite is OWN_CLASS else [])


def require_trust(name: str, params: Mapping[str, Any]) -> None:
    """InputMissing if making environment `name` would import a module whose name was only read from a file. `make`
    asks this by itself; a caller that lets another process make it asks first."""
    target, suite = _resolve(name)
    module = suite.load(name)
    if hasattr(module, "require_trust"):
        module.require_trust(target, params)


def requirement(name: str) -> tuple[str | None, bool]:
    """The extra that environment `name` needs (None: none), and whether it is there. UsageError: no such environment.

    >>> requirement("tmaze")
    (None, True)
    """
    target, suite = _resolve(name)
    if suite.extra is None and target.startswith("gym:"):
        return suite.load(target).requirement(target)
    return suite.extra, suite.installed


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the list of environments; `name` may be a pattern (`gym:ID`, `module:attr`)."""

    name: str
    suite: str
    about: str
    extra: str | None
    installed: bool
    spaces: str = ""
    tasks: str = ""
    horizon: str = ""
    ends: str = ""

    @property
    def is_pattern(self) -> bool:
        return self.name not in _EXACT


def catalogue() -> list[Entry]:
    """Every environment that can be named, without importing any. An entry point with the name of a built-in, which
    `make` refuses, is not listed."""
    entries = [_entry(suite) for suite in SUITES]
    plugged = [
        Entry(name=point.name, suite="installed", about=point.value, extra=None, installed=True)
        for point in metadata.entry_points(group=_GROUP)
        if _built_in(point.name) is None
    ]
    return entries + sorted(plugged, key=lambda entry: entry.name)


def entry_of(name: str) -> Entry:
    """What the catalogue says of environment `name`. UsageError: no such environment."""
    return _entry(_resolve(name)[1])


def _entry(suite: Suite) -> Entry:
    return Entry(
        name=suite.pattern.replace("*", suite.placeholder),
        suite=suite.name,
        about=suite.about,
        extra=suite.extra,
        installed=suite.installed,
        spaces=suite.spaces,
        tasks=suite.tasks,
        horizon=suite.horizon,
        ends=suite.ends,
    )


def _resolve(name: str) -> tuple[str, Suite]:
    """What to build (an entry point's target in place of its name) and the suite that builds it."""
    suite = _built_in(name)
    for point in metadata.entry_points(group=_GROUP):
        if point.name == name and suite is not None:
            package = point.dist.name if point.dist is not None else "an installed package"
            raise UsageError(
                f"environment '{name}' is one of amago's suite '{suite.name}' and one of {package}, '{point.value}'",
                hint=f"for the latter give '{point.value}'; for the former uninstall {package}",
            )
        if point.name == name:
            return point.value, OWN_CLASS
    if suite is not None:
        return name, suite
    module, _, attribute = name.partition(":")
    if module.replace(".", "").isidentifier() and attribute.isidentifier():
        return name, OWN_CLASS
    raise UsageError(f"unknown environment '{name}'", hint=_meant(name))


def _built_in(name: str) -> Suite | None:
    return next((suite for suite in SUITES if suite is not OWN_CLASS and suite.matches(name)), None)


def _meant(name: str) -> str:
    """A hint for a name that is none: an ID of gymnasium without its prefix, else the nearest name."""
    if name in gymnasium.registry:
        return f"did you mean 'gym:{name}'?"
    for suite in SUITES:
        if suite.pattern[:-1].rstrip("-:") == name:
            return f"did you mean '{_entry(suite).name}'?"
    bare = {id.rpartition("-v")[0].lower(): id for id in gymnasium.registry}  # the newest version comes last
    close = nearest(re.sub(r"^gym:|-v\d+$", "", name.lower()), bare, cutoff=0.85)
    if close is not None:
        return f"did you mean 'gym:{bare[close]}'?"
    return did_you_mean(name, [entry.name for entry in catalogue()], otherwise="amago envs lists them")
