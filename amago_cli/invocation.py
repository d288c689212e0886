"""One call of `amago`: what is known about it so far, so that a failure is reported in the right format."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

_GROUPS = ("lake",)
_RUNS_COMMANDS = ("ls", "sql", "rm", "prune")
"""Commands of `amago runs`, whose first may be left out."""
_FLAGS = ("-q", "--quiet", "-v", "--verbose", "--dry-run", "--trust")
_WITH_VALUES = ("-c", "--config", "-s", "--set", "--output")


def common_options_last(arguments: Sequence[str]) -> list[str]:
    """Move common options that come before the command behind it, where the option parser expects them.

    >>> common_options_last(["-q", "--output", "json", "lake", "ls", "runs"])
    ['lake', 'ls', '-q', '--output', 'json', 'runs']
    """
    place = 0
    while place < len(arguments):
        word = arguments[place]
        if word in _WITH_VALUES:
            place += 2
        elif word in _FLAGS or word.partition("=")[0] in _WITH_VALUES:
            place += 1
        else:
            break
    early, rest = list(arguments[:place]), list(arguments[place:])
    if not rest or rest[0].startswith("-"):
        return list(arguments)
    path = 2 if _is_group(rest[:2]) and len(rest) > 1 and not rest[1].startswith("-") else 1
    return [*rest[:path], *early, *rest[path:]]


def _is_group(words: Sequence[str]) -> bool:
    return bool(words) and (words[0] in _GROUPS or (words[0] == "runs" and words[-1] in _RUNS_COMMANDS))


@dataclass
class Invocation:
    """Facts about one call, filled in step by step: first from the raw arguments, later by the command."""

    command: str = ""
    arguments: tuple[str, ...] = ()
    json: bool = False
    csv: bool = False
    verbose: bool = False
    quiet: bool = False
    run: Path | None = None
    lake: Path | str | None = None
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> Invocation:
        """Read what is needed before parsing: a parse error must be reported in JSON as well."""
        words = [word for word in arguments[:2] if not word.startswith("-")]
        command = " ".join(words) if _is_group(words) else "".join(words[:1])
        pairs = list(pairwise(arguments))
        json = "--output=json" in arguments or ("--output", "json") in pairs
        return cls(
            command=command,
            arguments=tuple(arguments),
            json=json,
            verbose="-v" in arguments or "--verbose" in arguments,
        )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started
