"""Progress of a whole chain, and an estimate of the time left from the stages completed so far."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pipelines.events import Event, Listener, Notice, Progress


@dataclass(frozen=True)
class Work:
    """One stage of one epoch: `amount` environment steps, updates or episodes for the recipe's entry `place`."""

    epoch: int
    place: int
    stage: str
    amount: int


_LONG = ("collect", "train")  # stages that take most of a run's time


class Forecast:
    """Estimator of how much of a chain is done and of the time left.

    `done`: number of `works` that earlier processes finished. A unit of work costs the average of its recipe entry so
    far, or that of another entry of the same stage. The time left is unknown until each collect and train that remains
    has a cost; other stages, which are short, do not count in it before they have one.
    """

    def __init__(
        self, works: Sequence[Work], *, epochs: int, done: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._works, self._epochs, self._clock = works, epochs, clock
        self._stages = {work.place: work.stage for work in works}
        self._before, self._after = _count_amounts(works[:done]), _count_amounts(works[done:])  # of each entry
        self._spent: dict[int, tuple[float, float]] = {}  # of each entry: seconds, and the amount done in them
        self._first, self._done = done, done - 1
        self._begin()

    def _begin(self) -> None:
        self._done += 1
        self._began, self._at_first = self._clock(), 1.0  # share of the current work that was done at its first event
        if self._done < len(self._works):
            self._after[self._works[self._done].place] -= self._works[self._done].amount

    def finish(self) -> None:
        """Record that the current work is done, and begin the next."""
        work, (seconds, amount) = self._works[self._done], self._spent.get(self._works[self._done].place, (0.0, 0.0))
        if self._at_first < 1:
            seconds += self._clock() - self._began
            self._spent[work.place] = (seconds, amount + work.amount * (1 - self._at_first))
        self._before[work.place] += work.amount
        self._begin()

    def listening(self, listener: Listener) -> Listener:
        """Wrap `listener`: add the epoch to stages, and the whole run's progress to their events."""

        def forward(event: Event) -> None:
            prefix = f"epoch {self._works[min(self._done, len(self._works) - 1)].epoch + 1}/{self._epochs} "
            if isinstance(event, Progress):
                share, left = self._estimate(event)
                event = replace(event, stage=prefix + event.stage, run_share=share, run_seconds_left=left)
            elif isinstance(event, Notice) and event.stage:
                event = replace(event, stage=prefix + event.stage)
            listener(event)

        return forward

    def _estimate(self, event: Progress) -> tuple[float, float | None]:
        """Estimate the share of the run done and the seconds left; without all costs, the share of stages and None."""
        work, share = self._works[self._done], self._share(event)
        if self._at_first == 1:  # only the first can be work that an earlier process started
            self._at_first = share if self._done == self._first else 0.0
        progressed, elapsed = work.amount * (share - self._at_first), self._clock() - self._began
        now = {work.place: elapsed / progressed} if progressed else {}  # seconds per unit
        cost = {place: self._cost(place) or now.get(place) for place in {work.place, *(+self._after)}}
        if any(each is None and self._stages[place] in _LONG for place, each in cost.items()):
            return (self._done + share) / len(self._works), None
        left = sum((cost[place] or 0) * amount for place, amount in (+self._after).items())
        left += (cost[work.place] or 0) * work.amount * (1 - share)
        past = sum((cost.get(place) or self._cost(place) or 0) * amount for place, amount in self._before.items())
        past += (cost[work.place] or 0) * work.amount * share
        return past / (past + left) if past + left else 1.0, left

    def _share(self, event: Progress) -> float:
        """Compute the share of the current work that is done; counts of collect and train include earlier epochs."""
        if not event.total:
            return 0.0
        work = self._works[self._done]
        amount = max(work.amount, 1) if work.stage in ("collect", "train") else event.total
        return min(max(1 - (event.total - event.done) / amount, 0.0), 1.0)

    def _cost(self, place: int) -> float | None:
        """Average the seconds per unit of an entry, if known."""
        alike = [each for each in self._spent if self._stages[each] == self._stages[place]]
        seconds, amount = self._spent.get(place) or (self._spent[alike[-1]] if alike else (0.0, 0.0))
        return seconds / amount if amount else None


def _count_amounts(works: Iterable[Work]) -> Counter[int]:
    found: Counter[int] = Counter()
    for work in works:
        found[work.place] += work.amount
    return found
