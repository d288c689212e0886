"""Environments by name: `make` builds one, `settings_model` says which parameters it takes, `catalogue` lists
them.

A suite is one module of `envs.suites` with `settings_model(name)` and `make(name, settings, *, num_envs,
seed, split)`; it is imported when one of its names is asked for. Installed packages add environments through
entry points `amago.environment`, whose value is a `module:attr` of the kind a user may also type.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal

from pydantic import ValidationError

from pipelines.config.base import SettingsModel
from pipelines.config.problems import describe, refuse
from pipelines.envs.env import Env
from pipelines.errors import InputMissing, UsageError

Split = Literal["train", "test"]
_GROUP = "amago.environment"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """`pattern` is a name, or a prefix followed by `*`. `extra`: the optional dependency that brings
    `requires`.
    """

    name: str
    pattern: str
    module: str
    about: str
    extra: str | None = None
    requires: tuple[str, ...] = ()

    def matches(self, name: str) -> bool:
        if self.pattern.endswith("*"):
            prefix = self.pattern[:-1]
            return name.startswith(prefix) and len(name) > len(prefix)
        return name == self.pattern

    @property
    def installed(self) -> bool:
        return all(find_spec(package) is not None for package in self.requires)

    def load(self, name: str) -> ModuleType:
        """The suite's module. InputMissing where its extra is not installed."""
        if not self.installed:
            raise InputMissing(
                f"environment '{name}' needs the extra '{self.extra}'",
                hint=f'pip install "amago[{self.extra}]"',
            )
        return importlib.import_module(self.module)


_SUITES = "pipelines.envs.suites."
OWN_CLASS = Suite(
    name="own",
    pattern="module:attr",
    module=f"{_SUITES}gymnasium_env",
    about="Your own gymnasium.Env: a class or factory, importable from Python's path",
)
SUITES: tuple[Suite, ...] = (
    Suite(
        name="built-in",
        pattern="meta-frozen-lake",
        module=f"{_SUITES}frozen_lake",
        about="Find the way over an unseen lake, then walk it again",
    ),
    Suite(
        name="built-in",
        pattern="dark-key-door",
        module=f"{_SUITES}dark_key_door",
        about="Find a hidden key, then a hidden door, again and again",
    ),
    Suite(
        name="built-in",
        pattern="tmaze",
        module=f"{_SUITES}tmaze",
        about="Remember a sign until the corridor's end",
    ),
    Suite(
        name="built-in",
        pattern="goal-frozen-lake",
        module=f"{_SUITES}goal_frozen_lake",
        about="Walk to a goal cell that is shown; ready for hindsight relabelling",
    ),
    Suite(
        name="gymnasium",
        pattern="gym:*",
        module=f"{_SUITES}gymnasium_env",
        about="Any environment registered with gymnasium",
    ),
    OWN_CLASS,
)


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
    return module.make(target, settings, num_envs=num_envs, seed=seed, split=split)


def settings_model(name: str) -> type[SettingsModel]:
    """The model of the parameters of environment `name`. Errors as for `make`."""
    target, suite = _resolve(name)
    return suite.load(name).settings_model(target)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the list of environments; `name` may be a pattern (`gym:ID`, `module:attr`)."""

    name: str
    suite: str
    about: str
    extra: str | None
    installed: bool

    @property
    def is_pattern(self) -> bool:
        return ":" in self.name


def catalogue() -> list[Entry]:
    """Every environment that can be named, without importing any."""
    entries = [
        Entry(
            name=suite.pattern.replace("*", "ID"),
            suite=suite.name,
            about=suite.about,
            extra=suite.extra,
            installed=suite.installed,
        )
        for suite in SUITES
    ]
    plugged = [
        Entry(name=point.name, suite="installed", about=point.value, extra=None, installed=True)
        for point in metadata.entry_points(group=_GROUP)
    ]
    return entries + sorted(plugged, key=lambda entry: entry.name)


def _resolve(name: str) -> tuple[str, Suite]:
    """What to build (an entry point's target in place of its name) and the suite that builds it."""
    for suite in SUITES:
        if suite is not OWN_CLASS and suite.matches(name):
            return name, suite
    for point in metadata.entry_points(group=_GROUP):
        if point.name == name:
            return point.value, OWN_CLASS
    module, _, attribute = name.partition(":")
    if module.replace(".", "").isidentifier() and attribute.isidentifier():
        return name, OWN_CLASS
    names = [entry.name for entry in catalogue()]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(names)}"
    raise UsageError(f"unknown environment '{name}'", hint=hint)
