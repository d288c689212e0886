"""Goal rules: what reaching a goal means in an environment that shows its goal, as a function of the columns
alone.

A rule can be applied to any goal and any recorded path, which is what makes hindsight exact: an environment
with a rule moves in the same way whatever the goal is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

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
