"""Recorder of N actors in the lake's columns.

All actors step together, so storage is time-major: one row of the buffer contains one step of all actors, written with
one assignment per column. An actor's episode is the sequence of rows since its first; it is copied out when it ends,
which frees the actor's place in the newest row for the first observation of its next episode. A running episode may be
cut: the rows so far are copied out as a piece, and the newest one becomes row 0 of the next piece. When the buffer is
full, rows that no running episode needs are dropped, or the buffer doubles.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipelines.lake.schema import ACTION, RESET, REWARD, TERMINATED, TRUNCATED, Schema

_FIRST_ROWS = 64


class Recorder:
    """Buffers of `num_actors` episodes in progress. Columns (rows, N, ...) by the names and types of
    `schema`. After cuts, the last `kept` rows of an episode stay readable by `prefix`.
    """

    def __init__(self, schema: Schema, num_actors: int, *, rows: int = _FIRST_ROWS, kept: int = 0) -> None:
        self.schema, self._kept = schema, kept
        self._observed = [column.name for column in schema.columns if column.role == "observation"]
        self._buffers = {
            column.name: np.zeros((max(rows, 2), num_actors, *column.shape), dtype=column.dtype)
            for column in schema.columns
        }
        self._rows = max(rows, 2)
        self._first = np.zeros(num_actors, dtype=np.int64)  # of the running piece
        self._begun = np.zeros(num_actors, dtype=np.int64)  # of the episode, or the first row that is still here
        self._now = 0

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of actions recorded in each actor's running piece (N,)."""
        return self._now - self._first

    def begin(self, actors: np.ndarray, observation: Mapping[str, np.ndarray]) -> None:
        """Write row 0 of new episodes for `actors` (m,), with their rows of `observation` (N, ...)."""
        for name, buffer in self._buffers.items():
            buffer[self._now, actors] = observation[name][actors] if name in observation else 0
        self._first[actors] = self._begun[actors] = self._now

    def add(
        self,
        observation: Mapping[str, np.ndarray],
        action: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        reset: np.ndarray,
    ) -> None:
        """Record the row that `action` led to, for all actors."""
        self._now += 1
        if self._now == self._rows:
            self._make_room()
        now, buffers = self._now, self._buffers
        for name in self._observed:
            buffers[name][now] = observation[name]
        buffers[ACTION][now] = action
        buffers[REWARD][now] = reward
        buffers[TERMINATED][now] = terminated
        buffers[TRUNCATED][now] = truncated
        buffers[RESET][now] = reset

    def episodes(self, actors: np.ndarray) -> tuple[dict[str, np.ndarray], list[int]]:
        """Return a copy of all rows of the running pieces of `actors` (m,), concatenated, and their lengths T + 1."""
        rows = self._now + 1 - self._first[actors]
        step = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows - self._first[actors], rows)
        place = step * len(self._first) + np.repeat(actors, rows)  # in the buffer as one row after another, which is
        taken = {  # several times as fast as by two indices
            name: buffer.reshape(-1, *buffer.shape[2:]).take(place, axis=0) for name, buffer in self._buffers.items()
        }
        return taken, rows.tolist()

    def prefix(self, actor: int) -> dict[str, np.ndarray]:
        """Return a copy of the episode's rows before the newest, on which the policy has already acted: all T of them,
        or the last of them if the episode was cut."""
        first = int(self._oldest()[actor])
        return {name: buffer[first : self._now, actor].copy() for name, buffer in self._buffers.items()}

    def cut(self, actors: np.ndarray) -> None:
        """Begin the next piece of the episodes of `actors` (m,) with their newest row."""
        self._first[actors] = self._now

    def _oldest(self) -> np.ndarray:
        """Return the first row (N,) of each episode that is needed: for its running piece, or among the `kept` ones."""
        return np.maximum(self._begun, np.minimum(self._first, self._now - self._kept))

    def _make_room(self) -> None:
        """Move running episodes to the front; double the buffer if they fill half of it."""
        self._begun = self._oldest()
        oldest = int(self._begun.min())
        kept = self._now - oldest
        grow = 2 * kept > self._rows
        for name, buffer in self._buffers.items():
            if grow:
                larger = np.zeros((2 * self._rows, *buffer.shape[1:]), dtype=buffer.dtype)
                larger[:kept] = buffer[oldest : self._now]
                self._buffers[name] = larger
            else:
                buffer[:kept] = buffer[oldest : self._now]
        self._rows *= 2 if grow else 1
        self._now -= oldest
        self._first -= oldest
        self._begun -= oldest
