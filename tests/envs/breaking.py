"""An environment that breaks in every way, at the place told, and is otherwise a walk whose every number is drawn."""

from __future__ import annotations

import os
import signal
import time

import gymnasium
import numpy as np
from gymnasium import spaces

from pipelines.envs.task_env import SOLVED, TaskEnv
from pipelines.errors import StageFailed


class Walk(TaskEnv):
    """`fault` happens to episodes whose seed is a multiple of `every` at step `at`, "wear" at step `at` of the process;
    `seconds` of work a step.
    """

    steps_of_process = 0

    observation_space = spaces.Dict({"x": spaces.Box(-9, 9, (3,), np.float32), "n": spaces.Discrete(50)})
    action_space = spaces.Discrete(3)
    has_success = True

    def __init__(self, fault="", at=3, every=1, seconds=0.0, length=12):
        self.fault, self.at, self.every, self.seconds, self.length = fault, at, every, seconds, length
        self.horizon = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.outcome, self.seed = 0, type(self).outcome, seed
        self.task = f"{self.split}-{seed}"
        self.goal_text = f"walk {self.np_random.integers(9)}"
        self.end = int(self.np_random.integers(self.length // 2, self.length + 1))
        if self.fault == "reset" and self._now():
            raise RuntimeError("cannot begin")
        return self._seen(), {}

    def _now(self):
        return (self.seed // 2) % self.every == 0

    def _seen(self):
        return {"x": self.np_random.normal(size=3).clip(-9, 9).astype(np.float32), "n": self.time % 50}

    def step(self, action):
        self.time += 1
        Walk.steps_of_process += 1
        if self.fault == "wear" and Walk.steps_of_process == self.at:
            os._exit(7)
        if self.seconds:
            until = time.thread_time() + self.seconds
            while time.thread_time() < until:
                pass
        seen, reward = self._seen(), float(action) + float(self.np_random.random())
        if self.time == self.at and self.fault and self._now():
            if self.fault == "raise":
                raise ZeroDivisionError("it broke")
            if self.fault == "exit":
                raise SystemExit("it left")
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "hang":
                time.sleep(3600)
            if self.fault == "leave":
                os._exit(7)
            if self.fault == "nan":
                reward = float("nan")
            if self.fault == "nan-observation":
                seen["x"][1] = np.nan
            if self.fault == "shape":
                seen["x"] = np.zeros(4, np.float32)
        over = self.time == self.end
        self.outcome = SOLVED if over else type(self).outcome
        return seen, reward, over, False, {}


class Shy(gymnasium.Env):
    """Cannot be made."""

    def __init__(self):
        raise StageFailed("not today")


class EndsProcess(gymnasium.Env):
    """Ends the process that makes it."""

    def __init__(self):
        os._exit(8)
