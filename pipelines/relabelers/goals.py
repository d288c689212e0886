"""Which goal rule holds for some trajectories, and the relabelers that give them other goals by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from pipelines.envs.goals import (
    GOAL_RULES,
    GOAL_SEQUENCES,
    GoalRule,
    GoalSequenceRule,
    within,
)
from pipelines.errors import InputMissing, UsageError
from pipelines.relabelers import hindsight
from pipelines.relabelers.base import Context, Relabeler
from pipelines.relabelers.hindsight import Hindsight
from pipelines.relabelers.instruction import Instruction


def make_hindsight(strategy: str, context: Context) -> Relabeler:
    """Goals that were achieved, `final`, `future` (default) or `random`, by either kind of rule."""
    chosen: Any = _known(strategy or "future", get_args(hindsight.Strategy), "hindsight")
    rule = _rule_for(context, needed_by=f"hindsight:{chosen}")
    return Hindsight(rule, chosen) if isinstance(rule, GoalRule) else Instruction(rule, chosen)


def make_instruction(strategy: str, context: Context) -> Relabeler:
    """Achieved goals among those that are asked for in order: `all`, `some` (default) or `none`."""
    chosen: Any = _known(strategy or "some", ("all", "some", "none"), "instruction")
    rule = _rule_for(context, needed_by=f"instruction:{chosen}")
    if isinstance(rule, GoalRule):
        raise InputMissing(
            f"instruction:{chosen}: '{context.env}' has one goal an episode, not goals in order",
            hint="use --with hindsight",
        )
    return Instruction(rule, chosen)


def _known(strategy: str, known: tuple[str, ...], relabeler: str) -> str:
    if strategy not in known:
        raise UsageError(f"unknown {relabeler} strategy '{strategy}'", hint=f"known: {', '.join(known)}")
    return strategy


def _rule_for(context: Context, *, needed_by: str) -> GoalRule | GoalSequenceRule:
    """The goal rule of the context's environment, or the one that its goal settings give instead.

    InputMissing where there is none, or where its columns are not there.
    """
    goal = context.goal
    if goal.rule and goal.tolerance is not None:
        raise UsageError("relabel.goal: both 'rule' and 'tolerance' say what reaching a goal is", hint="give one")
    rule: GoalRule | GoalSequenceRule
    if goal.tolerance is not None:
        reached = within(goal.tolerance)
        rule = GoalRule(reached=reached, reward=goal.reward, step_reward=goal.step_reward, ends=goal.ends)
    else:
        rule = _named(goal.rule or context.env, of_env=not goal.rule)
    if goal.achieved:
        rule = replace(rule, achieved=goal.achieved)
    if goal.goals:
        rule = replace(rule, desired=goal.goals) if isinstance(rule, GoalRule) else replace(rule, goals=goal.goals)
    context.require(rule.achieved, getattr(rule, _goals_field(rule)), needed_by=needed_by)
    _fit(rule, context, needed_by)
    return rule


def _goals_field(rule: GoalRule | GoalSequenceRule) -> str:
    return "desired" if isinstance(rule, GoalRule) else "goals"


def _named(name: str, *, of_env: bool) -> GoalRule | GoalSequenceRule:
    for registry in (GOAL_RULES, GOAL_SEQUENCES):
        if name in registry.names():
            found: GoalRule | GoalSequenceRule = registry.get(name)
            return found
    known = ", ".join(sorted({*GOAL_RULES.names(), *GOAL_SEQUENCES.names()}))
    if of_env:
        raise InputMissing(
            f"environment '{name}' has no goal rule: its trajectories cannot be given other goals",
            hint=f"environments with one: {known}; for others define reaching a goal by relabel.goal.tolerance "
            "or relabel.goal.rule",
        )
    rule = GOAL_RULES.get(name)
    if not isinstance(rule, GoalRule | GoalSequenceRule):
        raise InputMissing(f"relabel.goal.rule: '{name}' is no GoalRule or GoalSequenceRule", hint=f"known: {known}")
    return rule


def _fit(rule: GoalRule | GoalSequenceRule, context: Context, needed_by: str) -> None:
    """InputMissing unless goals have the form of what is achieved."""
    achieved = context.schema.column(rule.achieved).shape
    goals = context.schema.column(getattr(rule, _goals_field(rule))).shape
    if isinstance(rule, GoalRule):
        fits, form = achieved == goals and len(goals) > 0, "one vector each, of one length"
    else:
        fits, form = len(achieved) == len(goals) == 2 and achieved[1] == goals[1], "(m, d) and (k, d) a step"
    if not fits:
        raise InputMissing(
            f"{needed_by}: '{rule.achieved}' has the shape {achieved} a step and the goals {goals}", hint=f"{form} fit"
        )
