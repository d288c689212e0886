from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from amago_cli.app import main
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


FIELDS = ("observation", "action", "horizon", "termination", "split", "about")


def test_the_list_says_which_extras_are_missing(amago: Amago, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.envs.suites.catalogue.find_spec", lambda module: None)
    entries = {entry["name"]: entry for entry in amago("envs", "--output", "json").json["metrics"]["environments"]}
    assert all(entry[field] for entry in entries.values() for field in FIELDS)
    assert (entries["tmaze"]["extra"], entries["tmaze"]["installed"]) == (None, True)
    assert (entries["metaworld-ml45"]["extra"], entries["metaworld-ml45"]["installed"]) == ("metaworld", False)
    lines = {line.split()[0]: line for line in amago("envs").out.splitlines() if line}
    assert "metaworld (missing)" in lines["metaworld-ml45"]
    assert entries["metaworld-ml45"]["about"] in lines["metaworld-ml45"]
    assert max(map(len, lines.values())) < 150


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_list_on_a_terminal_has_observation_and_action(amago: Amago, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with contextlib.redirect_stdout(Terminal()) as shown:
        assert main(["envs"]) == 0
    line = next(line for line in shown.getvalue().splitlines() if line.startswith("dark-room"))
    assert "4 numbers" in line
    assert "5 choices" in line
    assert "a fifth of the goal cells is held out" in line


def test_one_is_described_with_its_end_and_its_split(amago: Amago) -> None:
    metrics = amago("envs", "meta-frozen-lake", "--output", "json").json["metrics"]
    assert "terminated after the last attempt" in metrics["termination"]
    assert metrics["split"] == "20% of the maps are held out"
    shown = amago("envs", "meta-frozen-lake").out
    assert metrics["termination"] in shown
    assert metrics["split"] in shown


@pytest.mark.parametrize(
    ("name", "extra", "where"),
    [
        ("metaworld-ml45", "metaworld", "catalogue"),
        ("gym:LunarLander-v3", "box2d", "gym"),
        ("gym:HalfCheetah-v5", "mujoco", "gym"),
    ],
)
def test_a_missing_extra_is_one_line_that_says_what_to_install(
    amago: Amago, monkeypatch: pytest.MonkeyPatch, name: str, extra: str, where: str
) -> None:
    monkeypatch.setattr(f"pipelines.envs.suites.{where}.find_spec", lambda module: None)
    for command in (("envs", name), ("collect", "--env", name, "--steps", "10")):
        failed = amago(*command)
        assert failed.code == 3
        assert f'pip install "amago[{extra}]"' in failed.err
        assert [line for line in failed.err.splitlines() if "starting" not in line] == [failed.err.splitlines()[-1]]
    assert not Path("runs").exists()
