"""What the parts of an update take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Clock:
    """Seconds by part, by the clock `now`; parts inside others are taken out of them."""

    def __init__(self, now: Callable[[], float] = time.process_time) -> None:
        self.seconds: dict[str, float] = {}
        self._now, self._inner = now, [0.0]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._inner.append(0.0)
        begun = self._now()
        yield
        spent = self._now() - begun
        self.seconds[name] = self.seconds.get(name, 0.0) + spent - self._inner.pop()
        self._inner[-1] += spent

    def wrap(self, owner: Any, method: str, name: str) -> None:
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return original(*args, **kwargs)

        object.__setattr__(owner, method, timed)

    def watch(self, learner: Any) -> None:
        """Time the parts of the learner's updates from now on."""
        agent = learner.agent
        for owner, method, name in (
            (agent, "encode", "encoder forward"),
            (agent, "targets", "targets"),
            (agent.heads, "critic_loss", "critic loss, with its backward"),
            (agent.heads, "policy_values", "policy's values, with their backward"),
            (agent.heads.actor, "forward", "actor forward"),
            (agent, "_metrics", "metrics"),
            (agent, "_value_metrics", "metrics"),
            (learner, "_backward", "encoder and actor backward, rest"),
            (agent, "_update_statistics", "statistics"),
            (learner, "_clip", "optimiser"),
            (learner.optimizer, "step", "optimiser"),
            (agent, "update_targets", "optimiser"),
        ):
            if hasattr(owner, method):
                self.wrap(owner, method, name)
