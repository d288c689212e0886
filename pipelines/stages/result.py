"""What a stage hands back; the view prints it or turns it into JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows worth showing to a person; cells are already text or numbers. `in_a_pipe`: the columns that are shown where
    the output is not a terminal, which folds long cells (empty: all)."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    in_a_pipe: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Result:
    """`status`: "done", "skipped" (nothing was to be done) or "failed"; `metrics` holds the fields scripts rely on."""

    command: str
    status: str = "done"
    run: Path | None = None
    lake: Path | str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[Path | str] = ()
    tables: Sequence[Table] = ()
    seconds: float = 0.0
