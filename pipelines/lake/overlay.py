"""Overlays: trajectories derived from others, stored as the columns that differ.

An overlay trajectory has a uid of its own, refers to its base by uid and segment, starts `base_offset` steps
into it and may be shorter. Its base is never an overlay, so a window is read from two files at most. It is
one more trajectory: the base stays live beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.errors import InputMissing
from pipelines.lake.reading import Reader
from pipelines.lake.schema import ACTION, REWARD, TERMINATED, TRUNCATED, Schema
from pipelines.lake.trajectory import TrajectoryInfo
from pipelines.lake.writer import Writer, checked, row_of

if TYPE_CHECKING:
    from pipelines.lake.store import Lake


class OverlayWriter(Writer):
    """Appends derived trajectories that change `columns` of sealed ones."""

    _overlay = True

    def __init__(
        self,
        lake: Lake,
        schema: Schema,
        columns: Sequence[str],
        *,
        name: str | None = None,
        seal_bytes: int = 64 << 20,
        seal_seconds: float = 10.0,
    ) -> None:
        unknown = set(columns) - {c.name for c in schema.columns}
        if unknown or not columns:
            raise InputMissing(
                f"lake '{lake.name}' has no columns {sorted(unknown)} to change",
                hint=f"it has {', '.join(c.name for c in schema.columns)}",
            )
        stored = [c for c in schema.columns if c.name in columns]
        super().__init__(
            lake.storage, schema, name=name, seal_bytes=seal_bytes, seal_seconds=seal_seconds, columns=stored
        )
        self._reader = Reader(lake)

    def append(  # type: ignore[override]
        self,
        base_uid: str,
        columns: Mapping[str, np.ndarray],
        *,
        method: str,
        base_offset: int = 0,
        info: TrajectoryInfo | None = None,
    ) -> str:
        """Store what differs from the rows [base_offset, base_offset + rows) of a trajectory; returns the new
        uid.

        `method` names the relabeler; `info` replaces the base's where given. InputMissing when the base is
        not sealed here or is an overlay itself; ValueError when the columns do not fit. Starting inside the
        base changes what led to row 0, so `base_offset` > 0 needs `action` and `reward` among the columns
        (zeros at row 0).
        """
        rows = len(next(iter(columns.values())))
        stored = checked(self.columns, columns, [rows])
        try:
            row = self._row(base_uid, stored, method, base_offset, info)
        except FileNotFoundError:  # rewritten and swept since the last look
            self._reader.refresh()
            row = self._row(base_uid, stored, method, base_offset, info)
        return self._append(stored, [rows], row, {})[0]

    def _row(
        self,
        base_uid: str,
        stored: Mapping[str, np.ndarray],
        method: str,
        base_offset: int,
        info: TrajectoryInfo | None,
    ) -> dict[str, Any]:
        rows = len(next(iter(stored.values())))
        base, place = self._reader.locate(base_uid)
        if base.is_overlay:
            raise InputMissing(f"trajectory {base_uid} is an overlay itself", hint="derive from its base")
        if base.schema_id != self.schema.id:
            raise InputMissing(f"trajectory {base_uid} has another schema")
        if base_offset < 0 or base_offset + rows > base.length[place] + 1:
            raise ValueError(
                f"rows [{base_offset}, {base_offset + rows}) of a trajectory of {base.length[place] + 1} rows"
            )
        if base_offset > 0 and not {ACTION, REWARD} <= stored.keys():
            raise ValueError("an overlay that starts inside its base must store 'action' and 'reward'")
        file, row0 = self._reader.file(base.number), int(base.row0[place]) + base_offset
        decisive = {
            name: stored[name] if name in stored else file.read_rows(name, row0, row0 + rows)
            for name in (REWARD, TERMINATED, TRUNCATED)
        }
        given = info if info is not None else self._reader.info(base_uid)
        return row_of(given) | {
            "length": rows - 1,
            "return": float(decisive[REWARD][1:].sum(dtype=np.float64)),
            "terminated": bool(decisive[TERMINATED][-1]),
            "truncated": bool(decisive[TRUNCATED][-1]),
            "base_uid": base_uid,
            "base_segment": base.id,
            "base_offset": int(base_offset),
            "relabel_method": method,
        }
