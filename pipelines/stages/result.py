"""Results of stages; the view prints them or turns them into JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows to show to a person; cells are text or numbers. `in_a_pipe`: the columns to show when the output is not a
    terminal (empty: all)."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    in_a_pipe: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Result:
    """Outcome of a stage.

    `status`: "done", "skipped" (nothing to do) or "failed"; `metrics`: the fields that scripts rely on; `outputs`: the
    files and directories written; `seconds`: duration; `remark`: a last line that a person should not miss.
    """

    command: str
    status: str = "done"
    run: Path | None = None
    lake: Path | str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[Path | str] = ()
    tables: Sequence[Table] = field(default=(), repr=False)
    seconds: float = 0.0
    remark: str = ""
