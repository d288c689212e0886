"""Where the trajectories of a flat file begin and end.

An episode ends where `terminals` or `timeouts` say so, and at the last step. It also ends where `next_observations` is
not what the next row observes: rows were left out there, or shuffled. If that holds for most rows, the file is a buffer
of unrelated transitions, and each row is a trajectory of one step.

Without `timeouts`, an episode that is longer than the time limit of its environment is cut there: D4RL's own rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.errors import InputMissing
from pipelines.events import Notice
from pipelines.formats.base import Request
from pipelines.formats.intake import read_flags
from pipelines.formats.transitions import MOST_UNRELATED, describe_breaks, differ

_SCAN = 1 << 20  # steps of flags read at a time
_ENDS_KEPT = 16  # next observations are kept of at most one row in so many


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """Datasets of a file; `following` has those of `observation` whose next value is there.

    `closing`: the last row of a trajectory only observes what the one before it led to. `stride`: a trajectory ends
    after each so many steps at the latest (0: anywhere), where environments lie one after another.
    """

    observation: Mapping[str, Any]
    following: Mapping[str, Any]
    action: Any
    reward: Any
    terminal: Any
    timeout: Any
    reset: Any
    records: Any
    closing: bool = False
    stride: int = 0

    @property
    def steps(self) -> int:
        return len(self.reward)

    def all(self) -> Iterator[Any]:
        """Yield the arrays that have a value for each step."""
        yield from self.observation.values()
        yield from self.following.values()
        yield from (self.action, self.reward, self.terminal)
        yield from (values for values in (self.timeout, self.reset) if values is not None)

    def find_breaks(self, marks: np.ndarray, block_rows: int) -> tuple[np.ndarray, dict[str, np.ndarray] | None]:
        """Find, (N,), whether the next observation of a row differs from the observation of the next row; and the next
        observations of these rows and of those in `marks` by column, unless there are too many to keep.
        """
        breaks = np.zeros(self.steps, dtype=bool)
        kept: dict[str, list[np.ndarray]] = {name: [] for name in self.following}
        room = max(self.steps // _ENDS_KEPT, 1)
        for at in range(0, self.steps, block_rows):
            stop = min(at + block_rows, self.steps)
            inner = min(stop, self.steps - 1)
            read = {name: following[at:stop] for name, following in self.following.items()}
            for name, following in read.items():
                breaks[at:inner] |= differ(following[: inner - at], self.observation[name][at + 1 : inner + 1])
            ends = breaks[at:stop] | marks[at:stop]
            room -= int(ends.sum())
            if room >= 0:
                for name, following in read.items():
                    kept[name].append(following[ends])
        return breaks, {name: np.concatenate(rows) for name, rows in kept.items()} if room >= 0 else None

    def find_pieces(
        self, request: Request, *, limit: int | None, block_rows: int, path: Path, exported: bool
    ) -> _Pieces:
        """Find the trajectories of a file; `limit` is the time limit of its environment, as far as that is known.

        InputMissing where it cannot be known where episodes end: there are neither timeouts nor next observations, no
        limit is known, and `source.horizon` says nothing. `exported`: our own export, which marks every end.
        """
        settings, listener = request.settings, request.listener
        over = _read_all_flags(self.terminal, path)
        cut = _read_all_flags(self.timeout, path) if self.timeout is not None else np.zeros_like(over)
        marks = over | cut
        marks[-1] = True
        if self.stride:
            marks[self.stride - 1 :: self.stride] = True
        closing = None
        if self.following and not exported:
            found, closing = self.find_breaks(marks, block_rows)
            breaks = found & ~marks
            inside = int((~marks).sum())
            count = int(breaks.sum())
            if count > MOST_UNRELATED * inside:
                marks[:] = True
                closing = None
                listener(describe_breaks(f"'{path}'", count, inside, unrelated=True))
            elif count:
                marks |= breaks
                listener(describe_breaks(f"'{path}'", count, inside, unrelated=False))
        ends = np.flatnonzero(marks) + 1
        horizon = settings.horizon if isinstance(settings.horizon, int) else 0
        if settings.horizon == "auto" and not cut.any() and not exported:
            if limit is None and self.timeout is None and not self.following:
                raise InputMissing(
                    f"'{path}' has no timeouts, and the time limit of its environment is not known: episodes that "
                    "ran into it would be joined",
                    hint="give the limit by --set source.horizon=STEPS (0: terminals mark every end), or name --env",
                )
            if limit is not None and int(np.diff(ends, prepend=0).max()) > limit:
                what = f"episodes are cut after {limit:,} steps, the time limit (source.horizon)"
                listener(Notice(text=f"'{path}' marks no timeouts: {what}"))
                horizon = limit
        within = _divide(ends, horizon) if horizon else ends
        pieces = _divide(within, settings.longest)
        last = pieces - 1
        return _Pieces(
            begin=np.concatenate([[0], pieces[:-1]]),
            end=pieces,
            terminated=over[last],
            truncated=cut[last] | ~over[last],
            continued=~np.isin(pieces, within),
            unsure=np.isin(pieces, within) & ~marks[last],
            after=closing if np.array_equal(last, np.flatnonzero(marks)) else None,
        )


@dataclass(frozen=True)
class _Pieces:
    """Trajectories as steps [begin, end) of the file, (n,) each.

    `continued`: the next row observes what the last step led to. `unsure`: cut at a time limit where the file has the
    next episode's first observation, if anything, in place of what the last step led to. `after`: column -> (n, ...),
    what the last step led to, so that `following` need not be read again; None where it must be.
    """

    begin: np.ndarray
    end: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    continued: np.ndarray
    unsure: np.ndarray
    after: Mapping[str, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.begin)


def _divide(ends: np.ndarray, most: int) -> np.ndarray:
    """Divide episodes that end at `ends` into pieces of at most `most` steps, and return the ends of these."""
    begin = np.concatenate([[0], ends[:-1]])
    if (ends - begin).max() <= most:
        return ends
    parts = [np.append(np.arange(a + most, b, most), b) for a, b in zip(begin.tolist(), ends.tolist(), strict=True)]
    return np.concatenate(parts)


def require_one_number(values: Any, path: Path) -> None:
    """Raise InputMissing unless an array is (N,) or (N, 1)."""
    if not values.shape or int(np.prod(values.shape[1:], dtype=np.int64)) != 1:
        shown = f"{values.shape[1:]} values a step, not one" if values.shape else "no axis of steps"
        raise InputMissing(f"'{path}': {values.name.lstrip('/')} has {shown}")


def _read_all_flags(values: Any, path: Path) -> np.ndarray:
    """Read flags of any dtype and of shape (N,) or (N, 1) as (N,) bool."""
    require_one_number(values, path)
    name, what = values.name.lstrip("/"), f"'{path}'"
    starts = range(0, len(values), _SCAN)
    return np.concatenate([read_flags(values[at : at + _SCAN], name, what=what, first=at) for at in starts])
