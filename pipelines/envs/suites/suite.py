"""One row of the catalogue of environments: what is known of a suite without importing it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

from pipelines.errors import InputMissing

MODULES = "pipelines.envs.suites."
OWN_PATTERN = "module:attr"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """`pattern` is a name, or a prefix followed by `*`, which stands for what `placeholder` says. `extra`: the optional
    dependency that brings the modules `requires`; `conflict`: which extras it does not go with, and why. `spaces`,
    `tasks`, `horizon` and `ends` describe briefly, without importing anything, observations and actions, what differs
    between episodes (and the train-test split), their length, and termination.
    """

    name: str
    pattern: str
    module: str
    about: str
    placeholder: str = "ID"
    extra: str | None = None
    requires: tuple[str, ...] = ()
    conflict: str = ""
    spaces: str = ""
    tasks: str = ""
    horizon: str = ""
    ends: str = ""

    def matches(self, name: str) -> bool:
        if self.pattern.endswith("*"):
            prefix = self.pattern[:-1]
            return name.startswith(prefix) and len(name) > len(prefix)
        return name == self.pattern

    @property
    def is_exact(self) -> bool:
        return not self.pattern.endswith("*") and self.pattern != OWN_PATTERN

    @property
    def installed(self) -> bool:
        return all(find_spec(package) is not None for package in self.requires)

    def load(self, name: str) -> ModuleType:
        """The suite's module. InputMissing where its extra is not installed."""
        if not self.installed:
            raise InputMissing(
                f"environment '{name}' needs the extra '{self.extra}'",
                hint=f'pip install "amago[{self.extra}]"' + (f" ({self.conflict})" if self.conflict else ""),
            )
        return importlib.import_module(self.module)
