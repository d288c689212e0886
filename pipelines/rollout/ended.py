"""Episodes that have ended, handed over in the order of rounds and parts, whoever was first to end them."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from pipelines.lake.trajectory import Trajectories
from pipelines.rollout.summary import Episode, Tally

Turn = tuple[int, int]  # number of a round (a step of every actor), number of a part of the actors


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

    def put(self, turn: Turn, ended: Ended) -> None:
        """Once a turn."""
        heapq.heappush(self._heap, (turn, ended))

    def take(self, before: Turn | None = None) -> Ended | None:
        """The first, if its turn comes before that of which nothing is known yet (None: everything is known)."""
        if self._heap and (before is None or self._heap[0][0] < before):
            return heapq.heappop(self._heap)[1]
        return None
