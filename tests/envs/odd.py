"""Environments that no wrapper or checker would let pass."""

from __future__ import annotations

import os
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces


class Worst(BaseException):
    """What no `except Exception` catches."""


class Odd(gymnasium.Env):
    """Steps of one number; `fault` says what is odd about it."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.time = fault, 0
        self.observation_space = spaces.Box(-1, 1, (1,))
        self.action_space = spaces.Discrete(2)
        if fault == "no observation space":
            del self.observation_space
        if fault == "no action space":
            self.action_space = None
        if fault == "many actions":
            self.action_space = spaces.Discrete(2**40)
        if fault == "many values":
            self.observation_space = spaces.Discrete(2**40)
        if fault == "empty observation":
            self.observation_space = spaces.Box(-1, 1, (0,))
        if fault == "empty action":
            self.action_space = spaces.Box(-1, 1, (0,))
        if fault == "huge observation":
            self.observation_space = spaces.Box(-1, 1, (1,))
            self.observation_space._shape = (200_000_000,)
        if fault == "worst in constructor":
            raise Worst("it cannot be made")
        if fault == "moves" and Path.cwd().name != "elsewhere":
            Path("elsewhere").mkdir(exist_ok=True)
            os.chdir("elsewhere")
            Path("own.txt").write_text("1")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        if self.fault == "worst in reset":
            raise Worst("it cannot begin")
        if self.fault == "moves":
            assert Path("own.txt").read_text() == "1"  # it is where it left itself
            Path("own.txt").touch()
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        over: object = self.time == 5
        if self.fault == "worst in step":
            raise Worst("it breaks")
        if self.fault == "terminated" and over:
            over = float("nan")
        if self.fault == "truncated":
            return np.zeros(1, np.float32), 1.0, over, np.array([True, False]), {}
        return np.zeros(1, np.float32), 1.0, over, False, {}
