"""How much a test tries: few examples, trials and cases in the quick tier, more before a change lands, all at night;
see CONTRIBUTING.md.

The profile `dev` of Hypothesis is the default; `--hypothesis-profile=ci` and `night` select the others.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("dev", max_examples=10, deadline=None)
for _name in ("ci", "night"):
    settings.register_profile(_name, deadline=None, print_blob=True)
settings.load_profile("dev")  # until pytest's option loads another


def trials(count: int, quick: int = 10) -> int:
    """Return `count`; at most `quick` in the profile `dev`, and a sixth of it, though not less, in the profile `ci`."""
    profile = settings.get_current_profile_name()
    return {"dev": min(count, quick), "ci": min(count, max(quick, -(-count // 6)))}.get(profile, count)


def examples(count: int) -> settings:
    """Return the settings of a property that is tried `count` times in the night."""
    return settings(max_examples=trials(count), deadline=None)


def some(cases: Iterable[Any], *quick: int) -> list[Any]:
    """Return the cases of a parametrized test, all but those at the positions `quick` in the tier `full`."""
    return [
        case if position in quick else pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.full)
        for position, case in enumerate(cases)
    ]


def crossed(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Return all pairs of two lists for a parametrized test. Every member of either is in a pair of the quick tier; the
    other pairs are in the tier `full`.
    """
    quick = {(i % len(first), i % len(second)) for i in range(max(len(first), len(second)))}
    pairs = product(enumerate(first), enumerate(second))
    return [pytest.param(a, b, marks=[] if (i, j) in quick else pytest.mark.full) for (i, a), (j, b) in pairs]
