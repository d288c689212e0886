"""Episodes that have ended, handed over in the order of rounds and parts, whoever was first to end them.

Where they are stored, those that follow one another within moments are stored together: to log one costs about as much
as to log a dozen, and who logs does not act.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipelines.lake.trajectory import Infos, Trajectories
from pipelines.rollout.summary import Episode, Tally

Sink = Callable[[Trajectories], object]
Turn = tuple[int, int]  # number of a round (a step of every actor), number of a part of the actors
_APART_SECONDS = 0.2
_MANY = 64  # episodes that wait for no more
_LARGE = 1 << 20  # bytes that are not copied once more to be stored together


@dataclass(frozen=True, kw_only=True)
class Ended:
    """`number` episodes of a part of the actors that ended in the same step. `trajectories`: None where nothing is
    recorded. `episodes`: those to be told of, `tally`: those that count.
    """

    number: int
    tally: Tally
    episodes: tuple[Episode, ...] = ()
    trajectories: Trajectories | None = None


class Waiting:
    """What has ended, until it is its turn."""

    def __init__(self) -> None:
        self._heap: list[tuple[Turn, Ended]] = []
        self._number, self._taken = 0, -math.inf

    def put(self, turn: Turn, ended: Ended) -> None:
        """Once a turn."""
        heapq.heappush(self._heap, (turn, ended))
        self._number += ended.number

    @property
    def due(self) -> bool:
        """Whether many wait, or it is a while since any were taken: who is alone does not wait for more."""
        return self._number >= _MANY or (bool(self._heap) and time.monotonic() - self._taken >= _APART_SECONDS)

    def take(self, before: Turn | None = None) -> list[Ended]:
        """The first, if its turn comes before that of which nothing is known yet (None: everything is known), and
        those after it that are stored with it.
        """
        taken: list[Ended] = []
        size = 0
        while self._heap and (before is None or self._heap[0][0] < before):
            ended = self._heap[0][1]
            size += ended.trajectories.nbytes if ended.trajectories is not None else 0
            if taken and (size > _LARGE or not _together(taken[-1], ended)):
                break
            taken.append(heapq.heappop(self._heap)[1])
            self._number -= ended.number
        if taken:
            self._taken = time.monotonic()
        return taken


class Outbox(Waiting):
    """Finished episodes that wait to be handed on: trajectories to `sink`, summaries to `on_episode`. `tally` counts
    them, except those that were cut short.
    """

    def __init__(self, sink: Sink | None, on_episode: Callable[[Episode], None] | None) -> None:
        super().__init__()
        self._sink, self._on_episode = sink, on_episode
        self.tally = Tally()

    def give(self, before: Turn | None = None, *, due: bool = False) -> None:
        """As far as `take` goes; `due`: unless it may yet be stored with what ends next."""
        if due and self._sink is not None and not self.due:
            return
        while taken := self.take(before):
            self._give(taken)

    def _give(self, ended: Sequence[Ended]) -> None:
        """Once, even if whoever gets it is interrupted."""
        stored = [each.trajectories for each in ended if each.trajectories is not None]
        if stored and self._sink is not None:
            self._sink(Trajectories.joined(stored))
        for each in ended:
            self.tally.add(each.tally)
            if self._on_episode is not None:
                for episode in each.episodes:
                    self._on_episode(episode)


def _together(first: Ended, second: Ended) -> bool:
    """Whether what is said of all trajectories of one is true of the other's."""
    if first.trajectories is None or second.trajectories is None:
        return first.trajectories is second.trajectories
    return Infos.of(first.trajectories.infos).shared == Infos.of(second.trajectories.infos).shared
