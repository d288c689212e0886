"""What reaching a goal pays is asked of the environment, where it is a matter of distance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest

from pipelines.envs.goals import GoalReward, find_goal_reward
from pipelines.envs.gymnasium_env import GymnasiumEnv


class Reach(gymnasium.Env):
    """Go to a place: -1 a step until it is nearer than `near`."""

    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, near: float = 0.3, desired: int = 2) -> None:
        box = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
        goal = gymnasium.spaces.Box(-9, 9, (desired,), np.float32)
        self.observation_space = gymnasium.spaces.Dict({"achieved_goal": box, "desired_goal": goal})
        self.near = near

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.goal = self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32)
        return {"achieved_goal": self.place, "desired_goal": self.goal}, {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        self.place = self.place + action / 10
        result = self.compute_reward(self.place, self.goal, {})
        return {"achieved_goal": self.place, "desired_goal": self.goal}, result, result == 0.0, False, {}

    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> float:
        return 0.0 if np.linalg.norm(achieved - desired, axis=-1) < self.near else -1.0

    def compute_terminated(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> bool:
        return self.compute_reward(achieved, desired, info) == 0.0


def asked(pay: Any, size: int = 2) -> GoalReward | None:
    return find_goal_reward(SimpleNamespace(compute_reward=pay), size)


@pytest.mark.parametrize("near", [1e-3, 0.05, 0.45, 120.0])
def test_the_tolerance_is_found(near: float) -> None:
    found = find_goal_reward(Reach(near), 2)
    assert found == GoalReward(tolerance=pytest.approx(near, rel=1e-4), reward=0.0, step_reward=-1.0, ends=True)


def test_goals_end_no_episode_without_compute_terminated() -> None:
    found = asked(lambda achieved, desired, info: float(np.linalg.norm(achieved - desired) <= 1))
    assert found is not None
    assert not found.ends


@pytest.mark.parametrize(
    "pay",
    [
        lambda achieved, desired, info: -float(np.linalg.norm(achieved - desired)),
        lambda achieved, desired, info: 1.0,
        lambda achieved, desired, info: float(np.abs((achieved - desired) * (1, 3)).max() < 0.2),
        lambda achieved, desired, info: float(np.linalg.norm(achieved - desired) > 0.2),
        lambda achieved, desired, info: info["success"],
    ],
    ids=["dense", "constant", "not-a-ball", "far-is-better", "needs-more"],
)
def test_other_rewards_have_no_tolerance(pay: Any) -> None:
    assert asked(pay) is None


def test_goals_of_different_shapes_have_no_goal_reward() -> None:
    def spec_of(env: gymnasium.Env) -> GoalReward | None:
        return GymnasiumEnv("reach", lambda: env, num_envs=1, seed=0, split="train").spec.goal_reward

    assert spec_of(Reach()) is not None
    assert spec_of(Reach(desired=3)) is None
