"""Relabelers of the rewards of steps, and of the success, return and task of a trajectory.

`reward:F` pays F, and a trajectory succeeds by `success:F` if F holds in some step. F is a SQL expression over the step
columns, or `module:attr`, a function of a trajectory's columns. `scale:X` and `clip:LOW..HIGH` change the rewards that
are there; `return:GAMMA` notes the discounted return as a tag; `task:NAME` names the task. No action led to row 0: its
reward is 0, and it is not a success.

A function is called with one trajectory's columns (name -> (T + 1, ...), read-only) and returns (T + 1,) numbers, or a
text. Anything else is a UsageError that says where.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.errors import AmagoError, UsageError
from pipelines.lake.footer import hex_uids
from pipelines.lake.schema import REWARD
from pipelines.lake.sql.query import StepExpression
from pipelines.registry import Registry
from pipelines.relabelers.base import Context
from pipelines.relabelers.paths import Paths

Columns = Mapping[str, np.ndarray]
_IMPORTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_FUNCTIONS = Registry("function", {})
Values = Callable[[Paths], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """New rewards: `pay(paths)` (R,) float64, of which those in rows 0 do not count."""

    reads: tuple[str, ...]
    pay: Callable[[Paths], np.ndarray]
    changes: tuple[str, ...] = (REWARD,)

    @classmethod
    def from_values(cls, text: str, context: Context) -> Rewards:
        """Take rewards from a SQL expression or a function."""
        reads, pay = find_values(text, context, needed_by="reward", example='reward:"obs.speed" - 0.1')
        return cls(reads=reads, pay=pay)

    @classmethod
    def from_scale(cls, text: str, context: Context) -> Rewards:
        """Multiply rewards by a number."""
        factor = _parse_number(text, "scale", "scale:0.1")
        return cls(reads=(REWARD,), pay=lambda paths: paths.columns[REWARD] * factor)

    @classmethod
    def from_range(cls, text: str, context: Context) -> Rewards:
        """Move rewards into a range."""
        low, dots, high = text.partition("..")
        least, most = (_parse_number(side, "clip", "clip:-1..1") for side in (low, high if dots else ""))
        if least > most:
            raise UsageError(f"clip:{text}: the range is empty", hint="the lower bound comes first, e.g. clip:-1..1")
        return cls(reads=(REWARD,), pay=lambda paths: np.clip(paths.columns[REWARD], least, most))

    def relabel(self, paths: Paths) -> Paths:
        reward = self.pay(paths).astype(np.float32)
        reward[paths.first] = 0.0
        return paths.with_columns({REWARD: reward})


@dataclass(frozen=True, kw_only=True)
class Success:
    """A trajectory succeeds if `holds(paths)` (R,) is not 0 in a row after row 0."""

    reads: tuple[str, ...]
    holds: Callable[[Paths], np.ndarray]
    changes: tuple[str, ...] = ()

    @classmethod
    def from_values(cls, text: str, context: Context) -> Success:
        """Take success from a SQL predicate or a function."""
        reads, holds = find_values(text, context, needed_by="success", example="success:reward >= 1", predicate=True)
        return cls(reads=reads, holds=holds)

    def relabel(self, paths: Paths) -> Paths:
        held = self.holds(paths) != 0
        held[paths.first] = False
        return paths.with_columns({}, success=np.logical_or.reduceat(held, paths.first).astype(np.int8))


@dataclass(frozen=True, kw_only=True)
class DiscountedReturn:
    """A tag `return@GAMMA`: sum of gamma ** t * (reward of the t-th action, from 0 on)."""

    gamma: float
    reads: tuple[str, ...] = (REWARD,)
    changes: tuple[str, ...] = ()

    @classmethod
    def from_discount(cls, text: str, context: Context) -> DiscountedReturn:
        """Note discounted returns as tags."""
        gamma = _parse_number(text, "return", "return:0.99")
        if not 0 <= gamma <= 1:
            raise UsageError(f"return:{text}: a discount is a number from 0 to 1", hint="e.g. return:0.99")
        return cls(gamma=gamma)

    def relabel(self, paths: Paths) -> Paths:
        weights = np.power(self.gamma, np.maximum(paths.time - 1, 0)) * (paths.time > 0)
        returns = np.add.reduceat(paths.columns[REWARD] * weights, paths.first)
        texts = tuple(f"{value:.9g}" for value in returns.tolist())
        return paths.with_columns({}, tags={**paths.tags, f"return@{self.gamma:g}": texts})


@dataclass(frozen=True, kw_only=True)
class Task:
    """A new name of the task, which `name` finds from a trajectory's columns."""

    name: Callable[[Paths], tuple[str, ...]]
    reads: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    @classmethod
    def from_label(cls, text: str, context: Context) -> Task:
        """Name the task: one for all, or by a function."""
        if not text:
            raise UsageError("task: no label is given", hint="e.g. task:easy, or task:module:attr")
        if _IMPORTED.fullmatch(text):
            function = UserFunction(text, context)
            return cls(reads=function.reads, name=function.name_all)
        return cls(name=lambda paths: (text,) * len(paths))

    def relabel(self, paths: Paths) -> Paths:
        return paths.with_columns({}, tasks=self.name(paths))


