"""Environments of a user: actions of two choices, an observation that is a Dict."""

from __future__ import annotations

import gymnasium
import numpy as np


class Sorter(gymnasium.Env):
    observation_space = gymnasium.spaces.Dict(
        {"place": gymnasium.spaces.Box(-1, 1, (2,), np.float32), "kind": gymnasium.spaces.Discrete(3)}
    )
    action_space = gymnasium.spaces.MultiDiscrete([3, 2])

    def __init__(self, length: int = 5) -> None:
        self.length, self.time = length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.kind = 0, int(self.np_random.integers(3))
        return self.see(), {}

    def see(self):
        return {"place": np.zeros(2, np.float32), "kind": self.kind}

    def step(self, action):
        self.time += 1
        return self.see(), float(action[0] == self.kind), False, self.time >= self.length, {}


class Still(Sorter):
    def step(self, action):
        self.time += 1
        return self.see(), 0.0, False, self.time >= self.length, {}


class Broken(Sorter):
    def step(self, action):
        raise RuntimeError("no power")
