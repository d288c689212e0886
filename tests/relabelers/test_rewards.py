"""Rewards, success labels, returns and task names: against numpy on one trajectory at a time."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

from pipelines.errors import AmagoError, InputMissing, UsageError
from pipelines.lake.trajectory import Trajectory
from pipelines.relabelers.base import Chain, Context
from tests.lake.factories import INFO, SCHEMA, columns
from tests.relabelers.trajectories import applied, derive, uid

CONTEXT = Context(schema=SCHEMA, env="maze")  # obs.state (3,), obs.bits (2,), discrete actions


@pytest.fixture
def found():
    rng = np.random.default_rng(0)
    return [Trajectory(columns(rng, n), INFO, uid(n)) for n in (1, 7, 30, 2)]


@pytest.fixture
def mine(monkeypatch):
    """A module of a user's own functions."""
    module = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


def relabelled(found, *texts):
    chain = Chain(texts, CONTEXT, seed=0)
    derived = derive(chain, found)
    assert derived.place.tolist() == list(range(len(found)))
    return chain, derived, list(applied(derived, found))


@pytest.mark.parametrize(
    ("text", "pay"),
    [
        ('reward:"obs.state"[1] * 2 - 0.5', lambda c: c["obs.state"][:, 0] * 2 - 0.5),
        ("reward:t", lambda c: np.arange(len(c["reward"]))),
        ("reward:action = 2 and reward > 0", lambda c: (c["action"] == 2) & (c["reward"] > 0)),
        (
            "reward:coalesce(action - lag(action) over (partition by trajectory order by t), 0)",
            lambda c: np.diff(c["action"], prepend=c["action"][:1]),
        ),
        ("scale:-0.25", lambda c: c["reward"] * -0.25),
        ("clip:-0.5..0.1", lambda c: np.clip(c["reward"], -0.5, 0.1)),
    ],
)
def test_rewards_are_what_the_formula_says_of_each_trajectory(found, text, pay):
    chain, _, wholes = relabelled(found, text)
    assert chain.changes == ("reward",)
    for each, whole in zip(found, wholes, strict=True):
        expected = np.asarray(pay(each.columns), dtype=np.float32)
        expected[0] = 0
        np.testing.assert_allclose(whole["reward"], expected, rtol=1e-6)
        assert whole["reward"].dtype == np.float32


def test_an_expression_reads_the_columns_it_names():
    assert Chain(['reward:"obs.state"[3] + action'], CONTEXT, seed=0).reads == ("obs.state", "action", "reward")


def test_a_function_is_given_each_trajectory_by_itself(found, mine):
    def pay(columns):
        with pytest.raises(ValueError, match="read-only"):
            columns["reward"][0] = 1
        return np.cumsum(columns["reward"])

    mine.pay = pay
    _, _, wholes = relabelled(found, "reward:mine:pay")
    for each, whole in zip(found, wholes, strict=True):
        np.testing.assert_allclose(whole["reward"][1:], np.cumsum(each.columns["reward"])[1:], rtol=1e-5)


def test_one_after_the_other_in_the_order_given(found):
    _, _, first = relabelled(found, "scale:2", "clip:0..1")
    _, _, second = relabelled(found, "clip:0..1", "scale:2")
    for each, a, b in zip(found, first, second, strict=True):
        np.testing.assert_allclose(a["reward"], np.clip(each.columns["reward"] * 2, 0, 1))
        np.testing.assert_allclose(b["reward"], np.clip(each.columns["reward"], 0, 1) * 2)


def test_success_is_what_holds_in_some_step_after_the_first_row(found, mine):
    _, derived, _ = relabelled(found, "success:action = 4")
    expected = [bool((each.columns["action"][1:] == 4).any()) for each in found]
    assert derived.success.tolist() == expected
    assert len(set(expected)) == 2
    _, derived, _ = relabelled(found, "success:t = 0")
    assert not derived.success.any()
    mine.won = lambda columns: columns["reward"] > 1
    _, derived, _ = relabelled(found, "success:mine:won")
    assert derived.success.tolist() == [bool((each.columns["reward"][1:] > 1).any()) for each in found]


