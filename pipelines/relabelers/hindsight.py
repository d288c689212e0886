"""Hindsight goals (Andrychowicz et al., NeurIPS 2017, section 3.3): had the goal been a place that was in
fact reached.

Strategies: `final` takes the last place of the trajectory, `random` any place of it; `future` begins at a
random step and takes a place reached later, so the stretch before it is left out. The trajectory is cut at
the first arrival at the new goal, which pays and ends it by the environment's goal rule. No goal is taken
that already held in the first row (arriving there without an action is no success), nor the place where an
episode ended in failure: there the environment would not have paid. Rewards are replayed by the rule for the
whole stretch, never edited.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np

from pipelines.envs.goals import GoalRule, goal_rule
from pipelines.errors import InputMissing, UsageError
from pipelines.lake.schema import ACTION, RESET, REWARD, TERMINATED, TRUNCATED
from pipelines.lake.trajectory import Trajectory
from pipelines.relabelers.base import Relabeled

Strategy = Literal["final", "future", "random"]


class Hindsight:
    """Relabels goals by `strategy`. `rule`: the goal rule; None: that of each trajectory's environment."""

    def __init__(self, strategy: Strategy = "future", *, rule: GoalRule | None = None) -> None:
        self.strategy = strategy
        self.method = f"hindsight-{strategy}"
        self._rule = rule
        desired = GoalRule.desired if rule is None else rule.desired
        self.columns = (desired, ACTION, REWARD, TERMINATED, TRUNCATED, RESET)

    def relabel(self, trajectory: Trajectory, rng: np.random.Generator) -> Relabeled | None:
        """The trajectory with another goal, reached in its last row; None where it reached no place to
        choose.

        InputMissing where the environment has no goal rule or the trajectory no goal columns.
        """
        rule = self._rule or goal_rule(trajectory.info.env)
        base = trajectory.columns
        for name in (rule.achieved, rule.desired):
            if name not in base:
                raise InputMissing(f"trajectory {trajectory.uid}: no column '{name}'; hindsight needs shown goals")
        begins = rng.permutation(trajectory.length) if self.strategy == "future" else [0]
        for offset in map(int, begins):
            candidates = _candidates(rule, base, offset)
            if len(candidates):
                chosen = candidates[-1] if self.strategy == "final" else rng.choice(candidates)
                return self._with_goal(rule, base, offset, base[rule.achieved][chosen])
        return None

    def _with_goal(self, rule: GoalRule, base: Mapping[str, np.ndarray], offset: int, goal: np.ndarray) -> Relabeled:
        path = {name: base[name][offset:] for name in (rule.achieved, rule.desired, ACTION, RESET)}
        path[rule.desired] = np.broadcast_to(goal, path[rule.desired].shape)
        reward, success = rule.outcome(path)
        stop = int(success.argmax()) + 1
        columns = {
            rule.desired: path[rule.desired][:stop].copy(),
            ACTION: path[ACTION][:stop].copy(),
            REWARD: reward[:stop],
            TERMINATED: success[:stop].astype(np.uint8),
            TRUNCATED: np.zeros(stop, dtype=np.uint8),
            RESET: path[RESET][:stop].copy(),
        }
        columns[ACTION][0] = 0
        columns[RESET][0] = 0
        return Relabeled(columns=columns, length=stop - 1, offset=offset, success=True)


def make(strategy: str = "future") -> Hindsight:
    """Hindsight by the name of its strategy. UsageError for another name."""
    if strategy not in get_args(Strategy):
        raise UsageError(f"unknown hindsight strategy '{strategy}'", hint=f"known: {', '.join(get_args(Strategy))}")
    return Hindsight(strategy)  # type: ignore[arg-type]


def _candidates(rule: GoalRule, base: Mapping[str, np.ndarray], offset: int) -> np.ndarray:
    """Rows after `offset` whose place may be the goal of a stretch that begins at `offset`."""
    achieved = base[rule.achieved]
    rows = np.arange(offset + 1, len(achieved))
    if base[TERMINATED][-1] and not rule.reached(achieved[-1], base[rule.desired][-1]):
        rows = rows[:-1]
    held_before = rule.reached(achieved[rows], np.broadcast_to(achieved[offset], achieved[rows].shape))
    return rows[~held_before]
