"""Values of steps and names of trajectories that a user defines: by SQL, or by a function `module:attr`.

A function is called with one trajectory's columns (name -> (T + 1, ...), read-only) and returns (T + 1,) numbers, or a
text. Whatever is wrong with it is the user's to mend: a UsageError that says where.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.errors import AmagoError, UsageError
from pipelines.lake.footer import hex_uids
from pipelines.lake.sql.expression import StepExpression
from pipelines.registry import Registry
from pipelines.relabelers.base import Context
from pipelines.relabelers.paths import Paths

_IMPORTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_FUNCTIONS = Registry("function", {})
Values = Callable[[Paths], np.ndarray]


def step_values(
    text: str, context: Context, *, needed_by: str, example: str, predicate: bool = False
) -> tuple[tuple[str, ...], Values]:
    """The columns to read, and a function from paths to (R,) numbers, 0 or 1 for a `predicate`.

    UsageError for wrong SQL, and from the function for values that are no numbers.
    """
    if not text.strip():
        raise UsageError(f"{needed_by}: no SQL expression or module:attr is given", hint=f"e.g. --with '{example}'")
    if _IMPORTED.fullmatch(text):
        function = Numbers(text, context)
        return function.reads, function
    expression = StepExpression(text, context.schema.columns, predicate=predicate, listener=context.listener)

    def evaluate(paths: Paths) -> np.ndarray:
        columns = {name: paths.columns[name] for name in expression.reads}
        values = expression.evaluate(columns, paths.time, paths.spread(np.arange(len(paths))))
        _refuse_no_numbers(values, paths, f"{needed_by}:{text}")
        return values

    return expression.reads, evaluate


@dataclass(frozen=True)
class Called:
    """The function `text`, called trajectory by trajectory."""

    text: str
    context: Context

    def __post_init__(self) -> None:
        if not callable(_FUNCTIONS.get(self.text)):
            raise UsageError(f"'{self.text}' is not a function", hint="name a function of a trajectory's columns")

    @property
    def reads(self) -> tuple[str, ...]:
        """Return all columns: a function may read any."""
        return tuple(column.name for column in self.context.schema.columns)

    def results(self, paths: Paths) -> Iterator[Any]:
        """What it returns for each trajectory."""
        function = _FUNCTIONS.get(self.text)
        spans = zip(paths.first.tolist(), paths.rows.tolist(), hex_uids(paths.uids), strict=True)
        for start, rows, uid in spans:
            columns = _read_only({name: values[start : start + rows] for name, values in paths.columns.items()})
            try:
                yield function(columns)
            except AmagoError:
                raise
            except Exception as error:
                reason = str(error).splitlines()[0] if str(error) else ""
                raise UsageError(
                    f"'{self.text}' raised {type(error).__name__}{f': {reason}' if reason else ''} on trajectory {uid}",
                    hint="mend the function",
                ) from error


class Numbers(Called):
    """(R,) float64 of what it returns for each trajectory: (T + 1,) finite numbers."""

    def __call__(self, paths: Paths) -> np.ndarray:
        found = []
        for place, (result, rows) in enumerate(zip(self.results(paths), paths.rows.tolist(), strict=True)):
            values = np.asarray(result)
            if values.shape != (rows,) or values.dtype.kind not in "biuf":
                uid = hex_uids(paths.uids[place : place + 1])[0]
                raise UsageError(
                    f"'{self.text}' returned {values.dtype} {values.shape} for trajectory {uid}",
                    hint=f"return one number for each of its {rows} rows, that of row 0 not counting",
                )
            found.append(values.astype(np.float64))
        values = np.concatenate(found) if found else np.zeros(0)
        _refuse_no_numbers(values, paths, f"'{self.text}'")
        return values


class Labels(Called):
    """What it calls each trajectory."""

    @classmethod
    def of(cls, text: str, context: Context) -> Labels | None:
        """None where the text names no function."""
        return cls(text, context) if _IMPORTED.fullmatch(text) else None

    def __call__(self, paths: Paths) -> tuple[str, ...]:
        names = tuple(self.results(paths))
        for name in names:
            if not isinstance(name, str):
                raise UsageError(f"'{self.text}' returned {name!r}, a text expected", hint="return the task's name")
        return names


def _read_only(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    views = {name: values.view() for name, values in columns.items()}
    for view in views.values():
        view.flags.writeable = False
    return views


def _refuse_no_numbers(values: np.ndarray, paths: Paths, what: str) -> None:
    """UsageError where a row that counts has no finite number."""
    bad = ~np.isfinite(values)
    bad[paths.first] = False
    if not bad.any():
        return
    row = int(np.flatnonzero(bad)[0])
    place = int(np.searchsorted(paths.last, row))
    uid, time = hex_uids(paths.uids[place : place + 1])[0], row - int(paths.first[place])
    raise UsageError(
        f"{what} is {'NULL or NaN' if np.isnan(values[row]) else 'infinite'} in {int(bad.sum())} steps, "
        f"first in row {time} of trajectory {uid}",
        hint="give every step a finite number, e.g. with coalesce(X, 0)",
    )
