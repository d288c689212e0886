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
        is_group = words and (words[0] in _GROUPS or (words[0] == "runs" and words[-1] in _RUNS_COMMANDS))
        command = " ".join(words) if is_group else "".join(words[:1])
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
