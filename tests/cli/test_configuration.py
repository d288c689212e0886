from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from amago_cli.configuration import Request
from amago_cli.invocation import Invocation
from amago_cli.options import Common
from pipelines.errors import UsageError


def request(*assignments: str, config: Path | None = None, **named: Any) -> Request:
    common = Common(invocation=Invocation(), assignments=assignments, config=None if config is None else str(config))
    return Request(common, {name.replace("__", "."): value for name, value in named.items()})


def test_options_win_over_the_file_and_the_file_over_the_run(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("[train]\nsteps = 2\ncontext_length = 2\n")
    stored = {"train": {"steps": 1, "context_length": 1, "batch_size": 1}}
    settings = request("train.context_length=3", config=file).settings(stored)
    assert (settings.train.steps, settings.train.context_length, settings.train.batch_size) == (2, 3, 1)


def test_options_not_given_say_nothing() -> None:
    assert request(train__steps=None).settings({"train": {"steps": 9}}).train.steps == 9


def test_the_order_of_an_environment_and_its_parameters_does_not_matter() -> None:
    stored = {"env": {"name": "meta-frozen-lake", "size": 4}}
    for settings in (
        request("env.corridor=3", env__name="tmaze").settings(stored),
        request("env.corridor=3", "env.name=tmaze").settings(stored),
    ):
        assert settings.env.name == "tmaze"
        assert settings.env.params["corridor"] == 3
        assert "size" not in settings.env.params


def test_the_same_key_twice_is_refused_unless_it_says_the_same() -> None:
    assert request("train.steps=5", train__steps=5).settings().train.steps == 5
    with pytest.raises(UsageError) as caught:
        request("train.steps=6", "rubbish", train__steps=5)
    assert caught.value.problems[0] == "train.steps: given twice, as 5 and as 6"
    assert "rubbish" in caught.value.problems[1]


def test_the_environment_s_name_is_known_before_everything_else_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("[env]\nname = 'tmaze'\n[train]\nsteps = 'x'\n")
    assert request(config=file).environment() == "tmaze"
    assert request("env.name=other", config=file).environment() == "other"
    assert request().environment() == ""
