from __future__ import annotations

from tests.cli.conftest import Amago


def test_the_list_names_every_built_in(amago: Amago) -> None:
    names = [entry["name"] for entry in amago("envs", "--output", "json").json["metrics"]["environments"]]
    assert {"meta-frozen-lake", "dark-key-door", "tmaze", "gym:ID", "module:attr"} <= set(names)


def test_one_is_described_with_its_parameters(amago: Amago) -> None:
    shown = amago("envs", "tmaze")
    assert shown.code == 0
    assert "env.corridor" in shown.out
    assert "obs" in shown.out
    assert amago("envs", "gym:CartPole-v1", "--output", "json").json["metrics"]["spaces"]["action"]["n"] == 2


def test_an_unknown_one_is_a_usage_error(amago: Amago) -> None:
    failed = amago("envs", "tmazee")
    assert failed.code == 2
    assert "did you mean 'tmaze'" in failed.err
