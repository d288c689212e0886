"""Relabelers that give trajectories other goals, by the goal rule that holds for them."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any, Literal, get_args

import numpy as np

from pipelines.envs.goals import GOAL_RULES, GOAL_SEQUENCES, GoalRule, GoalSequenceRule, within
from pipelines.errors import InputMissing, UsageError
from pipelines.lake.schema import ACTION, RESET, REWARD, TERMINATED, TRUNCATED
from pipelines.relabelers.base import Context, Relabeler
from pipelines.relabelers.paths import Paths, pick_rows, take

_OneGoal = Literal["final", "future", "random"]
_InOrder = Literal["none", "some", "all", "final", "future", "random"]
# Purposes of draws: of a relabeler of one goal, and of one of goals in order.
_BEGIN, _GOAL = range(2)
_COUNT, _STEP, _WHICH = range(3)
_TRIES = 16  # beginnings for `future`; the last one is the first row, from which a goal is found if there is any
_NEVER = 2**61


def make_hindsight(strategy: str, context: Context) -> Relabeler:
    """Make goals of what was achieved: `final`, `future` (default) or `random`, by either kind of rule."""
    chosen: Any = _require_known(strategy or "future", get_args(_OneGoal), "hindsight")
    rule = _find_rule(context, needed_by=f"hindsight:{chosen}")
    return Hindsight(rule, chosen) if isinstance(rule, GoalRule) else Instruction(rule, chosen)


def make_instruction(strategy: str, context: Context) -> Relabeler:
    """Put achieved goals among those that are asked for in order: `all`, `some` (default) or `none`."""
    chosen: Any = _require_known(strategy or "some", ("all", "some", "none"), "instruction")
    rule = _find_rule(context, needed_by=f"instruction:{chosen}")
    if isinstance(rule, GoalRule):
        raise InputMissing(
            f"instruction:{chosen}: '{context.env}' has one goal an episode, not goals in order",
            hint="use --with hindsight",
        )
    return Instruction(rule, chosen)


def _require_known(strategy: str, known: tuple[str, ...], relabeler: str) -> str:
    if strategy not in known:
        raise UsageError(f"unknown {relabeler} strategy '{strategy}'", hint=f"known: {', '.join(known)}")
    return strategy


def _find_rule(context: Context, *, needed_by: str) -> GoalRule | GoalSequenceRule:
    """Find the goal rule of the context's environment, or the one that its goal settings give instead.

    InputMissing where there is none, or where its columns are not there or of other forms.
    """
    goal = context.goal
    if goal.rule and goal.tolerance is not None:
        raise UsageError("relabel.goal: both 'rule' and 'tolerance' say what reaching a goal is", hint="give one")
    name = goal.rule or context.env
    rule: GoalRule | GoalSequenceRule
    if goal.tolerance is not None:
        reached = within(goal.tolerance)
        rule = GoalRule(reached=reached, reward=goal.reward, step_reward=goal.step_reward, ends=goal.ends)
    elif name in GOAL_RULES.names():
        rule = GOAL_RULES.get(name)
    elif name in GOAL_SEQUENCES.names():
        rule = GOAL_SEQUENCES.get(name)
    else:
        known = ", ".join(sorted({*GOAL_RULES.names(), *GOAL_SEQUENCES.names()}))
        if not goal.rule:
            raise InputMissing(
                f"environment '{name}' has no goal rule: its trajectories cannot be given other goals",
                hint=f"environments with one: {known}; for others define reaching a goal by relabel.goal.tolerance "
                "or relabel.goal.rule",
            )
        rule = GOAL_RULES.get(name)
        if not isinstance(rule, GoalRule | GoalSequenceRule):
            raise InputMissing(
                f"relabel.goal.rule: '{name}' is no GoalRule or GoalSequenceRule", hint=f"known: {known}"
            )
    if goal.achieved:
        rule = replace(rule, achieved=goal.achieved)
    if goal.goals:
        rule = replace(rule, desired=goal.goals) if isinstance(rule, GoalRule) else replace(rule, goals=goal.goals)
    column = rule.desired if isinstance(rule, GoalRule) else rule.goals
    context.require(rule.achieved, column, needed_by=needed_by)
    achieved, goals = (context.schema.column(each).shape for each in (rule.achieved, column))
    if isinstance(rule, GoalRule):
        fits, form = achieved == goals and len(goals) > 0, "one vector each, of one length"
    else:
        fits, form = len(achieved) == len(goals) == 2 and achieved[1] == goals[1], "(m, d) and (k, d) a step"
    if not fits:
        raise InputMissing(
            f"{needed_by}: '{rule.achieved}' has the shape {achieved} a step and the goals {goals}", hint=f"{form} fit"
        )
    return rule


class Hindsight:
    """Gives trajectories the goals that `strategy` chooses, by the rule of their environment (Andrychowicz et al.,
    NeurIPS 2017, section 3.3): had the goal been a place that was in fact reached.

    Strategies: `final` takes the last place of the trajectory that may be a goal, the same in every version, `random`
    any place of it; `future` begins at a random step and takes a place reached later, so the stretch before it is left
    out. Where reaching a goal ends an episode, the trajectory is cut at the first arrival at the new one. Goals that
    already held in the first row are left out (arriving without an action is not a success), and so is the place where
    an episode ended in failure: the environment would not have paid there. Rewards are replayed by the rule for the
    whole stretch.
    """

    def __init__(self, rule: GoalRule, strategy: _OneGoal = "future") -> None:
        self.rule, self.strategy = rule, strategy
        part = strategy == "future"  # of the original, which brings its own ends and first row
        flags = (TERMINATED, TRUNCATED) if rule.ends or part else ()
        self.changes = (rule.desired, REWARD, *flags, *((ACTION, RESET) if part else ()))
        self.reads = (rule.achieved, TERMINATED, TRUNCATED, *self.changes)

    def relabel(self, paths: Paths) -> Paths:
        """Return each with another goal, which it reaches: in its last row, where that ends it. Trajectories that
        reached no place to choose are left out.
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
        """Count the rows that each may choose its goal from (n,), and choose one (n,). `begin` (n,), where it
        begins, is drawn here for `future`.
        """
        rule, achieved = self.rule, paths.columns[self.rule.achieved]
        if self.strategy == "future":
            begin[:] = 0 if round == _TRIES - 1 else paths.uniform(_BEGIN, round) * (paths.rows - 1)
        free = ~rule.reached(achieved, paths.spread(achieved[paths.first + begin]))
        free[paths.first] = False
        if begin.any():
            free &= paths.time > paths.spread(begin)
        if rule.ends:
            over = paths.columns[TERMINATED][paths.last] != 0
            won = rule.reached(achieved[paths.last], paths.columns[rule.desired][paths.last])
            free[paths.last[over & ~won]] = False
        return pick_rows(free, paths, None if self.strategy == "final" else paths.uniform(_GOAL, round))

    def _with_goal(self, paths: Paths, which: np.ndarray, begin: np.ndarray, goal_row: np.ndarray) -> Paths:
        rule = self.rule
        goal, begin = paths.columns[rule.achieved][goal_row[which]], begin[which]
        end = paths.rows[which] - 1
        if rule.ends:
            all_goals = np.zeros((len(paths), *goal.shape[1:]), dtype=goal.dtype)
            all_goals[which] = goal
            arrivals = np.flatnonzero(rule.reached(paths.columns[rule.achieved], paths.spread(all_goals)))
            start = paths.first[which]
            end = take(arrivals, np.searchsorted(arrivals, start + begin + 1)) - start
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


