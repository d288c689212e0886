"""What an episode achieved reaches the evaluation, whichever process plays it."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from pipelines.envs.make import make
from pipelines.envs.task_env import NOTHING, TaskEnv
from pipelines.envs.workers import WorkerEnv
from pipelines.evaluation.runner import evaluate
from pipelines.rollout.policies import RandomPolicy


class Collecting(TaskEnv):
    """Each step may bring one of three things, drawn from the seed."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space: gymnasium.Space = spaces.Discrete(2)
    achievements = ("wood", "stone", "iron")
    horizon = 4

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.task, self.outcome, self.time = f"{seed}", NOTHING, 0
        self.achieved = [False] * 3
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        if self.np_random.random() < 0.4:
            self.achieved[int(self.np_random.integers(3))] = True
        return np.zeros(1, np.float32), 0.0, self.time == self.horizon, False, {}


NAME = f"{__name__}:Collecting"


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.system)])
def test_achievements_are_those_of_each_counted_episode(workers):
    env = WorkerEnv(NAME, num_envs=3, workers=2, seed=0) if workers else make(NAME, num_envs=3, seed=0)
    found = evaluate(env, RandomPolicy(env.spec.spaces.action, seed=0), episodes=10)
    env.close()
    one = make(NAME, num_envs=1, seed=0)
    expected = []
    for _ in range(10):
        one.reset()
        for _ in range(4):
            one.step(np.zeros(1, dtype=np.int32))
        expected.append(one.achieved(np.arange(1))[0])
    np.testing.assert_array_equal(found.achieved, expected)
    assert found.achieved.dtype == bool
    assert 0 < found.achieved.mean() < 1


def test_an_environment_without_achievements_has_none():
    assert make("tmaze", num_envs=2, seed=0).achieved(np.arange(2)).shape == (2, 0)
