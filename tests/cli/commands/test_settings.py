from __future__ import annotations

import json
from pathlib import Path

import pytest

import amago_cli
from amago_cli.app import command as whole
from pipelines.config import reference
from tests.cli.conftest import Amago

ROOT = Path(amago_cli.__file__).parent.parent


def test_all_settings_are_listed_with_their_defaults(amago: Amago) -> None:
    listed = amago("settings", "--output", "json").json["metrics"]["settings"]
    assert len(listed) > 150
    assert {"key": "train.steps", "default": "1000"}.items() <= next(
        row for row in listed if row["key"] == "train.steps"
    ).items()


def test_one_setting_is_described(amago: Amago) -> None:
    shown = amago("settings", "train.steps")
    assert (shown.code, shown.out.splitlines()[0]) == (0, "train.steps = 1000")
    assert "Gradient updates" in shown.out


def test_an_unknown_setting_is_refused_with_the_nearest(amago: Amago) -> None:
    failed = amago("settings", "train.stpes")
    assert (failed.code, failed.out) == (2, "")
    assert "did you mean 'train.steps'?" in failed.err


def test_the_schema_is_one_json_document(amago: Amago) -> None:
    assert json.loads(amago("settings", "--schema").out) == reference.make_schema()


def test_the_page_of_settings_is_current(amago: Amago) -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    assert amago("settings", "--markdown").out == page, "amago settings --markdown > docs/settings.md"


@pytest.mark.parametrize("name", ["collect", "relabel", "train", "evaluate", "export", "run"])
def test_help_shows_the_default_of_every_option_that_gives_a_setting(name: str, amago: Amago) -> None:
    command = whole().commands[name]
    shown = " ".join(amago(name, "--help").out.split())
    assert command.callback.settings
    for key in command.callback.settings.values():
        value = reference.find_default(key)
        assert f"[{key}]" in shown or f"[{key}, default: {str(value).lower()}]" in shown.replace("False", "false")


def test_an_option_gives_the_setting_that_its_help_names(small: Path, amago: Amago) -> None:
    given = ("--episodes", 7, "--checkpoint", "best", "--sample", "--seed", 11, "--tasks", "success")
    previewed = amago("evaluate", "small", *given, "--dry-run", "--output", "json").json["settings"]["evaluate"]
    assert {key: previewed[key] for key in ("episodes", "checkpoint", "greedy", "seed", "tasks")} == {
        "episodes": 7,
        "checkpoint": "best",
        "greedy": False,
        "seed": 11,
        "tasks": "success",
    }
