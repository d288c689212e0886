"""Hindsight goals (Andrychowicz et al., NeurIPS 2017, section 3.3): had the goal been a place that was in
fact reached.

Strategies: `final` takes the last place of the trajectory that may be a goal, the same in every version, `random` any
place of it; `future` begins at a random step and takes a place reached later, so the stretch before it is left out.
Where reaching a goal ends an episode, the trajectory is cut at the first arrival at the new one. Goals that
already held in the first row are left out (arriving without an action is not a success), and so is the place where
an episode ended in failure: the environment would not have paid there. Rewards are
replayed by the rule for the whole stretch.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from pipelines.envs.goals import GoalRule
from pipelines.lake.schema import ACTION, RESET, REWARD, TERMINATED, TRUNCATED
from pipelines.relabelers.paths import Paths, picked, taken

Strategy = Literal["final", "future", "random"]
BEGIN, GOAL = range(2)  # purposes of draws
_TRIES = 16  # beginnings for `future`; the last one is the first row, from which a goal is found if there is any


class Hindsight:
    """Gives trajectories the goals that `strategy` chooses, by the rule of their environment."""

    def __init__(self, rule: GoalRule, strategy: Strategy = "future") -> None:
        self.rule, self.strategy = rule, strategy
        part = strategy == "future"  # of the original, which brings its own ends and first row
        flags = (TERMINATED, TRUNCATED) if rule.ends or part else ()
        self.changes = (rule.desired, REWARD, *flags, *((ACTION, RESET) if part else ()))
        self.reads = (rule.achieved, TERMINATED, TRUNCATED, *self.changes)

    def relabel(self, paths: Paths) -> Paths:
        """Return each with another goal, which it reaches (in its last row, where that ends it); without those that
        reached no place to choose.
        """
        begin = np.zeros(len(paths), dtype=np.int64)
        count, goal_row = self._choose(paths, begin, round=0)
        for round in range(1, _TRIES):
            left = np.flatnonzero(count == 0)
            if self.strategy != "future" or not len(left):
                break
            some = paths.only(count == 0)
            begun = np.zeros(len(some), dtype=np.int64)
            count[left], rows = self._choose(some, begun, round=round)
            begin[left] = begun
            goal_row[left] = rows - some.first + paths.first[left]
        return self._with_goal(paths, np.flatnonzero(count), begin, goal_row)

    def _choose(self, paths: Paths, begin: np.ndarray, round: int) -> tuple[np.ndarray, np.ndarray]:
        """Return how many rows each may choose its goal from (n,), and the one it chose (n,). `begin` (n,), where it
        begins, is drawn here for `future`.
        """
        rule, achieved = self.rule, paths.columns[self.rule.achieved]
        if self.strategy == "future":
            begin[:] = 0 if round == _TRIES - 1 else paths.uniform(BEGIN, round) * (paths.rows - 1)
        free = ~rule.reached(achieved, paths.spread(achieved[paths.first + begin]))
        free[paths.first] = False
        if begin.any():
            free &= paths.time > paths.spread(begin)
        if rule.ends:
            over = paths.columns[TERMINATED][paths.last] != 0
            won = rule.reached(achieved[paths.last], paths.columns[rule.desired][paths.last])
            free[paths.last[over & ~won]] = False
        return picked(free, paths, None if self.strategy == "final" else paths.uniform(GOAL, round))

    def _with_goal(self, paths: Paths, which: np.ndarray, begin: np.ndarray, goal_row: np.ndarray) -> Paths:
        rule = self.rule
        goal, begin = paths.columns[rule.achieved][goal_row[which]], begin[which]
        end = paths.rows[which] - 1
        if rule.ends:
            all_goals = np.zeros((len(paths), *goal.shape[1:]), dtype=goal.dtype)
            all_goals[which] = goal
            arrivals = np.flatnonzero(rule.reached(paths.columns[rule.achieved], paths.spread(all_goals)))
            start = paths.first[which]
            end = taken(arrivals, np.searchsorted(arrivals, start + begin + 1)) - start
        cut = paths.cut(which, begin, end - begin + 1)
        desired = cut.columns[rule.desired]
        changed: dict[str, np.ndarray] = {
            rule.desired: cut.spread(goal.astype(desired.dtype, copy=False)).reshape(desired.shape)
        }
        if rule.ends:
            reward: np.ndarray = np.full(len(desired), rule.step_reward, dtype=np.float32)
            reward[cut.last] = rule.reward
            over = np.zeros(len(desired), dtype=np.uint8)
            over[cut.last] = 1
            changed |= {TERMINATED: over, TRUNCATED: np.zeros_like(over)}
        else:
            reached = rule.reached(cut.columns[rule.achieved], changed[rule.desired])
            reward = np.where(reached, rule.reward, rule.step_reward).astype(np.float32)
        reward[cut.first] = 0.0
        changed[REWARD] = reward
        for name in (ACTION, RESET) if self.strategy == "future" else ():
            changed[name] = cut.columns[name].copy()
            changed[name][cut.first] = 0
        return cut.with_columns(changed, success=np.ones(len(cut), dtype=np.int8), names_goal=False)
