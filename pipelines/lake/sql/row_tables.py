"""Tables that user SQL can query without a lake: rows in memory, and logs of JSON lines.

This module imports no Arrow: `amago runs` lists runs in a fraction of the time that importing it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.events import Listener, silent
from pipelines.lake.sql import sandbox
from pipelines.lake.sql.sandbox import QueryLimits


@dataclass(frozen=True, kw_only=True)
class RowTable:
    """Rows as JSON objects; `columns` are always there, with the type "text", "count" or "number"."""

    columns: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class LogTable:
    """Lines of `files`, each with the name of its run: columns `run`, `stage`, and the numbers called `columns`."""

    files: Sequence[tuple[str, str]]
    columns: Sequence[str]


Tables = Mapping[str, RowTable | LogTable]


def query(
    tables: Tables, text: str, *, limits: QueryLimits | None = None, listener: Listener = silent
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return the column names and rows of one SELECT by a user. UsageError, with the place in the text, for anything
    else."""
    arguments = {"tables": dict(tables), "text": text}
    found: tuple[list[str], list[tuple[Any, ...]]] = sandbox.ask(
        "answer_tables", arguments, limits or QueryLimits(), listener=listener
    )
    return found


def matching(name: str, table: RowTable, text: str, *, listener: Listener = silent) -> list[int]:
    """Return the places of the rows for which a user's SQL expression holds. UsageError, with the place in the text."""
    found: list[int] = sandbox.ask(
        "matching", {"tables": {name: table}, "text": text}, QueryLimits(), listener=listener
    )
    return found
