"""Which modules the runs of this user name by the user's own choice: what was typed when a run was made need not be
typed again.

The record is outside of the run, in the user's state directory, where no download, copy or archive of a run can write.
It holds for the directory in which the run was made, for the tables of its configuration that name modules, and for
the file that each module is. Everything else asks as before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pipelines import trust
from pipelines.errors import AmagoError
from pipelines.files.atomic import write_atomically
from pipelines.files.json import Form, read_object

# Tables in which a value may name a module, or is an argument of one.
_TABLES = ("env", "exploration", "agent", "source", "relabel")
_NAME = re.compile(r"(?:[a-z]+:)?([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_][\w./-]*")
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class _OwnRunRecord(Form):
    """Record of a run of this user. `device` and `inode` are those of its directory; `modules` maps names to the files
    of their modules."""

    path: str
    id: str
    device: int
    inode: int
    settings: str
    modules: dict[str, str]


class OwnRun:
    """The run in the directory `run`, with the configuration `document`."""

    def __init__(self, run: Path, document: Mapping[str, Any]) -> None:
        self.run, self.document = run, document
        state = os.environ.get("XDG_STATE_HOME")
        home = Path(state) if state and Path(state).is_absolute() else Path.home() / ".local" / "state"
        name = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:32]
        self.record = home / "amago" / "own_runs" / f"{name}.json"

    def remember(self) -> None:
        """Record the names in the configuration that the user typed; without a place to write, nothing."""
        modules = {}
        waiting: list[Any] = [self._select_module_settings()]
        while waiting:
            part = waiting.pop()
            if isinstance(part, Mapping | list | tuple):
                waiting += part.values() if isinstance(part, Mapping) else part
            elif isinstance(part, str) and trust.is_typed(part) and (origin := self._find_module(part)) is not None:
                modules[part] = str(origin)
        with contextlib.suppress(OSError, AmagoError):
            if modules:
                self.record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_atomically(self.record, json.dumps({**self._describe(), "modules": modules}))
            else:
                self.record.unlink(missing_ok=True)

    def grant(self) -> None:
        """Allow the names that the user typed when the run was made, if it is that run and nothing has changed."""
        try:
            for path in (self.record.parent, self.record):  # which belong to this user, and no other may write to
                found = path.lstat()
                if found.st_uid != os.geteuid() or found.st_mode & _OTHERS_MAY_WRITE or stat.S_ISLNK(found.st_mode):
                    return
            known = read_object(self.record, _OwnRunRecord)
            if known is None or {**known, "modules": None} != {**self._describe(), "modules": None}:
                return
        except OSError:
            return
        for name, origin in known["modules"].items():
            if origin == str(self._find_module(name)):
                trust.typed(name)

    def _describe(self) -> dict[str, Any]:
        """Describe what must be as it was: the directory, the run in it, and its settings that concern modules."""
        found, identity = self.run.stat(), (read_object(self.run / "run.json") or {}).get("id")
        concerned = json.dumps(self._select_module_settings(), sort_keys=True, default=str)
        return {
            "path": str(self.run.resolve()),
            "id": identity if isinstance(identity, str) else "",
            "device": found.st_dev,
            "inode": found.st_ino,
            "settings": hashlib.sha256(concerned.encode()).hexdigest(),
        }

    def _select_module_settings(self) -> dict[str, Any]:
        train = self.document.get("train")
        replay = train.get("relabel") if isinstance(train, Mapping) else None
        return {**{table: self.document.get(table) for table in _TABLES}, "replay": replay}

    @staticmethod
    def _find_module(name: str) -> Path | None:
        """Find the file that importing `name` would execute first, without importing anything; None for other texts."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        with contextlib.suppress(ImportError, ValueError):
            found = PathFinder.find_spec(match[1], [*sys.path, os.getcwd()])
            if found is not None and found.origin is not None:
                return Path(found.origin).resolve()
        return None
