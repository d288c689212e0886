"""What an exporter of trajectories is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.lake.reading import Reader
from pipelines.lake.schema import Schema
from pipelines.lake.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written; `trajectories` and `steps` count what is there now, `written` what was not there before."""

    trajectories: int
    steps: int
    written: int
    bytes: int


@dataclass(frozen=True)
class Item:
    """A trajectory, read when it is asked for."""

    uid: str
    reader: Reader

    def trajectory(self) -> Trajectory:
        """Its columns, overlays applied."""
        return self.reader.read(self.uid)

    def row(self) -> dict[str, Any]:
        """What the table `trajectories` says of it."""
        return dict(self.reader.row(self.uid))

    def schema(self) -> Schema:
        """Of its steps."""
        return self.reader.lake.schema(self.reader.locate(self.uid)[0].schema_id)


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as JSON takes it: uids as texts, tags as an object."""
    found = {name: value.hex() if isinstance(value, bytes) else value for name, value in row.items()}
    return {**found, "tags": dict(row["tags"] or ())}
