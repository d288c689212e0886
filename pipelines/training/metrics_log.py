"""metrics.jsonl: one line a moment, one writer; a resume drops the lines of updates that will be done again."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.config.atomic import explained, write_atomically


class MetricsLog:
    """Appends to the file at `path`. Each line has `update`, `stage`, `time` (seconds since the epoch) and figures."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rewind(self, update: int) -> None:
        """Drop training lines after `update`, and a torn last line."""
        if not self.path.is_file():
            return
        kept = []
        for line in self.path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # the tail of a write that a kill cut short
            if entry.get("stage") != "train" or entry.get("update", 0) <= update:
                kept.append(line)
        write_atomically(self.path, "".join(f"{line}\n" for line in kept))

    def append(self, stage: str, update: int, figures: Mapping[str, Any]) -> None:
        """Add one line."""
        entry = {"update": update, "stage": stage, "time": round(time.time(), 3), **figures}
        with explained(f"write '{self.path}'"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All complete lines."""
        if not self.path.is_file():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines() if line.endswith("}")]
