"""Relabelers of what a step is worth and of what a trajectory is called.

`reward:F` pays what F says, `success:F` holds where F does in some step, F being a SQL expression over the step
columns or `module:attr`, a function of a trajectory's columns. `scale:X` and `clip:LOW..HIGH` change the rewards that
are there; `return:GAMMA` notes the discounted return as a tag; `task:NAME` names the task. What lies in row 0 led to
nothing: its reward is 0, and it is not a success.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pipelines.errors import UsageError
from pipelines.lake.schema import REWARD
from pipelines.relabelers.base import Context, Relabeler
from pipelines.relabelers.functions import Labels, step_values
from pipelines.relabelers.paths import Paths

Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """New rewards: `pay(paths)` (R,) float64, of which those in rows 0 do not count."""

    reads: tuple[str, ...]
    pay: Callable[[Paths], np.ndarray]
    changes: tuple[str, ...] = (REWARD,)

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

    def relabel(self, paths: Paths) -> Paths:
        weights = np.power(self.gamma, np.maximum(paths.time - 1, 0)) * (paths.time > 0)
        returns = np.add.reduceat(paths.columns[REWARD] * weights, paths.first)
        texts = tuple(f"{value:.9g}" for value in returns.tolist())
        return paths.with_columns({}, tags={**paths.tags, f"return@{self.gamma:g}": texts})


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task is called what `name` says of a trajectory's columns."""

    name: Callable[[Paths], tuple[str, ...]]
    reads: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    def relabel(self, paths: Paths) -> Paths:
        return paths.with_columns({}, tasks=self.name(paths))


def make_reward(text: str, context: Context) -> Relabeler:
    """Rewards by a SQL expression or a function."""
    reads, pay = step_values(text, context, needed_by="reward", example='reward:"obs.speed" - 0.1')
    return Rewards(reads=reads, pay=pay)


def make_success(text: str, context: Context) -> Relabeler:
    """Success labels by a SQL predicate or a function."""
    reads, holds = step_values(text, context, needed_by="success", example="success:reward >= 1", predicate=True)
    return Success(reads=reads, holds=holds)


def make_scale(text: str, context: Context) -> Relabeler:
    """Rewards times a number."""
    factor = _number(text, "scale", "scale:0.1")
    return Rewards(reads=(REWARD,), pay=lambda paths: paths.columns[REWARD] * factor)


def make_clip(text: str, context: Context) -> Relabeler:
    """Rewards moved into a range."""
    low, dots, high = text.partition("..")
    least, most = (_number(side, "clip", "clip:-1..1") for side in (low, high if dots else ""))
    if least > most:
        raise UsageError(f"clip:{text}: the range is empty", hint="the lower bound comes first, e.g. clip:-1..1")
    return Rewards(reads=(REWARD,), pay=lambda paths: np.clip(paths.columns[REWARD], least, most))


def make_return(text: str, context: Context) -> Relabeler:
    """Discounted returns as tags."""
    gamma = _number(text, "return", "return:0.99")
    if not 0 <= gamma <= 1:
        raise UsageError(f"return:{text}: a discount is a number from 0 to 1", hint="e.g. return:0.99")
    return DiscountedReturn(gamma=gamma)


def make_task(text: str, context: Context) -> Relabeler:
    """Task labels: one for all, or by a function."""
    if not text:
        raise UsageError("task: no label is given", hint="e.g. task:easy, or task:module:attr")
    labels = Labels.of(text, context)
    if labels is not None:
        return Task(reads=labels.reads, name=labels)
    return Task(name=lambda paths: (text,) * len(paths))


def _number(text: str, relabeler: str, example: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{relabeler}: '{text}' is not a number", hint=f"e.g. --with {example}")
    return value