def _parse_number(text: str, relabeler: str, example: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{relabeler}: '{text}' is not a number", hint=f"e.g. --with {example}")
    return value


def find_values(
    text: str, context: Context, *, needed_by: str, example: str, predicate: bool = False
) -> tuple[tuple[str, ...], Values]:
    """Find the columns to read, and a function from paths to (R,) numbers, 0 or 1 for a `predicate`.

    UsageError for wrong SQL, and from the function for values that are no numbers.
    """
    if not text.strip():
        raise UsageError(f"{needed_by}: no SQL expression or module:attr is given", hint=f"e.g. --with '{example}'")
    if _IMPORTED.fullmatch(text):
        function = UserFunction(text, context)
        return function.reads, function.compute
    expression = StepExpression(text, context.schema.columns, predicate=predicate, listener=context.listener)

    def evaluate(paths: Paths) -> np.ndarray:
        columns = {name: paths.columns[name] for name in expression.reads}
        values = expression.evaluate(columns, paths.time, paths.spread(np.arange(len(paths))))
        _refuse_no_numbers(values, paths, f"{needed_by}:{text}")
        return values

    return expression.reads, evaluate


@dataclass(frozen=True)
class UserFunction:
    """The function `text`, called trajectory by trajectory."""

    text: str
    context: Context

    def __post_init__(self) -> None:
        if not callable(_FUNCTIONS.get(self.text)):
            raise UsageError(f"'{self.text}' is not a function", hint="name a function of a trajectory's columns")

    @property
    def reads(self) -> tuple[str, ...]:
        """All columns: a function may read any."""
        return tuple(column.name for column in self.context.schema.columns)

    def _call_each(self, paths: Paths) -> Iterator[Any]:
        function = _FUNCTIONS.get(self.text)
        spans = zip(paths.first.tolist(), paths.rows.tolist(), hex_uids(paths.uids), strict=True)
        for start, rows, uid in spans:
            columns = {name: values[start : start + rows].view() for name, values in paths.columns.items()}
            for column in columns.values():
                column.flags.writeable = False
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

    def compute(self, paths: Paths) -> np.ndarray:
        """Compute (R,) float64. UsageError unless it returns (T + 1,) finite numbers for each trajectory."""
        found = []
        for place, (result, rows) in enumerate(zip(self._call_each(paths), paths.rows.tolist(), strict=True)):
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

    def name_all(self, paths: Paths) -> tuple[str, ...]:
        """Name the task of each trajectory. UsageError unless it returns texts."""
        names = tuple(self._call_each(paths))
        for name in names:
            if not isinstance(name, str):
                raise UsageError(f"'{self.text}' returned {name!r}, a text expected", hint="return the task's name")
        return names


def _refuse_no_numbers(values: np.ndarray, paths: Paths, what: str) -> None:
    """Raise UsageError where a row that counts has no finite number."""
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
