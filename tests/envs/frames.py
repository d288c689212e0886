"""Pictures large enough to be stored apart."""

from __future__ import annotations

import gymnasium
import numpy as np


class Frames(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (20, 20, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.time += 1
        return self.observation_space.sample(), 1.0, self.time == 5, False, {}
