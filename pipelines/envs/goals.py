"""Goal rules: what reaching a goal means in an environment that shows its goal, as a function of the columns
alone.

A rule can be applied to any goal and any recorded path, which is what makes hindsight exact: an environment
with a rule moves in the same way whatever the goal is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from pipelines.registry import Registry


def is_same(achieved: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """Whether all d numbers are equal, (...) bool. By column: numpy is slow along a short axis."""
    equal = achieved == goal
    return reduce(np.logical_and, (equal[..., i] for i in range(equal.shape[-1])))


def within(tolerance: float) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Make a `reached` for places within a Euclidean distance of `tolerance`."""

    def near(achieved: np.ndarray, goal: np.ndarray) -> np.ndarray:
        return np.linalg.norm(achieved - goal, axis=-1) <= tolerance

    return near


@dataclass(frozen=True, kw_only=True)
class GoalRule:
    """`reached(achieved, desired)` (..., d), (..., d) -> (...) bool. Reaching pays `reward` and, if it `ends` the
    episode, is its end.

    Every other step pays `step_reward`. `achieved` and `desired` name the columns.
    """

    reached: Callable[[np.ndarray, np.ndarray], np.ndarray]
    reward: float = 1.0
    step_reward: float = 0.0
    achieved: str = "obs.achieved_goal"
    desired: str = "obs.desired_goal"
    ends: bool = True

    def outcome(self, columns: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Compute rewards (T + 1,) float32 and successes (T + 1,) bool of a path, up to its first success if that ends
        it.

        Row 0 is the start of the path: no action led there, so it neither pays nor succeeds. Rows after the end are no
        longer part of the episode; ignore their entries.
        """
        success = self.reached(columns[self.achieved], columns[self.desired])
        reward = np.where(success, self.reward, self.step_reward).astype(np.float32)
        success[0], reward[0] = False, 0.0
        return reward, success


@dataclass(frozen=True, kw_only=True)
class GoalSequenceRule:
    """Goals that must be reached in order. Each pays `reward` when it is reached and is shown as `done` from then on;
    the last ends the episode in success.

    `reached(achieved, goal)` (..., d), (..., d) -> (...) bool; at most one goal a step. `achieved` names the column
    (T + 1, m, d) of all that each step reached, padded with `done`; `goals` that (T + 1, k, d) of what was asked.
    """

    reached: Callable[[np.ndarray, np.ndarray], np.ndarray]
    reward: float = 1.0
    done: float = -1.0
    achieved: str = "obs.achieved"
    goals: str = "obs.goals"

    def replay(self, achieved: np.ndarray, goals: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Replay a path `achieved` (T + 1, m, d) with `goals` (k, d), skipping those that are `done` from the start:
        return the goals as shown (T + 1, k, d), rewards (T + 1,) float32 and successes (T + 1,) bool.

        Row 0 is the start of the path: no action led there, so it reaches nothing. Rows after the success are no longer
        part of the episode.
        """
        shown = np.repeat(goals[None], len(achieved), axis=0)
        reward, success = np.zeros(len(achieved), dtype=np.float32), np.zeros(len(achieved), dtype=bool)
        row = 0
        for number in np.flatnonzero((goals != self.done).any(axis=1)).tolist():
            arrivals = np.flatnonzero(self.reached(achieved[row + 1 :], goals[number]).any(axis=1))
            if not len(arrivals):
                break
            row += 1 + int(arrivals[0])
            shown[row:, number], reward[row] = self.done, self.reward
        success[row] = row > 0 and bool((shown[row] == self.done).all())
        return shown, reward, success


@dataclass(frozen=True, kw_only=True)
class GoalReward:
    """What `compute_reward` pays: `reward` within a Euclidean distance of `tolerance`, which may end the episode, and
    `step_reward` beyond."""

    tolerance: float
    reward: float
    step_reward: float
    ends: bool


_NEAREST, _FARTHEST = 1e-6, 1e6  # distances between which a tolerance is looked for
_HALVINGS = 60


def find_goal_reward(env: Any, size: int) -> GoalReward | None:
    """Ask an environment what a goal of `size` numbers pays, by the methods `compute_reward` and `compute_terminated`
    of goal environments (gymnasium-robotics' `GoalEnv`).

    None where it has no such method, where rewards are no two values, or where they do not depend on the distance
    alone, as those of angles.
    """
    if not (hasattr(env, "compute_reward") and size):
        return None
    directions = np.random.default_rng(0).normal(size=(3, size))
    starts = (np.zeros(size), directions[0], directions[1])

    def pay(start: np.ndarray, direction: np.ndarray, distance: float) -> float:
        return float(env.compute_reward(start, start + direction / np.linalg.norm(direction) * distance, {}))

    try:
        near, far = (pay(starts[0], directions[0], distance) for distance in (0.0, _FARTHEST))
        if near <= far:
            return None
        tolerances = []
        for start, direction in zip(starts, directions, strict=True):
            within, beyond = _NEAREST, _FARTHEST
            for _ in range(_HALVINGS):
                middle = math.sqrt(within * beyond)
                paid = pay(start, direction, middle)
                if paid not in (near, far):
                    return None
                within, beyond = (middle, beyond) if paid == near else (within, middle)
            tolerances.append(beyond)
        ends = hasattr(env, "compute_terminated") and bool(env.compute_terminated(starts[0], starts[0], {}))
    except Exception:  # it may want more than the interface says, such as numbers of the step
        return None
    if max(tolerances) > 1.001 * min(tolerances) or not 2 * _NEAREST < tolerances[0] < _FARTHEST / 2:
        return None
    return GoalReward(tolerance=float(f"{tolerances[0]:.5g}"), reward=near + 0.0, step_reward=far + 0.0, ends=ends)


# Of environments by name; a package adds one by an entry point `amago.goal_rule`, or `amago.goal_sequence` where goals
# come in order.
GOAL_RULES = Registry("goal rule", {"goal-frozen-lake": "pipelines.envs.suites.goal_frozen_lake:GOAL_RULE"})
GOAL_SEQUENCES = Registry(
    "goal sequence",
    {
        "crafter": "pipelines.envs.suites.crafter_goals:GOAL_RULE",
        "mazerunner": "pipelines.envs.suites.mazerunner:GOAL_RULE",
    },
)
