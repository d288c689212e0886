"""One lazy registry for everything that plugs in.

A name is looked up among the built-ins, then among installed entry points `amago.<kind>`, and a name of the
form `module:attr` is imported as it stands if the user typed it (`pipelines.trust`). Nothing is imported before it is
asked for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from operator import attrgetter
from typing import Any

from pipelines import trust
from pipelines.errors import InputMissing, UsageError
from pipelines.nearest import did_you_mean


def require_package(module: str, extra: str, what: str) -> None:
    """Raise InputMissing unless `module`, which the optional dependencies `extra` bring, is installed for `what`."""
    if importlib.util.find_spec(module) is None:
        raise InputMissing(f"{what} needs {module}, which is not installed", hint=f'pip install "amago[{extra}]"')


@cache
def entry_points(kind: str) -> metadata.EntryPoints:
    """Return the installed members of a kind, `amago.<kind>`. Finding them takes milliseconds: it is done once."""
    return metadata.entry_points(group=f"amago.{kind}")


class Registry:
    """Members of one `kind`, each given as "module:attr" and imported on first use.

    >>> Registry("filter", {"binary": "pipelines.learning.objectives:binary"}).names()
    ['binary']
    """

    def __init__(self, kind: str, builtins: Mapping[str, str]) -> None:
        self.kind = kind
        self.built_in = dict(builtins)

    def names(self) -> list[str]:
        """Built-in and installed names, sorted."""
        return sorted({*self.built_in, *(point.name for point in self._entry_points)})

    def get(self, name: str) -> Any:
        """The member called `name`. UsageError if there is none, InputMissing if it cannot be imported."""
        if name in self.built_in:
            return self._load(self.built_in[name])
        for point in self._entry_points:
            if point.name == name:
                return self._load(point.value)
        if ":" in name:
            self.require_trust(name)
            return self._load(name)
        hint = did_you_mean(name, self.names(), otherwise=f"known: {', '.join(self.names())}, or module:attr")
        raise UsageError(f"unknown {self.kind} '{name}'", hint=hint)

    def require_trust(self, name: str) -> None:
        """InputMissing where `module:attr` was neither typed by the user nor is an installed entry point's."""
        if all(point.value != name for point in self._entry_points):
            trust.require(self.kind, name)

    @property
    def _entry_points(self) -> metadata.EntryPoints:
        return entry_points(self.kind.replace(" ", "_"))

    def _load(self, target: str) -> Any:
        module_name, _, attribute = target.partition(":")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or module_name
            if module_name == missing or module_name.startswith(f"{missing}."):
                raise InputMissing(
                    f"{self.kind} '{target}': no module '{missing}'",
                    hint="is it installed, in the current directory, or in one that is on PYTHONPATH?",
                ) from error
            raise
        try:
            return attrgetter(attribute)(module)  # as in an entry point, `attr` may have dots
        except AttributeError as error:
            raise InputMissing(f"{self.kind} '{target}': module '{module_name}' has no '{attribute}'") from error
