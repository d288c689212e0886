"""Trajectories derived from others: what differs, where each begins in its original, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Derived:
    """n trajectories. `place` (n,) int64: which of the originals given each is from, in order; `offset` (n,) int64: the
    row of it at which it begins; `rows` (n,) int64: of each, 2 or more. `columns`: those that differ, rows of each
    one after the other.

    Of each as a whole: `success` (n,) int8, 1, 0, or -1 where it is not known; `tasks`; `tags`, values by name. None:
    as the original. `names_goal`: whether the original's `goal_text` still says what is asked.
    """

    place: np.ndarray
    offset: np.ndarray
    rows: np.ndarray
    columns: Mapping[str, np.ndarray]
    success: np.ndarray | None = None
    tasks: Sequence[str] | None = None
    tags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    names_goal: bool = True

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def first(self) -> np.ndarray:
        """(n,) int64: row of `columns` at which each begins."""
        return np.cumsum(self.rows) - self.rows