def test_discounted_returns_are_tags(found):
    _, derived, _ = relabelled(found, "scale:3", "return:0.9")
    for each, text in zip(found, derived.tags["return@0.9"], strict=True):
        rewards = each.columns["reward"][1:].astype(float) * 3
        assert float(text) == pytest.approx(sum(r * 0.9**t for t, r in enumerate(rewards)), rel=1e-5)


def test_tasks_are_named(found, mine):
    assert relabelled(found, "task:easy")[1].tasks == ("easy",) * 4
    mine.name = lambda columns: f"{len(columns['reward'])} rows"
    assert relabelled(found, "task:mine:name")[1].tasks == ("2 rows", "8 rows", "31 rows", "3 rows")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("reward:", "no SQL expression"),
        ("reward:obs.nothing", "nothing"),
        ('reward:"obs.state"', "is not a number"),
        ("reward:1 +", "syntax error"),
        ("reward:(select count(*) from trajectories)", "asks for tables"),
        ("reward:1; drop table steps", "syntax error|one expression"),
        ("reward:sum(reward)", "aggregat|GROUP BY"),
        ("success:reward", "is not a predicate"),
        ("scale:two", "not a number"),
        ("scale:nan", "not a number"),
        ("clip:1", "not a number"),
        ("clip:2..1", "range is empty"),
        ("return:1.5", "from 0 to 1"),
        ("task:", "no label"),
        ("reward:math:pi", "not a function"),
    ],
)
def test_wrong_arguments_are_usage_errors_before_anything_is_read(text, words):
    with pytest.raises(UsageError, match=words):
        Chain([text], CONTEXT, seed=0)


def test_a_module_that_is_not_there_is_missing():
    with pytest.raises(InputMissing, match="no module"):
        Chain(["reward:no_such_module_here:f"], CONTEXT, seed=0)


@pytest.mark.parametrize(
    ("text", "result", "words"),
    [
        ("reward:sqrt(reward) * 0 + ln(-1)", None, "SQL|logarithm"),
        ("reward:case when t = 2 then null else 1 end", None, "NULL or NaN in 3 steps, first in row 2 of trajectory"),
        ("reward:case when t = 2 then 'inf'::double else 1 end", None, "infinite in 3 steps"),
        ("reward:mine:f", lambda c: 1 / 0, "ZeroDivisionError: division by zero on trajectory"),
        ("reward:mine:f", lambda c: c["reward"][1:], r"returned float32 \(1,\) for trajectory"),
        ("reward:mine:f", lambda c: None, "returned object"),
        ("reward:mine:f", lambda c: c["reward"] * np.nan, "NULL or NaN in 40 steps, first in row 1"),
        ("success:mine:f", lambda c: "yes", "returned <U3"),
        ("task:mine:f", lambda c: 3, "returned 3, a text expected"),
    ],
)
def test_values_that_are_none_name_the_trajectory(found, mine, text, result, words):
    mine.f = result
    chain = Chain([text], CONTEXT, seed=0)
    with pytest.raises(AmagoError, match=words) as caught:
        derive(chain, found)
    assert caught.value.exit_code in (2, 3)


@pytest.mark.parametrize("spoil", [lambda values: values[1:], lambda values: values * np.nan, lambda values: 1 / 0])
def test_of_several_trajectories_the_wrong_one_is_named(found, mine, spoil):
    mine.f = lambda c: spoil(c["reward"]) if len(c["reward"]) == 31 else c["reward"]
    with pytest.raises(AmagoError, match=f"trajectory {found[2].uid}"):
        derive(Chain(["reward:mine:f"], CONTEXT, seed=0), found)
