"""The catalogue of environments, read from `catalogue.toml` without importing any suite."""

from __future__ import annotations

import importlib
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipelines.errors import InputMissing

USER = "module:attr"
_FILE = Path(__file__).with_name("catalogue.toml")
_PLACEHOLDER = re.compile(r"[A-Z][A-Z:-]*$")
_HEADING = ("title", "intro")  # keys of a suite that are for the documentation alone


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One environment, or a pattern of many, whose `name` ends in capitals (`dmc:DOMAIN-TASK`).

    `suite_class` is `MODULE:CLASS` of `envs.suites`: an `Env` or a `TaskEnv`, or a class that has `Settings` and `make`
    as they do. `extra`: the optional dependency that brings the modules `requires`; `conflict`:
    which extras it does not go with, and why. The other fields are prose; of `observation`, `action` and `split` the
    part before the first colon is the short form (see `brief`).
    """

    name: str
    suite: str
    suite_class: str
    about: str
    observation: str = ""
    action: str = ""
    horizon: str = ""
    termination: str = ""
    split: str = ""
    extra: str | None = None
    requires: tuple[str, ...] = ()
    conflict: str = ""
    reference: str = ""
    reward: str = ""
    hidden: str = ""
    protocol: str = ""
    notes: str = ""

    @property
    def prefix(self) -> str:
        """The part of `name` that all names of a pattern begin with."""
        return _PLACEHOLDER.sub("", self.name)

    @property
    def is_pattern(self) -> bool:
        return self.prefix != self.name or self.name == USER

    @property
    def installed(self) -> bool:
        return all(find_spec(package) is not None for package in self.requires)

    def matches(self, name: str) -> bool:
        if self.is_pattern:
            return name.startswith(self.prefix) and len(name) > len(self.prefix)
        return name == self.name

    def load(self, name: str) -> Any:
        """Import the class that makes environment `name`. InputMissing where its extra is not installed."""
        if not self.installed:
            raise InputMissing(
                f"environment '{name}' needs the extra '{self.extra}'",
                hint=f'pip install "amago[{self.extra}]"' + (f" ({self.conflict})" if self.conflict else ""),
            )
        module, _, attribute = self.suite_class.partition(":")
        return getattr(importlib.import_module(f"pipelines.envs.suites.{module}"), attribute)


def brief(text: str) -> str:
    """Shorten a field to the part before its first colon.

    >>> brief("5 choices: stay, down, up, right, left")
    '5 choices'
    """
    return text.partition(":")[0]


@cache
def suites() -> list[dict[str, Any]]:
    """Read the catalogue as it is written: a table for each suite, with its environments."""
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))["suite"]


def read_entries() -> tuple[Entry, ...]:
    """Make the entries of all suites. The lines of prose become one, a list a tuple; notes stay as they are."""
    found = []
    for suite in suites():
        shared = {key: value for key, value in suite.items() if key not in ("environment", *_HEADING)}
        for own in suite["environment"]:
            fields = {**shared, **own, "suite": suite["name"]}
            for key, value in fields.items():
                if key != "notes":
                    fields[key] = " ".join(value.split()) if isinstance(value, str) else tuple(value)
            found.append(Entry(**fields))
    return tuple(found)


# The first that matches a name makes it, so exact names come before the prefixes that they share.
ENTRIES = read_entries()
USER_ENTRY = next(entry for entry in ENTRIES if entry.name == USER)