class Instruction:
    """Puts achieved goals into a sequence of goals (Grigsby et al., ICLR 2024, section 4.3): as many as there is room
    for (`all`), a random number, perhaps none (`some`), or one: what was achieved last (`final`), at a random step
    (`random`), or at one after the last real success (`future`). `none` changes nothing.

    Of k goals in order a trajectory really reached n, at their times. h goals that it achieved at other steps are put
    between them, in the order of time; goals that it did not reach come last, as many as there is room for. What is
    shown, rewards and the end follow from a replay by the rule. Each of the n + h goals is reached, the real ones when
    they really were: what was put before one of them is reached after the one before, and before it. Row 0 reaches
    nothing.
    """

    def __init__(self, rule: GoalSequenceRule, strategy: _InOrder = "some") -> None:
        self.rule, self.strategy = rule, strategy
        self.changes = (rule.goals, REWARD, TERMINATED, TRUNCATED)
        self.reads = (rule.achieved, *self.changes)

    def relabel(self, paths: Paths) -> Paths:
        """Return each with other goals among its own; trajectories that nothing was put into are left out."""
        rule = self.rule
        asked = paths.columns[rule.goals][paths.first]  # (n, k, d)
        open_ = (asked != rule.done).any(axis=2)
        arrival = find_arrivals(rule, paths, asked)
        room = open_.sum(axis=1) - (arrival < _NEVER).sum(axis=1)
        rows = self._choose_rows(paths, arrival, self._choose_number(paths, room))
        keep = np.asarray((rows >= 0).any(axis=1))
        which = np.flatnonzero(keep)
        if not len(which):
            return paths.cut(which, which, which)
        some = paths.only(keep)
        moved = some.first - paths.first[which]
        rows = np.where(rows[which] >= 0, rows[which] + moved[:, None], -1)
        return self._with_goals(
            some, _merge_goals(asked[which], open_[which], arrival[which], self._pick_goals(some, rows))
        )

    def _choose_number(self, paths: Paths, room: np.ndarray) -> np.ndarray:
        """Choose how many goals to put in, (n,)."""
        if self.strategy == "none":
            return np.zeros_like(room)
        if self.strategy == "some":
            return (paths.uniform(_COUNT) * (room + 1)).astype(np.int64)
        return room if self.strategy == "all" else np.minimum(room, 1)

    def _choose_rows(self, paths: Paths, arrival: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Choose (n, k) different rows of `paths` whose goals are put in, `number` of them or fewer; -1 for none."""
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
        ranks = draw_different(end - before, number, paths.uniform(_STEP, np.arange(arrival.shape[1])))
        return np.where(ranks >= 0, take(marked, before[:, None] + ranks), -1)

    def _pick_goals(self, paths: Paths, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pick one of the goals achieved in each row: times (n, k), _NEVER for none, and goals (n, k, d)."""
        achieved = paths.columns[self.rule.achieved][np.maximum(rows, 0)]  # (n, k, m, d)
        there = (achieved != self.rule.done).any(axis=3)
        u = paths.uniform(_WHICH, np.arange(rows.shape[1]))
        rank = (u * there.sum(axis=2)).astype(np.int64)
        chosen = (np.cumsum(there, axis=2) > rank[:, :, None]).argmax(axis=2)
        goals = np.take_along_axis(achieved, chosen[:, :, None, None], axis=2)[:, :, 0]
        return np.where(rows >= 0, rows - paths.first[:, None], _NEVER), goals

    def _with_goals(self, paths: Paths, asked: np.ndarray) -> Paths:
        """Replay the trajectories with the goals `asked` (n, k, d)."""
        rule = self.rule
        arrival = find_arrivals(rule, paths, asked)
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
        # What is shown between two arrivals, for all rows between them: each goal is done from its arrival on.
        count, k = arrival.shape
        times = np.sort(np.where(reached, arrival, paths.rows[:, None]), axis=1)
        edges = np.concatenate([np.zeros((count, 1), dtype=np.int64), times, paths.rows[:, None]], axis=1)
        blocks = np.repeat(asked[:, None], k + 1, axis=1)  # (n, k + 1, k, d)
        blocks[arrival[:, None] <= edges[:, :-1, None]] = rule.done
        shown = np.repeat(blocks.reshape(-1, *asked.shape[1:]), np.diff(edges, axis=1).ravel(), axis=0)
        changed = {
            rule.goals: shown,
            REWARD: reward,
            TERMINATED: terminated,
            TRUNCATED: truncated,
        }
        return paths.with_columns(changed, success=finished.astype(np.int8), names_goal=False)


def find_arrivals(rule: GoalSequenceRule, paths: Paths, asked: np.ndarray) -> np.ndarray:
    """Find the time (n, k) at which each of the goals `asked` (n, k, d) is reached, in order, one a step; _NEVER where
    it is not, and for those that are done from the beginning. `GoalSequenceRule.replay` for many trajectories at once.
    """
    achieved = paths.columns[rule.achieved]
    arrival = np.full(asked.shape[:2], _NEVER, dtype=np.int64)
    row, waiting = paths.first.copy(), np.ones(len(paths), dtype=bool)
    for number in range(asked.shape[1]):
        goal = asked[:, number]
        looks = waiting & (goal != rule.done).any(axis=1)
        spread = paths.spread(goal)  # against each goal achieved in a step: numpy is slow along a short axis
        reached = (rule.reached(achieved[:, i], spread) for i in range(achieved.shape[1]))
        hits = np.flatnonzero(reduce(np.logical_or, reached))
        place = np.searchsorted(hits, row + 1)
        next_row = take(hits, place)
        found = looks & (place < len(hits)) & (next_row > row) & (next_row <= paths.last)
        arrival[found, number] = (next_row - paths.first)[found]
        row[found] = next_row[found]
        waiting &= found | ~looks
    return arrival


def _merge_goals(
    asked: np.ndarray, open_: np.ndarray, arrival: np.ndarray, added: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Merge the real goals and those that are added, (n, k, d), by time, as many as were open; those that were not
    reached come last.
    """
    slots = np.arange(asked.shape[1])
    real = np.where(arrival < _NEVER, arrival, np.where(open_, _NEVER + 1 + slots, 2 * _NEVER - 1))
    times, goals = np.concatenate([real, added[0]], axis=1), np.concatenate([asked, added[1]], axis=1)
    times[:, len(slots) :][added[0] == _NEVER] = 2 * _NEVER - 1
    order = np.argsort(times, axis=1, kind="stable")[:, : len(slots)]
    ordered = np.take_along_axis(goals, order[:, :, None], axis=1)
    result = asked.copy()
    result[open_] = ordered[slots < open_.sum(axis=1)[:, None]]
    return result


def draw_different(among: np.ndarray, number: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Draw (n, k) different whole numbers below `among` (n,), `number` (n,) of them or as many as there are, then -1;
    from uniform draws `u` (n, k). Every set is equally likely (Floyd's algorithm, Bentley, CACM 1987).
    """
    number = np.minimum(number, among)
    chosen = np.full(u.shape, -1, dtype=np.int64)
    for i in range(int(number.max(initial=0))):
        top = among - number + i  # the i-th draw is from 0 .. top
        draw = (u[:, i] * (top + 1)).astype(np.int64)
        taken_before = (chosen[:, :i] == draw[:, None]).any(axis=1)
        chosen[:, i] = np.where(i < number, np.where(taken_before, top, draw), -1)
    return chosen
