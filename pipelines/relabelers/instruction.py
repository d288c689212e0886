"""Instruction relabelling (Grigsby et al., ICLR 2024, section 4.3): had other goals been asked for on the way.

Of k goals in order a trajectory really reached n, at their times. h goals that it achieved at other steps are put
between them, in the order of time; goals that it did not reach come last, as many as there is room for. What is shown,
rewards and the end follow from a replay by the rule. Each of the n + h goals is reached, the real ones when they really
were: what was put before one of them is reached after the one before, and before it. Row 0 reaches nothing.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from pipelines.envs.goals import GoalSequenceRule
from pipelines.lake.schema import REWARD, TERMINATED, TRUNCATED
from pipelines.relabelers.paths import Paths, taken

Strategy = Literal["none", "some", "all", "final", "future", "random"]
_NEVER = 2**61
COUNT, STEP, _WHICH = range(3)  # purposes of draws


class Instruction:
    """Puts achieved goals into the sequence: as many as there is room for (`all`), a random number, perhaps none
    (`some`), or one: what was achieved last (`final`), at a random step (`random`), or at one after the last real
    success (`future`). `none` changes nothing.
    """

    def __init__(self, rule: GoalSequenceRule, strategy: Strategy = "some") -> None:
        self.rule, self.strategy = rule, strategy
        self.changes = (rule.goals, REWARD, TERMINATED, TRUNCATED)
        self.reads = (rule.achieved, *self.changes)

    def relabel(self, paths: Paths) -> Paths:
        """Each with other goals among its own; without those that nothing was put into."""
        rule = self.rule
        asked = paths.columns[rule.goals][paths.first]  # (n, k, d)
        open_ = (asked != rule.done).any(axis=2)
        arrival = replayed(rule, paths, asked)
        room = open_.sum(axis=1) - (arrival < _NEVER).sum(axis=1)
        rows = self._steps(paths, arrival, self._number(paths, room))
        keep = np.asarray((rows >= 0).any(axis=1))
        which = np.flatnonzero(keep)
        if not len(which):
            return paths.cut(which, which, which)
        some = paths.only(keep)
        moved = some.first - paths.first[which]
        rows = np.where(rows[which] >= 0, rows[which] + moved[:, None], -1)
        return self._with_goals(some, _merged(asked[which], open_[which], arrival[which], self._goals(some, rows)))

    def _number(self, paths: Paths, room: np.ndarray) -> np.ndarray:
        """(n,) how many goals to put in."""
        if self.strategy == "none":
            return np.zeros_like(room)
        if self.strategy == "some":
            return (paths.uniform(COUNT) * (room + 1)).astype(np.int64)
        return room if self.strategy == "all" else np.minimum(room, 1)

    def _steps(self, paths: Paths, arrival: np.ndarray, number: np.ndarray) -> np.ndarray:
        """(n, k) different rows of `paths` whose goals are put in, `number` of them or fewer; -1 for none."""
        free = np.ones(len(paths.columns[REWARD]), dtype=bool)
        free[paths.first] = False
        reached = arrival < _NEVER
        free[(paths.first[:, None] + arrival)[reached]] = False
        if self.strategy == "final":
            last = np.zeros_like(free)
            last[paths.last] = True
            free &= last
        elif self.strategy == "future":
            free &= paths.time > paths.spread(np.where(reached, arrival, 0).max(axis=1))
        if (paths.columns[self.rule.achieved][:, -1] == self.rule.done).any():  # else no row is without one
            free &= (paths.columns[self.rule.achieved] != self.rule.done).any(axis=(1, 2))
        marked = np.flatnonzero(free)
        before, end = np.searchsorted(marked, paths.first), np.searchsorted(marked, paths.last, side="right")
        ranks = different(end - before, number, paths.uniform(STEP, np.arange(arrival.shape[1])))
        return np.where(ranks >= 0, taken(marked, before[:, None] + ranks), -1)

    def _goals(self, paths: Paths, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Times (n, k), NEVER for none, and goals (n, k, d): of those achieved in each row, one."""
        achieved = paths.columns[self.rule.achieved][np.maximum(rows, 0)]  # (n, k, m, d)
        there = (achieved != self.rule.done).any(axis=3)
        u = paths.uniform(_WHICH, np.arange(rows.shape[1]))
        rank = (u * there.sum(axis=2)).astype(np.int64)
        chosen = (np.cumsum(there, axis=2) > rank[:, :, None]).argmax(axis=2)
        goals = np.take_along_axis(achieved, chosen[:, :, None, None], axis=2)[:, :, 0]
        return np.where(rows >= 0, rows - paths.first[:, None], _NEVER), goals

    def _with_goals(self, paths: Paths, asked: np.ndarray) -> Paths:
        """The trajectories as they are for one who is asked for `asked` (n, k, d)."""
        rule = self.rule
        arrival = replayed(rule, paths, asked)
        finished = ((arrival < _NEVER) | (asked == rule.done).all(axis=2)).all(axis=1)
        end = np.where(finished, np.where(arrival < _NEVER, arrival, 0).max(axis=1), paths.rows - 1)
        paths = paths.cut(np.arange(len(paths)), np.zeros_like(end), end + 1)
        reached = arrival < _NEVER
        reward = np.zeros(len(paths.columns[REWARD]), dtype=np.float32)
        reward[(paths.first[:, None] + arrival)[reached]] = rule.reward
        terminated, truncated = paths.columns[TERMINATED].copy(), paths.columns[TRUNCATED].copy()
        won = paths.last[finished]
        truncated[won] &= terminated[won]  # an end by time remains one only where both flags were set
        terminated[won] = 1
        changed = {
            rule.goals: shown(asked, arrival, paths.rows, rule.done),
            REWARD: reward,
            TERMINATED: terminated,
            TRUNCATED: truncated,
        }
        return paths.with_columns(changed, success=finished.astype(np.int8), names_goal=False)


