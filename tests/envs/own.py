"""Environments such as a user might bring, some of them broken."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces


class Everything(gymnasium.Env):
    """All kinds of observation, and an action space to choose."""

    def __init__(self, action_space=None, length=4):
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (5, 4, 3), np.uint8),
                "inner": spaces.Dict({"place": spaces.Box(-1, 1, (2,), np.float64)}),
                "kind": spaces.Discrete(3, start=10),
                "pair": spaces.Tuple((spaces.MultiDiscrete([2, 5], start=[1, 2]), spaces.MultiBinary(3))),
            }
        )
        self.action_space = action_space or spaces.Discrete(3, start=-1)
        self.length, self.received = length, []

    def _observe(self):
        t = self.time
        return {
            "image": np.full((5, 4, 3), t, np.uint8),
            "inner": {"place": np.array([t / 10, self.origin])},
            "kind": 10 + t % 3,
            "pair": (np.array([1 + t % 2, 2 + t % 5]), np.array([1, 0, t % 2], dtype=np.int8)),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.origin = 0, self.np_random.random()
        return self._observe(), {}

    def step(self, action):
        self.received.append(action)
        self.time += 1
        done = self.time == self.length
        return self._observe(), float(self.time), done, False, {"is_success": self.origin > 0.5}


class Line(gymnasium.Env):
    """One number that counts steps; `fault` says what goes wrong at step 3."""

    observation_space = spaces.Box(-1, 100, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, fault=""):
        self.fault = fault

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        if self.fault == "reset":
            raise RuntimeError("cannot begin")
        if self.fault == "old-reset":
            return np.zeros(1, np.float32)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        observation, reward = np.array([self.time], np.float32), 0.0
        if self.time == 3:
            if self.fault == "old-step":
                return observation, reward, False, {}
            if self.fault.endswith("-reward"):
                reward = {"nan": float("nan"), "array": np.array([2.0]), "no": None, "wide": np.zeros(2)}[
                    self.fault[:-7]
                ]
            if self.fault == "raise":
                raise ZeroDivisionError("it broke")
            if self.fault == "exit":
                raise SystemExit("it left")
            if self.fault == "nan-observation":
                observation[0] = np.nan
            if self.fault == "shape":
                observation = np.zeros(2, np.float32)
        return observation, reward, False, False, {}


class Pixels(gymnasium.Env):
    """Says that its pixels are bytes; gives `value` of type `dtype`. Does not like to be closed."""

    observation_space = spaces.Box(0, 255, (2, 2, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self, value=7, dtype="uint8"):
        self.value, self.dtype = value, dtype

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.full((2, 2, 3), self.value, self.dtype), {}

    def close(self):
        raise RuntimeError("not now")


class Sentence(gymnasium.Space):
    """A space of strings that sets no limit, as that of minigrid's missions."""

    def __init__(self):
        super().__init__(dtype=str)

    def contains(self, x):
        return isinstance(x, str)


class Told(gymnasium.Env):
    """A mission in words, a list of places and one of events: all of them longer or shorter from step to step."""

    def __init__(self, words="go to the ünd", steps=5, things=2):
        self.observation_space = spaces.Dict(
            {
                "mission": Sentence(),
                "note": spaces.Text(8, min_length=0),
                "places": spaces.Sequence(spaces.Box(-1, 1, (2,), np.float32)),
                "events": spaces.Sequence(spaces.Discrete(4, start=1), stack=True),
            }
        )
        self.action_space = spaces.Discrete(2)
        self.words, self.steps, self.things = words, steps, things

    def _observe(self):
        t = self.time
        return {
            "mission": f"{self.words} {self.asked}",
            "note": "abcdefgh"[:t],
            "places": tuple(np.array([i, t], np.float32) / 10 for i in range(t % (self.things + 1))),
            "events": np.array([1 + i % 4 for i in range(t)], dtype=np.int64),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.asked = 0, int(self.np_random.integers(10))
        return self._observe(), {}

    def step(self, action):
        self.time += 1
        return self._observe(), float(action == self.asked % 2), self.time == self.steps, False, {}


def factory(**kwargs):
    return Line(**kwargs)


def not_an_environment():
    return 3


def go_right(observation, prev_action, prev_reward, time):
    return np.zeros(len(time), dtype=np.int32)


class Counting:
    """A policy that checks its inputs."""

    def __init__(self, *, spaces, num_actors, seed):
        self.spaces, self.seen = spaces, []

    def act(self, observation, prev_action, prev_reward, time):
        self.seen.append((prev_action.copy(), prev_reward.copy(), time.copy()))
        return np.full(len(time), len(self.seen) % 3, dtype=np.int32)


fixed = Counting(spaces=None, num_actors=0, seed=0)
number = 3
