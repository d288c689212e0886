"""Windows over histories: consecutive episodes of one actor, joined as if they were attempts of one trajectory.

An agent that is trained on them learns from what it sees across episodes, as in Algorithm Distillation (Laskin et al.
2023, arXiv 2210.14215). Where one episode ends and the next begins, two rows are merged into one: it has the action,
the reward and the flags of the last row, the observation of the first, and `reset` = 1. An environment that repeats its
episodes returns just this (`envs.repeated`), so that acting and training agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipelines.data.view import first_steps

_UNKNOWN = -1


@dataclass(frozen=True, kw_only=True)
class HistoryContext:
    """The order in which a window shows the episodes of a history: by "time", by their "return" (increasing: In-context
    Decision Transformer), or drawn at random with replacement ("shuffle": Decision-Pretrained Transformer, Lee et al.
    2023, arXiv 2306.14892). With a `stride` of k, every k-th episode of the order follows.

    `horizon`: whether rewards count to the end of an "episode", or on into the following ones of the "history", as in
    RL^2 (Duan et al. 2016, arXiv 1611.02779), so that it pays to explore. Then the end of an episode is only a return
    to the start: it neither terminates nor cuts off what is learned from.
    """

    order: Literal["time", "return", "shuffle"] = "time"
    stride: int = 1
    horizon: Literal["episode", "history"] = "episode"


@dataclass(frozen=True)
class Parts:
    """Consecutive steps of trajectories that windows consist of, (P,) int64 each: the `window` of the batch, the `row`
    of the trajectory in the view's table, its first step `start` and the number of `steps` shown, and the step of the
    window at which they stand (`place`). Ordered by window, and by place within one.

    `joins` (P,) bool: the part begins another episode than the part before it.
    """

    window: np.ndarray
    row: np.ndarray
    start: np.ndarray
    steps: np.ndarray
    place: np.ndarray
    joins: np.ndarray

    @property
    def is_first(self) -> np.ndarray:
        """Whether each part begins its window (P,)."""
        return self.place == 0

    @property
    def is_last(self) -> np.ndarray:
        """Whether each part ends its window (P,)."""
        return np.append(self.window[1:] != self.window[:-1], True)


class Histories:
    """Index of the histories of a view's `table` (N,), of which those trajectories count that have a weight.

    Where several have the same place in a history, such as relabelled versions of an episode, the last one counts.
    """

    def __init__(self, table: np.ndarray, context: HistoryContext) -> None:
        self.context = context
        rows = np.flatnonzero((table["weight"] > 0) & (table["history"] != 0))
        fields = table["history"], table["history_index"], first_steps(table)
        key = np.stack([values[rows].astype(np.uint64) for values in fields])
        order = np.lexsort((rows, *key[::-1]))
        rows, key = rows[order], key[:, order]
        last = np.ones(len(rows), dtype=bool)
        last[:-1] = (key[:, 1:] != key[:, :-1]).any(0)
        rows, key = rows[last], key[:, last]
        self._rows, self._length = rows, table["length"][rows].astype(np.int64)
        self._first_piece, self._end_piece = _find_runs(key[:2])
        count = len(self._first_piece)
        self._episode_of = np.repeat(np.arange(count), self._end_piece - self._first_piece)
        history = key[0, self._first_piece]
        self._episode_at = np.arange(count)  # by their place in the order
        if context.order == "return" and count:
            returns = np.add.reduceat(table["return"][rows], self._first_piece)
            self._episode_at = np.lexsort((np.arange(count), returns, history))
        self._place_of = np.argsort(self._episode_at)
        first, stop = _find_runs(history[None])
        self._first, self._stop = (np.repeat(edge, stop - first) for edge in (first, stop))  # places of a history
        self._piece_of = np.full(len(table), _UNKNOWN)
        self._piece_of[rows] = np.arange(len(rows))

    @property
    def rows(self) -> np.ndarray:
        """The trajectories that are drawn: rows of the table (M,)."""
        return self._rows

    def windows(self, num_rows: int, window: int) -> np.ndarray:
        """Return how many draws (num_rows,) show each step of a trajectory once on average, as `Strategy.windows`; 0
        for trajectories outside of histories."""
        found = np.zeros(num_rows)
        found[self._rows] = (self._length + self._hanging(np.arange(len(self._rows)), window)) / window
        return found

    def _hanging(self, piece: np.ndarray, window: int) -> np.ndarray:
        """Count the starts of windows before a trajectory (n,): where an order begins, windows are cut there, so that
        its first steps appear as often as others and an agent learns to begin without a context."""
        episode = self._episode_of[piece]
        place = self._place_of[episode]
        begins = (self._first_piece[episode] == piece) & (place - self._first[place] < self.context.stride)
        return np.where(begins & (self.context.order != "shuffle"), window - 1, 0)

    def walk(self, chosen: np.ndarray, window: int, rng: np.random.Generator) -> Parts:
        """Draw windows of up to `window` steps that begin in the trajectories `chosen` (B,), rows of the table."""
        piece = self._piece_of[chosen]
        if self.context.order == "shuffle":
            piece = self._first_piece[self._episode_of[piece]]
            start = np.zeros(len(piece), dtype=np.int64)
            room = np.full(len(piece), window)
        else:
            hanging = self._hanging(piece, window)
            start = (rng.random(len(piece)) * (self._length[piece] + hanging)).astype(np.int64) - hanging
            room = window + np.minimum(start, 0)
            start = np.maximum(start, 0)
        index, place = np.arange(len(piece)), np.zeros(len(piece), dtype=np.int64)
        joins = np.zeros(len(piece), dtype=bool)
        found: list[tuple[np.ndarray, ...]] = []
        while len(index):
            steps = np.minimum(self._length[piece] - start, room)
            found.append((index, self._rows[piece], start, steps, place, joins))
            place, room = place + steps, room - steps
            following, joins = self._follow(piece, rng)
            on = (room > 0) & (following >= 0)
            index, piece, place, room, joins = index[on], following[on], place[on], room[on], joins[on]
            start = np.zeros(len(index), dtype=np.int64)
        columns = [np.concatenate(each) for each in zip(*found, strict=True)]
        order = np.lexsort((columns[4], columns[0]))
        return Parts(*(column[order] for column in columns))

    def _follow(self, piece: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return what follows each piece (n,), -1 at the end of the order, and whether it is another episode."""
        episode = self._episode_of[piece]
        another = piece + 1 >= self._end_piece[episode]
        place = self._place_of[episode]
        first, stop = self._first[place], self._stop[place]
        if self.context.order == "shuffle":
            following = first + (rng.random(len(piece)) * (stop - first)).astype(np.int64)
        else:
            following = place + self.context.stride
        ended = following >= stop
        beginning = self._first_piece[self._episode_at[np.where(ended, first, following)]]
        return np.where(another, np.where(ended, _UNKNOWN, beginning), piece + 1), another


def _find_runs(columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find where runs of equal columns (K, n) begin and end: (m,) int64 each."""
    differs = np.ones(columns.shape[1], dtype=bool)
    differs[1:] = (columns[:, 1:] != columns[:, :-1]).any(0)
    first = np.flatnonzero(differs)
    return first, np.append(first, columns.shape[1])[1:]
