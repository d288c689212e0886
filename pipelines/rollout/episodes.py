"""Finished episodes: their summaries, statistics, and the queue that hands them on in the order of rounds and parts.

Episodes that end within moments of one another are stored together: logging one costs about as much as logging a
dozen, and the actors wait meanwhile.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipelines.lake.trajectory import Infos, Trajectories

Sink = Callable[[Trajectories], object]
Turn = tuple[int, int]  # number of a round (a step of every actor), number of a part of the actors
_APART_SECONDS = 0.2
_MANY = 64  # episodes that wait for no more
_LARGE = 1 << 20  # bytes that are not copied once more to be stored together


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A finished episode. `number` counts over all actors (see `envs.env`); `success`: of the last attempt.
    `attempts`: success of each, `attempt_returns` the sum of its rewards. `achieved`: which of the environment's
    achievements it had, bool.
    """

    actor: int
    number: int
    task: str
    length: int
    total_reward: float
    success: bool | None
    attempts: tuple[bool, ...]
    attempt_returns: tuple[float, ...] = ()
    achieved: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))


@dataclass(kw_only=True)
class EpisodeStats:
    """How many episodes ended, and sums over them."""

    episodes: int = 0
    returns: float = 0.0
    successes: int = 0

    def add(self, more: EpisodeStats) -> None:
        self.episodes += more.episodes
        self.returns += more.returns
        self.successes += more.successes

    @property
    def return_mean(self) -> float:
        return self.returns / self.episodes if self.episodes else math.nan

    @property
    def success_mean(self) -> float:
        return self.successes / self.episodes if self.episodes else math.nan


@dataclass(frozen=True, kw_only=True)
class RolloutStats:
    """What one call of `run` did. Means are over the episodes that ended in it (nan: none did); `epsilon` is the mean
    exploration rate over its steps.
    """

    steps: int
    trajectories: int
    return_mean: float
    success_mean: float
    epsilon: float
    seconds: float
    env_seconds: float
    policy_seconds: float
    env_errors: int
    episodes_dropped: int

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class FinishedEpisodes:
    """`number` episodes of a part of the actors that ended in the same step. `trajectories`: None where nothing is
    recorded. `episodes`: their summaries, where somebody listens; `stats`: those that count.
    """

    number: int
    stats: EpisodeStats
    episodes: tuple[Episode, ...] = ()
    trajectories: Trajectories | None = None


class EpisodeQueue:
    """Finished episodes in the order of their turns, waiting to be handed on: trajectories to `sink`, summaries to
    `on_episode`. `stats` counts them, except those that were cut short.
    """

    def __init__(self, sink: Sink | None = None, on_episode: Callable[[Episode], None] | None = None) -> None:
        self._heap: list[tuple[Turn, FinishedEpisodes]] = []
        self._number, self._taken = 0, -math.inf
        self._sink, self._on_episode = sink, on_episode
        self.stats = EpisodeStats()

    def put(self, turn: Turn, finished: FinishedEpisodes) -> None:
        """Add the episodes of a turn, once."""
        heapq.heappush(self._heap, (turn, finished))
        self._number += finished.number

    @property
    def due(self) -> bool:
        """Whether many episodes wait, or none were taken for a while: a lone episode does not wait for more."""
        return self._number >= _MANY or (bool(self._heap) and time.monotonic() - self._taken >= _APART_SECONDS)

    def take(self, before: Turn | None = None) -> list[FinishedEpisodes]:
        """Remove and return the first, if its turn comes before `before` (None: any), and those after it that are
        stored with it. `before` is the first turn that may still bring episodes.
        """
        taken: list[FinishedEpisodes] = []
        size = 0
        while self._heap and (before is None or self._heap[0][0] < before):
            finished = self._heap[0][1]
            size += finished.trajectories.nbytes if finished.trajectories is not None else 0
            if taken and (size > _LARGE or not _together(taken[-1], finished)):
                break
            taken.append(heapq.heappop(self._heap)[1])
            self._number -= finished.number
        if taken:
            self._taken = time.monotonic()
        return taken

    def flush(self, before: Turn | None = None, *, if_due: bool = False) -> None:
        """Hand on everything that `take` returns; `if_due`: unless it may yet be stored with what ends next."""
        if if_due and self._sink is not None and not self.due:
            return
        while taken := self.take(before):
            self._hand_on(taken)

    def _hand_on(self, finished: Sequence[FinishedEpisodes]) -> None:
        """Hand on once, even if the receiver is interrupted."""
        stored = [each.trajectories for each in finished if each.trajectories is not None]
        if stored and self._sink is not None:
            self._sink(Trajectories.joined(stored))
        for each in finished:
            self.stats.add(each.stats)
            if self._on_episode is not None:
                for episode in each.episodes:
                    self._on_episode(episode)


def _together(first: FinishedEpisodes, second: FinishedEpisodes) -> bool:
    """Return whether both batches share the fields that are stored once for all their trajectories."""
    if first.trajectories is None or second.trajectories is None:
        return first.trajectories is second.trajectories
    return Infos.of(first.trajectories.infos).shared == Infos.of(second.trajectories.infos).shared
