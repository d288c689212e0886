"""Finished episodes: summaries, statistics, and a queue that preserves the order of rounds and parts.

Episodes that end shortly after one another are stored together: logging one costs about as much as logging a dozen, and
the actors wait meanwhile.
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
Turn = tuple[int, int]  # round (one step of every actor), part of the actors
_APART_SECONDS = 0.2
_MANY = 64  # so many episodes are passed on at once
_LARGE = 1 << 20  # larger batches are not copied again to be combined


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A finished episode. `number` counts over all actors (see `envs.env`); `success`: of the last attempt. `attempts`:
    success of each attempt, `attempt_returns` its sum of rewards. `achieved`: bool for each of the environment's
    achievements. `outcome` of a game of several seats: 1 won, 0.5 drawn, 0 lost (see `Env.outcomes`)."""

    actor: int
    number: int
    task: str
    length: int
    total_reward: float
    success: bool | None
    attempts: tuple[bool, ...]
    attempt_returns: tuple[float, ...] = ()
    achieved: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    outcome: float | None = None


@dataclass(kw_only=True)
class EpisodeStats:
    """Number of finished episodes, and sums over them."""

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
    """Statistics of one call of `run`. Means are over the episodes that ended in it (NaN if none did); `epsilon` is the
    mean exploration rate over its steps."""

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
    """`number` episodes of one part of the actors that ended in the same step, or pieces that were cut in it.
    `trajectories`: None if nothing is recorded. `episodes`: the summaries of those that ended, if a callback needs
    them; `stats`: those that count."""

    number: int
    stats: EpisodeStats
    episodes: tuple[Episode, ...] = ()
    trajectories: Trajectories | None = None

    def joins(self, other: FinishedEpisodes) -> bool:
        """Check that both batches agree in the fields that are stored once for all their trajectories."""
        if self.trajectories is None or other.trajectories is None:
            return self.trajectories is other.trajectories
        return Infos.of(self.trajectories.infos).shared == Infos.of(other.trajectories.infos).shared


class EpisodeQueue:
    """Queue of finished episodes in order: trajectories go to `sink`, summaries to `on_episode`. `stats` counts them,
    except those that were cut short."""

    def __init__(self, sink: Sink | None = None, on_episode: Callable[[Episode], None] | None = None) -> None:
        self._heap: list[tuple[Turn, int, FinishedEpisodes]] = []
        self._number, self._puts, self._taken = 0, 0, -math.inf
        self._sink, self._on_episode = sink, on_episode
        self.stats = EpisodeStats()

    def put(self, turn: Turn, finished: FinishedEpisodes) -> None:
        """Add episodes or pieces of a turn, in the order in which they were recorded."""
        heapq.heappush(self._heap, (turn, self._puts, finished))
        self._puts += 1
        self._number += finished.number

    @property
    def due(self) -> bool:
        """Whether many episodes wait, or none were taken for a while, so that a single episode does not wait
        long."""
        return self._number >= _MANY or (bool(self._heap) and time.monotonic() - self._taken >= _APART_SECONDS)

    def take(self, before: Turn | None = None) -> list[FinishedEpisodes]:
        """Remove and return the first batch, if its turn comes before `before` (None: any), and the following ones that
        are stored with it. `before` is the first turn that may still add episodes."""
        taken: list[FinishedEpisodes] = []
        size = 0
        while self._heap and (before is None or self._heap[0][0] < before):
            finished = self._heap[0][-1]
            size += finished.trajectories.nbytes if finished.trajectories is not None else 0
            if taken and (size > _LARGE or not taken[-1].joins(finished)):
                break
            taken.append(heapq.heappop(self._heap)[-1])
            self._number -= finished.number
        if taken:
            self._taken = time.monotonic()
        return taken

    def flush(self, before: Turn | None = None, *, if_due: bool = False) -> None:
        """Pass on everything that `take` returns; with `if_due`, only if waiting longer would not combine more."""
        if if_due and self._sink is not None and not self.due:
            return
        while taken := self.take(before):
            self._hand_on(taken)

    def _hand_on(self, finished: Sequence[FinishedEpisodes]) -> None:
        """Pass on exactly once, even if the receiver is interrupted."""
        stored = [each.trajectories for each in finished if each.trajectories is not None]
        if stored and self._sink is not None:
            self._sink(Trajectories.join(stored))
        for each in finished:
            self.stats.add(each.stats)
            if self._on_episode is not None:
                for episode in each.episodes:
                    self._on_episode(episode)
