"""Policies that act for some of many sessions, by the weights of a bundle or by another form of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from pipelines.errors import UsageError
from pipelines.export.forms import WEIGHTS, FormFile, load_graph
from pipelines.lake.spaces import Spaces, require_values
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.agent import Agent
from pipelines.learning.bundle import Bundle
from pipelines.learning.checkpoint import load_agent


class RowPolicy(Protocol):
    """A policy with a row of memory for each session."""

    @property
    def spaces(self) -> Spaces:
        """Spaces of the environment."""

    @property
    def max_time(self) -> int | None:
        """Number of steps of an episode that it can distinguish; None: any."""

    def act_for(
        self,
        rows: np.ndarray,
        columns: Mapping[str, np.ndarray],
        actions: np.ndarray,
        rewards: np.ndarray,
        time: np.ndarray,
    ) -> np.ndarray:
        """Act for the distinct `rows`, in ascending order; return actions in stored form."""


def of_bundle(found: Bundle, *, form: str, trust: bool, most: int, greedy: bool, seed: int) -> RowPolicy:
    """Load the policy of a bundle, which acts with its weights or another form.

    InputMissing if the form is not in it, or is not trusted; IntegrityError if it is damaged.
    """
    if form == WEIGHTS:
        capacity = int(found.record["context_length"])
        return of_weights(load_agent(found), capacity=capacity, most=most, greedy=greedy, seed=seed)
    return FormPolicy(FormFile.read(found, form, trust=trust), most=most, greedy=greedy, seed=seed)


def of_weights(agent: Agent, *, capacity: int, most: int, greedy: bool = True, seed: int = 0) -> RowPolicy:
    """Make the policy of an agent. UsageError if the memory of its encoder has no method `at`."""
    memory: Any = agent.sequence.memory(num_actors=1, capacity=1)
    if not hasattr(memory, "at"):
        raise UsageError(
            f"the memory of {type(agent.sequence).__name__} cannot act for some of its actors",
            hint="give it a method 'at', as pipelines.nets.cache.KVCache has",
        )
    return _WeightsPolicy(agent, num_actors=most, capacity=capacity, greedy=greedy, seed=seed)


class _WeightsPolicy(AgentPolicy):
    @property
    def spaces(self) -> Spaces:
        return self.agent.spaces

    @property
    def max_time(self) -> int | None:
        return self.agent.sequence.max_time


class FormPolicy:
    """A form of a bundle. Memories are taken out of one batch and put back.

    Adjacent rows are passed to the form as a view, without a copy.
    """

    def __init__(self, file: FormFile, *, most: int, greedy: bool = True, seed: int = 0) -> None:
        record = file.checkpoint.record
        self._spaces, self._max_time = Spaces.from_json(record["spaces"]), record["max_time"]
        with file.checkpoint.understood():
            self._graph = load_graph(file.form, file.content, record)
        self._form, self._noise, self._greedy = file, int(record["noise"]), greedy
        self._random = np.random.default_rng(seed)
        kinds = record["memory"].items()
        self._memory = {name: np.zeros((most, *shape), dtype) for name, (shape, dtype) in kinds}

    @property
    def spaces(self) -> Spaces:
        return self._spaces

    @property
    def max_time(self) -> int | None:
        return self._max_time

    def act_for(
        self,
        rows: np.ndarray,
        columns: Mapping[str, np.ndarray],
        actions: np.ndarray,
        rewards: np.ndarray,
        time: np.ndarray,
    ) -> np.ndarray:
        """See `RowPolicy`. IntegrityError if the form answers what its bundle does not say."""
        count = len(rows)
        adjacent = rows[-1] - rows[0] == count - 1
        here: Any = slice(int(rows[0]), int(rows[0]) + count) if adjacent else rows
        noise = self._random.random((count, self._noise), np.float32)
        memory = {name: values[here] for name, values in self._memory.items()}
        with self._form.checkpoint.understood():
            found, after = self._graph(columns, actions, rewards, time == 0, noise, memory)
            chosen = found["greedy" if self._greedy else "sampled"]
            require_values(chosen, self._spaces.action, (count,))
            for name, values in self._memory.items():
                if after[name] is not memory[name] or not adjacent:  # else it was written where it is
                    values[here] = after[name]
        return chosen
