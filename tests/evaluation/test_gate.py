"""Gates: what passes, what fails and says why, and what cannot be read."""

from __future__ import annotations

import pytest

from pipelines.errors import RequirementNotMet, UsageError
from pipelines.evaluation.gate import check, parse

METRICS = {
    "return_mean": 0.9,
    "return_ci95": [0.8, 0.95],
    "per_attempt": [{"attempt": 1, "success_mean": 0.2}, {"attempt": 2, "success_mean": 0.7}],
    "per_task": {},
}


@pytest.mark.parametrize(
    "requirement",
    [
        "",
        "return_mean >= 0.9",
        "return_mean>=.9 and return_mean <= 9e-1",
        "return_ci95[0] > 0.75 and return_ci95[-1] < 1",
        "per_attempt[-1] > 0.6",
        "per_attempt[-1].success_mean > 0.6",
        "return_mean != 1 and return_mean == 0.9",
    ],
)
def test_met(requirement):
    check(requirement, METRICS)


@pytest.mark.parametrize("requirement", ["return_mean > 0.9", "return_mean >= 0.1 and per_attempt[0] > 0.5"])
def test_not_met(requirement):
    with pytest.raises(RequirementNotMet) as caught:
        check(requirement, METRICS)
    assert caught.value.exit_code == 5


def test_the_failing_clause_and_its_value_are_named():
    with pytest.raises(RequirementNotMet, match=r"return_mean > 0.95 \(it is 0.9\)$"):
        check("return_mean > 0.95 and return_mean > 0", METRICS)


def test_not_a_number_never_passes():
    with pytest.raises(RequirementNotMet):
        check("x != 1", {"x": float("nan")})


@pytest.mark.parametrize(
    "requirement", ["return_mean", "return_mean >= good", ">= 3", "return_mean => 1", "return_mean >= 1 and", "a b > 1"]
)
def test_unreadable(requirement):
    with pytest.raises(UsageError, match="cannot read"):
        parse(requirement)


@pytest.mark.parametrize(
    ("requirement", "words"),
    [
        ("return_meen > 1", "did you mean 'return_mean'"),
        ("return_ci95 > 1", "not a number"),
        ("return_ci95[2] > 1", r"no entry \[2\]"),
        ("return_mean[0] > 1", r"no entry \[0\]"),
        ("per_task > 1", "not a number"),
    ],
)
def test_unknown_metric(requirement, words):
    with pytest.raises(UsageError, match=words):
        check(requirement, METRICS)
