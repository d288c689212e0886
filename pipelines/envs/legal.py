"""Which choices an observation allows, and random actions among them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipelines.errors import UsageError
from pipelines.lake.spaces import Discrete, MultiBinary, MultiDiscrete, Spaces


class LegalActions:
    """Reads column `column` of the observation: a number for each choice (MultiDiscrete: for those of one place after
    another) or bit; what is positive is legal.

    Where no choice is legal, every one is: an action must be taken. A bit that is not legal stays 0. UsageError unless
    the column can say it for the actions of `spaces`.
    """

    def __init__(self, column: str, spaces: Spaces) -> None:
        self.column, self.space = column, spaces.action
        if not isinstance(self.space, Discrete | MultiDiscrete | MultiBinary):
            name = type(self.space).__name__
            raise UsageError(f"agent.action_mask is for choices and bits, not for {name} actions")
        space, size = spaces.observation.get(column), self.space.flat_size
        if space is None or space.shape != (size,):
            raise UsageError(
                f"agent.action_mask '{column}' is not an observation of shape ({size},)",
                hint=f"one number or bit for each choice; the observation has: {', '.join(spaces.observation)}",
            )

    def probability(self, observation: Mapping[str, np.ndarray], actions: np.ndarray) -> np.ndarray:
        """Compute the probability (N,) with which `draw` gives each of the Discrete `actions` (N,)."""
        legal = observation[self.column] > 0
        legal = legal | ~legal.any(axis=1, keepdims=True)
        return np.where(legal[np.arange(len(actions)), actions], 1 / legal.sum(axis=1), 0.0)

    def draw(self, observation: Mapping[str, np.ndarray], rng: np.random.Generator) -> np.ndarray:
        """Draw actions (N, ...) in stored form, uniform over what the observation (N, ...) allows."""

        def choose(legal: np.ndarray) -> np.ndarray:
            legal = legal | ~legal.any(axis=1, keepdims=True)
            order = np.cumsum(legal, axis=1)
            rank = rng.integers(order[:, -1])  # of the chosen one among the legal ones
            return (order > rank[:, None]).argmax(axis=1)

        legal = observation[self.column] > 0
        if isinstance(self.space, MultiBinary):
            return (legal & (rng.random(legal.shape) < 0.5)).astype(self.space.dtype)
        if isinstance(self.space, Discrete):
            return choose(legal).astype(self.space.dtype)
        assert isinstance(self.space, MultiDiscrete)
        places = np.split(legal, np.cumsum(self.space.nvec)[:-1], axis=1)
        return np.stack([choose(place) for place in places], axis=1).astype(self.space.dtype)