def replayed(rule: GoalSequenceRule, paths: Paths, asked: np.ndarray) -> np.ndarray:
    """(n, k) time at which each of the goals `asked` (n, k, d) is reached, in order, one a step; NEVER where it is not,
    and for those that are done from the beginning. `GoalSequenceRule.replay` for many trajectories at once.
    """
    achieved = paths.columns[rule.achieved]
    arrival = np.full(asked.shape[:2], _NEVER, dtype=np.int64)
    row, waiting = paths.first.copy(), np.ones(len(paths), dtype=bool)
    for number in range(asked.shape[1]):
        goal = asked[:, number]
        looks = waiting & (goal != rule.done).any(axis=1)
        hits = np.flatnonzero(_reached(rule, achieved, paths.spread(goal)))
        place = np.searchsorted(hits, row + 1)
        next_row = taken(hits, place)
        found = looks & (place < len(hits)) & (next_row > row) & (next_row <= paths.last)
        arrival[found, number] = (next_row - paths.first)[found]
        row[found] = next_row[found]
        waiting &= found | ~looks
    return arrival


def _reached(rule: GoalSequenceRule, achieved: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """(R,) bool: whether one of `achieved` (R, m, d) reaches `goal` (R, d)."""
    any_ = rule.reached(achieved[:, 0], goal)
    for other in range(1, achieved.shape[1]):
        any_ |= rule.reached(achieved[:, other], goal)
    return any_


def _merged(
    asked: np.ndarray, open_: np.ndarray, arrival: np.ndarray, added: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """(n, k, d) the real goals and those that are added, by time, as many as were open; then what was not reached."""
    slots = np.arange(asked.shape[1])
    real = np.where(arrival < _NEVER, arrival, np.where(open_, _NEVER + 1 + slots, 2 * _NEVER - 1))
    times, goals = np.concatenate([real, added[0]], axis=1), np.concatenate([asked, added[1]], axis=1)
    times[:, len(slots) :][added[0] == _NEVER] = 2 * _NEVER - 1
    order = np.argsort(times, axis=1, kind="stable")[:, : len(slots)]
    ordered = np.take_along_axis(goals, order[:, :, None], axis=1)
    result = asked.copy()
    result[open_] = ordered[slots < open_.sum(axis=1)[:, None]]
    return result


def shown(asked: np.ndarray, arrival: np.ndarray, rows: np.ndarray, done: float) -> np.ndarray:
    """(R, k, d): goals (n, k, d), each `done` from its arrival (n, k) on; trajectories of `rows` (n,) rows."""
    count, k = arrival.shape
    times = np.sort(np.where(arrival < _NEVER, arrival, rows[:, None]), axis=1)
    edges = np.concatenate([np.zeros((count, 1), dtype=np.int64), times, rows[:, None]], axis=1)
    blocks = np.repeat(asked[:, None], k + 1, axis=1)  # (n, k + 1, k, d): what is shown between two arrivals
    blocks[arrival[:, None] <= edges[:, :-1, None]] = done
    return np.repeat(blocks.reshape(-1, *asked.shape[1:]), np.diff(edges, axis=1).ravel(), axis=0)


def different(among: np.ndarray, number: np.ndarray, u: np.ndarray) -> np.ndarray:
    """(n, k) different whole numbers below `among` (n,), `number` (n,) of them or as many as there are, then -1; from
    uniform draws `u` (n, k). Every set is equally likely (Floyd's algorithm, Bentley, CACM 1987).
    """
    number = np.minimum(number, among)
    chosen = np.full(u.shape, -1, dtype=np.int64)
    for i in range(int(number.max(initial=0))):
        top = among - number + i  # the i-th draw is from 0 .. top
        draw = (u[:, i] * (top + 1)).astype(np.int64)
        taken_before = (chosen[:, :i] == draw[:, None]).any(axis=1)
        chosen[:, i] = np.where(i < number, np.where(taken_before, top, draw), -1)
    return chosen
