"""An environment that tells which choices are legal and raises where one is taken that is not."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces

ACTIONS = {
    "discrete": spaces.Discrete(5, start=3),
    "multi_discrete": spaces.MultiDiscrete([2, 4]),
    "multi_binary": spaces.MultiBinary(4),
}


class Restricted(gymnasium.Env):
    """Episodes of 6 steps; each step other choices are legal, at step 3 none: there everything goes, but bits."""

    def __init__(self, action="discrete"):
        self.action_space = ACTIONS[action]
        self.sizes = {"discrete": [5], "multi_discrete": [2, 4]}.get(action, [])
        self.count = sum(self.sizes) or 4
        self.observation_space = spaces.Dict(
            {"x": spaces.Box(-1, 1, (2,), np.float32), "legal": spaces.MultiBinary(self.count)}
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._observe(), {}

    def _observe(self):
        self.legal = (self.np_random.random(self.count) < 0.4).astype(np.int8)
        at = 0
        for size in self.sizes:
            self.legal[at + self.np_random.integers(size)] = 1
            at += size
        if self.time == 3:
            self.legal[:] = 0
        return {"x": self.np_random.random(2).astype(np.float32), "legal": self.legal}

    def step(self, action):
        if not self._allows(action):
            raise ValueError(f"{action} is not legal: {self.legal}")
        self.time += 1
        return self._observe(), float(np.sum(action)), self.time == 6, False, {}

    def _allows(self, action):
        if not self.sizes:
            return not (np.asarray(action) & (1 - self.legal)).any()
        chosen = [action - 3] if len(self.sizes) == 1 else action
        places = np.split(self.legal, np.cumsum(self.sizes)[:-1])
        return all(place[index] or not place.any() for place, index in zip(places, chosen, strict=True))
