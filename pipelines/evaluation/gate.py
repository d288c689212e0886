"""`--require "return_mean >= 0.9"`: a condition that scripts can rely on."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.errors import RequirementNotMet, UsageError
from pipelines.nearest import did_you_mean

_OPERATORS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_CLAUSE = re.compile(r"\s*([A-Za-z_]\w*(?:\[-?\d+\])*(?:\.[a-z_]+)?)\s*(>=|<=|==|!=|>|<)\s*(\S+)\s*")
_INDEX = re.compile(r"\[(-?\d+)\]")


@dataclass(frozen=True)
class _Clause:
    """One comparison: `metric` (as `return_mean` or `return_ci95[0]`), `relation`, `bound`."""

    metric: str
    relation: str
    bound: float

    def __str__(self) -> str:
        return f"{self.metric} {self.relation} {self.bound:g}"


def parse(requirement: str) -> tuple[_Clause, ...]:
    """Parse the clauses of `requirement`, joined by `and`; none for an empty text. UsageError if it is invalid.

    >>> [str(clause) for clause in parse("return_mean >= 0.9 and success_ci95[0] > .5")]
    ['return_mean >= 0.9', 'success_ci95[0] > 0.5']
    """
    clauses = []
    for text in re.split(r"\band\b", requirement) if requirement.strip() else ():
        match = _CLAUSE.fullmatch(text)
        try:
            bound = float(match[3]) if match else math.nan
        except ValueError:
            match, bound = None, math.nan
        if match is None:
            raise UsageError(
                f"cannot read the requirement '{requirement}' at '{text.strip()}'",
                hint='write METRIC >= NUMBER, several joined by "and"',
            )
        clauses.append(_Clause(match[1], match[2], bound))
    return tuple(clauses)


def refuse_unknown(requirement: str, examples: Mapping[str, Any]) -> None:
    """Raise UsageError if `requirement` names a metric that `examples` lack; their values do not matter."""
    for clause in parse(requirement):
        find_value(clause.metric, examples)


def check(requirement: str, metrics: Mapping[str, Any]) -> None:
    """Raise RequirementNotMet, naming every clause that fails and its value; UsageError for an unknown metric."""
    failed = []
    for clause in parse(requirement):
        found = find_value(clause.metric, metrics)
        if math.isnan(found) or not _OPERATORS[clause.relation](found, clause.bound):
            failed.append(f"{clause} (it is {found:.6g})")
    if failed:
        raise RequirementNotMet(f"requirement not met: {' and '.join(failed)}")


def find_value(metric: str, metrics: Mapping[str, Any]) -> float:
    """Find the number that `metric` names: `return_ci95[0]`, `per_attempt[-1].return_mean`, `per_attempt[-1]` (its
    success, otherwise its return). UsageError if there is none."""
    metric, _, part = metric.partition(".")
    name, *_ = metric.split("[")
    if name not in metrics:
        hint = did_you_mean(name, metrics, otherwise=f"known: {', '.join(sorted(metrics))}")
        raise UsageError(f"no metric '{name}' to require", hint=hint)
    found = metrics[name]
    for index in _INDEX.findall(metric):
        if not isinstance(found, list | tuple) or not -len(found) <= int(index) < len(found):
            raise UsageError(f"metric '{name}' has no entry [{index}]")
        found = found[int(index)]
    if isinstance(found, Mapping):
        found = found.get(part or ("success_mean" if "success_mean" in found else "return_mean"))
    elif part:
        raise UsageError(f"metric '{metric}' has no '{part}'")
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise UsageError(f"metric '{metric}' is not a number", hint="take an entry, such as return_ci95[0]")
    return float(found)
