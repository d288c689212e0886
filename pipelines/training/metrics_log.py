"""metrics.jsonl: one line a moment, one writer; a resume drops the lines of updates that will be done again."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.files.atomic import explain_errors, write_atomically
from pipelines.files.json import Form, fits, read_objects


class _Line(Form):
    update: int
    stage: str


class MetricsLog:
    """Appends to the file at `path`.

    Each line has `update`, `stage`, `time` (seconds since the epoch), `cpu_seconds` (of the writing process, all its
    threads, since it started: a resumed run counts from 0 again) and figures.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def rewind(self, update: int) -> None:
        """Drop training lines after `update`, and what cannot be read (a kill may cut the last line short)."""
        if not self.path.is_file():
            return
        kept = [entry for entry in self.read() if entry.get("stage") != "train" or entry.get("update", 0) <= update]
        write_atomically(self.path, "".join(f"{json.dumps(entry)}\n" for entry in kept))

    def append(self, stage: str, update: int, figures: Mapping[str, Any]) -> None:
        """Add one line."""
        now, cpu = round(time.time(), 3), round(time.process_time(), 3)
        entry = {"update": update, "stage": stage, "time": now, "cpu_seconds": cpu, **figures}
        with explain_errors(f"write '{self.path}'"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All lines that can be read and have the two keys that every line has."""
        return [entry for entry in read_objects(self.path) if fits(entry, _Line)]
