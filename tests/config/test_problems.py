from __future__ import annotations

from typing import Literal

import pytest
from pydantic import Field, ValidationError

from pipelines.config.base import SettingsModel, describe_errors, describe_unknown_key, refuse_problems
from pipelines.config.load import assign
from pipelines.config.settings import Settings
from pipelines.errors import UsageError


class Inner(SettingsModel):
    size: int = Field(3, ge=1)


class Square(SettingsModel):
    kind: Literal["square"] = "square"
    side: int = 1


class Disc(SettingsModel):
    kind: Literal["disc"] = "disc"
    radius: int = 1


class Outer(SettingsModel):
    inner: Inner = Inner()
    shape: Square | Disc = Field(Square(), discriminator="kind")
    several: tuple[Inner, ...] = ()
    name: str = ""


def lines(document: object) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(document)
    return describe_errors(caught.value, Outer)


def test_a_value_says_what_was_expected_and_what_came() -> None:
    assert lines({"inner": {"size": 0}}) == ["inner.size: input should be greater than or equal to 1, got 0"]
    assert lines({"inner": {"size": "x"}})[0].startswith("inner.size: input should be a valid integer")


def test_an_unknown_key_names_the_nearest_at_its_own_level() -> None:
    assert lines({"inner": {"sise": 1}}) == ["inner.sise: no such key; did you mean 'inner.size'?"]
    assert lines({"several": [{"sise": 1}]}) == ["several.0.sise: no such key; did you mean 'several.0.size'?"]
    assert lines({"nam": ""}) == ["nam: no such key; did you mean 'name'?"]


def test_a_key_that_is_near_to_none_lists_all() -> None:
    assert describe_unknown_key("a.zzz", "zzz", ["one", "two"]) == "a.zzz: no such key; known here: one, two"


def test_a_prefix_stands_before_every_key() -> None:
    with pytest.raises(ValidationError) as caught:
        Inner.model_validate({"sise": 1})
    assert describe_errors(caught.value, Inner, prefix="env") == ["env.sise: no such key; did you mean 'env.size'?"]


def test_refusing_counts_and_no_problem_is_no_error() -> None:
    refuse_problems([], "x.toml")
    with pytest.raises(UsageError, match=r"2 errors in the configuration \(x.toml\)") as caught:
        refuse_problems(["a", "b"], "x.toml")
    assert caught.value.problems == ("a", "b")


def test_the_tag_of_a_union_is_no_part_of_the_key() -> None:
    wrong = {"shape": {"kind": "disc", "radios": 1, "radius": "x"}}
    assert sorted(line.partition(",")[0] for line in lines(wrong)) == [
        "shape.radios: no such key; did you mean 'shape.radius'?",
        "shape.radius: input should be a valid integer",
    ]


def test_a_table_is_expected_where_a_value_came() -> None:
    assert lines({"inner": 3}) == ["inner: input should be a table, got 3"]


@pytest.mark.parametrize(("key", "value"), [("sequence.kind", "lstm"), ("kind", "actor-critc")])
def test_a_complaint_of_our_own_is_shown_as_it_is(key: str, value: str) -> None:
    document: dict[str, object] = {}
    assign(document, ["agent", *key.split(".")], value)
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(document)
    (line,) = describe_errors(caught.value, Settings)
    assert line.startswith(f"agent.{key}: unknown ")
    assert line.endswith("or module:attr" if value == "lstm" else "did you mean 'actor-critic'?")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("agent.entropy_weight", ".1", "input should be a valid number or 'auto', got '.1'"),
        ("agent.entropy_weight", -1, "input should be greater than or equal to 0, got -1.0"),
        ("collect.explore", "true", "input should be a valid boolean or 'auto', got 'true'; write true"),
        ("collect.steps", "few", "input should be a whole number from 1 to 9223372036854775807, or 'auto', got 'few'"),
    ],
)
def test_a_value_that_may_have_several_types_has_one_error(key: str, value: object, expected: str) -> None:
    document: dict[str, object] = {}
    assign(document, key.split("."), value)
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(document)
    assert describe_errors(caught.value, Settings) == [f"{key}: {expected}"]
