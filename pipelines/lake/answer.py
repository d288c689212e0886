"""The answer to a query: rows that a program can walk, a notebook can show, and pandas can take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pipelines.errors import InputMissing

_SHOWN = 10


@dataclass(frozen=True)
class Answer:
    """Column names and rows. Iterating gives a dictionary per row.

    >>> list(Answer(["a", "b"], [(1, 2)]))
    [{'a': 1, 'b': 2}]
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)

    def df(self) -> Any:
        """The answer as a `pandas.DataFrame`. InputMissing where pandas is not installed."""
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise InputMissing("a DataFrame needs pandas, which is not installed", hint="pip install pandas") from error
        return pandas.DataFrame([list(row) for row in self.rows], columns=list(self.columns))

    def __repr__(self) -> str:
        head = [", ".join(f"{name}={value!r}" for name, value in row.items()) for row in islice(self, _SHOWN)]
        more = [f"... {len(self) - _SHOWN} more"] if len(self) > _SHOWN else []
        return "\n".join([f"<{len(self)} rows: {', '.join(self.columns)}>", *head, *more])
