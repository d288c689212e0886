"""Runs of a sweep or of tuning: the commands that carry them out, and the values that vary."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amago_cli.options import Common

if TYPE_CHECKING:
    from amago_cli.configuration import Request
    from pipelines.config.settings import Settings
    from pipelines.stages.run_processes import PlannedRun

_CODE = (
    "import sys; sys.path[:] = {path!r}; sys.argv[0] = 'amago'\n"
    "from pipelines.processes import end_with_parent; end_with_parent(safely=True)\n"
    "from amago_cli.app import main; sys.exit(main())"
)
_OPEN, _CLOSE, _QUOTES = "[{", "]}", "\"'"


def command() -> list[str]:
    """Return the command that starts amago as it was started here, and stops when this process ends."""
    path = [os.path.abspath(entry) for entry in sys.path]
    return [sys.executable, "-c", _CODE.format(path=path)]


class Cells:
    """Runs of one recipe that differ in some settings."""

    def __init__(self, common: Common, recipe: str, *, profile: str | None, size: str | None) -> None:
        self._common, self._recipe = common, recipe
        named = {"profile": profile, "size": size}
        self._named = {key: value for key, value in named.items() if value is not None}

    def settings(self, values: Mapping[str, Any]) -> Settings:
        """Return the validated settings of the run with these values. UsageError lists every problem."""
        return self._request(values).settings()

    def document(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Write the recipe of the run with these values: all settings, or without stages those that are given."""
        given = self._request(values).document()
        return self.settings(values).document() if given.get("stages") else given

    def _request(self, values: Mapping[str, Any]) -> Request:
        from amago_cli.configuration import Request
        from pipelines.config.recipes import find

        _, document = find(self._recipe)
        common = replace(self._common, assignments=(*self._common.assignments, *self._assignments(values)))
        return Request(common, self._named, recipe=document, source=self._recipe)

    def plan(self, values: Mapping[str, Any], path: Path) -> PlannedRun:
        """Return the run with these values, to be carried out in `path`."""
        from pipelines.stages.run_processes import PlannedRun

        words = ["run", self._recipe, "--run", str(path)]
        for name, value in self._named.items():
            words += [f"--{name}", value]
        if self._common.config is not None:
            words += ["--config", self._common.config]
        for text in (*self._common.assignments, *self._assignments(values)):
            words += ["--set", text]
        if "--trust" in sys.argv:
            words.append("--trust")
        return PlannedRun(path=path, arguments=tuple(words))

    @staticmethod
    def _assignments(values: Mapping[str, Any]) -> list[str]:
        return [f"{key}={toml(value)}" for key, value in values.items()]

    def base_seed(self) -> int:
        """Return the seed of the recipe, from which the others are counted."""
        return self.settings({}).seed


def toml(value: Any) -> str:
    """Return `value` as TOML on one line."""
    import tomli_w

    return tomli_w.dumps({"value": value}, multiline_strings=False).removeprefix("value = ").strip().replace("\n", "")


def parse_varied(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Parse `--vary KEY=A,B,C`: values are TOML, separated by commas outside of brackets and quotes."""
    from pipelines.config.load import parse_assignment
    from pipelines.errors import UsageError

    found: dict[str, list[Any]] = {}
    for text in texts:
        key, sign, listed = text.partition("=")
        parts, depth, quote = [""], 0, ""
        for letter in listed:
            if letter == "," and not quote and depth == 0:
                parts.append("")
                continue
            parts[-1] += letter
            if quote:
                quote = "" if letter == quote else quote
            elif letter in _QUOTES:
                quote = letter
            else:
                depth += (letter in _OPEN) - (letter in _CLOSE)
        if not sign or not all(part.strip() for part in parts):
            raise UsageError(f"'--vary {text}' is not of the form KEY=A,B,C", hint="e.g. train.batch_size=16,32,64")
        key = key.strip()
        if key in found:
            raise UsageError(f"--vary {key} is given twice", hint="list all its values in one option")
        found[key] = [parse_assignment(f"{key}={part.strip()}")[1] for part in parts]
    return found
