"""The ledger of a chain, chain.json: which steps of the plan are completed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pipelines.errors import IntegrityError
from pipelines.files.atomic import write_atomically
from pipelines.files.json import read_object


class ChainLedger:
    """Number of completed steps of the plan, and the seconds that the parts of its stages took so far."""

    def __init__(self, path: Path) -> None:
        self.path, self.passed = path, 0
        self._seconds: dict[str, float] = {}
        if path.exists():
            stored = read_object(path) or {}
            passed, seconds = stored.get("passed"), stored.get("seconds")
            if not isinstance(passed, int):
                raise IntegrityError(f"'{path}' is damaged", hint="restore it from a copy, or start over with --fresh")
            self.passed = passed
            known = seconds.items() if isinstance(seconds, dict) else ()
            self._seconds = {name: float(spent) for name, spent in known if isinstance(spent, int | float)}

    def advance(self, passed: int, spent: Mapping[str, float]) -> None:
        self.passed = passed
        for name, seconds in spent.items():
            self._seconds[name] = round(self._seconds.get(name, 0.0) + seconds, 3)
        write_atomically(self.path, json.dumps({"passed": passed, "seconds": self._seconds}))
