"""Many trajectories as one array a column, so that a relabeler costs numpy calls and not Python a trajectory.

n trajectories, R rows of all of them together: `columns` (R, ...).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from pipelines.envs.draws import mix, unit
from pipelines.lake.overlays import OverlayBatch
from pipelines.lake.uids import halves

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_STREAM = np.uint64(32)
_SHARE_COPY = 2**62  # no copy has this number: it decides whether a trajectory is relabelled at all


def make_keys(seed: int, uids: np.ndarray, copies: np.ndarray | int) -> np.ndarray:
    """Make the keys (n,) uint64 that all draws for these copies of these trajectories (uids "S16") follow from."""
    parts = halves(uids)
    start = mix(np.array([seed], dtype=np.uint64) + _GOLDEN)
    number = np.atleast_1d(copies).astype(np.uint64) * _GOLDEN
    return mix(mix(mix(start + parts.first) + parts.second) + number)


def draw_shares(seed: int, uids: np.ndarray) -> np.ndarray:
    """Draw (n,) float64 in [0, 1): a fraction of the trajectories is those whose share is below it."""
    return unit(make_keys(seed, uids, _SHARE_COPY))


@dataclass(frozen=True, kw_only=True)
class Paths:
    """`rows` (n,) of each, T + 1 for T actions; `keys` (n,) uint64 seed their draws; `uids` (n,) "S16", `place` (n,)
    and `offset` (n,): original, which one of those given, and its row at which each begins. The rest is that of
    `OverlayBatch`.
    """

    columns: Mapping[str, np.ndarray]
    rows: np.ndarray
    keys: np.ndarray
    uids: np.ndarray
    place: np.ndarray
    offset: np.ndarray
    success: np.ndarray | None = None
    tasks: tuple[str, ...] | None = None
    tags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    names_goal: bool = True

    @classmethod
    def of(cls, columns: Mapping[str, np.ndarray], rows: np.ndarray, uids: np.ndarray, keys: np.ndarray) -> Paths:
        """Take originals, whole."""
        count = len(rows)
        rows = np.asarray(rows, dtype=np.int64)
        offset = np.zeros(count, dtype=np.int64)
        return cls(columns=columns, rows=rows, keys=keys, uids=uids, place=np.arange(count), offset=offset)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def first(self) -> np.ndarray:
        """(n,) row of `columns` that is row 0 of each."""
        return np.cumsum(self.rows) - self.rows

    @cached_property
    def last(self) -> np.ndarray:
        """(n,) row of `columns` that is the last of each."""
        return np.cumsum(self.rows) - 1

    @cached_property
    def time(self) -> np.ndarray:
        """(R,) row of its own trajectory that each row is."""
        return np.arange(int(self.rows.sum())) - self.spread(self.first)

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Repeat values of trajectories (n, ...) in each of their rows (R, ...)."""
        return np.repeat(values, self.rows, axis=0)

    def uniform(self, purpose: int, counter: np.ndarray | int = 0) -> np.ndarray:
        """Draw float64 in [0, 1), (n,), or (n, c) for counters (c,)."""
        number = np.atleast_1d(counter).astype(np.uint64) + (np.uint64(purpose + 1) << _STREAM)
        keys = self.keys[:, None] if np.ndim(counter) else self.keys
        return unit(mix(keys + number * _GOLDEN))

    def renew_keys(self) -> Paths:
        """Return a copy with other draws: each relabeler of a chain has its own."""
        return replace(self, keys=mix(self.keys + _GOLDEN))

    def with_columns(self, columns: Mapping[str, np.ndarray], **labels: Any) -> Paths:
        """Return a copy with the given columns replaced, and `labels` of the trajectories as a whole."""
        return replace(self, columns={**self.columns, **columns}, **labels)

    def only(self, keep: np.ndarray) -> Paths:
        """Keep some of them; `keep` (n,) bool."""
        if keep.all():
            return self
        kept = np.flatnonzero(keep)
        return self.cut(kept, np.zeros(len(kept), dtype=np.int64), self.rows[kept])

    def cut(self, which: np.ndarray, begin: np.ndarray, rows: np.ndarray) -> Paths:
        """Cut `rows` (m,) rows from row `begin` (m,) on out of the trajectories `which` (m,)."""
        whole = len(which) == len(self) and np.array_equal(rows, self.rows)
        start = self.first[which] + begin - (np.cumsum(rows) - rows)
        index = slice(None) if whole else np.repeat(start, rows) + np.arange(int(rows.sum()))
        return replace(
            self,
            columns={name: values[index] for name, values in self.columns.items()},
            rows=rows,
            keys=self.keys[which],
            uids=self.uids[which],
            place=self.place[which],
            offset=self.offset[which] + begin,
            success=None if self.success is None else self.success[which],
            tasks=None if self.tasks is None else tuple(self.tasks[i] for i in which.tolist()),
            tags={name: tuple(values[i] for i in which.tolist()) for name, values in self.tags.items()},
        )

    def as_overlay(self, names: tuple[str, ...]) -> OverlayBatch:
        """Collect the columns `names`, which differ from the originals."""
        return OverlayBatch(
            place=self.place,
            offset=self.offset,
            rows=self.rows,
            columns={name: self.columns[name] for name in names},
            success=self.success,
            tasks=self.tasks,
            tags=self.tags,
            names_goal=self.names_goal,
        )


def pick_rows(flags: np.ndarray, paths: Paths, u: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Count the rows with `flags` (R,) bool of each trajectory (n,), and pick one of them (n,) by `u` (n,) in [0, 1);
    None: the last. Where there is none, the row means nothing.
    """
    marked = np.flatnonzero(flags)
    before, end = np.searchsorted(marked, paths.first), np.searchsorted(marked, paths.last, side="right")
    count = end - before
    rank = count - 1 if u is None else (u * count).astype(np.int64)
    return count, take(marked, before + np.maximum(rank, 0))


def take(marked: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Take `marked[at]`; anything where it has no such place."""
    return marked[np.minimum(at, len(marked) - 1)] if len(marked) else np.zeros_like(at)
