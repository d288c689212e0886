"""`amago collect`, `train` and `evaluate` by hand, without a recipe: the settings are those that a run would choose."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines import collect
from pipelines.config.load import read_toml
from tests.cli.conftest import Amago
from tests.tiers import some

SMALL = ("--set", "collect.workers=0")


@pytest.fixture
def own(amago: Amago, monkeypatch: pytest.MonkeyPatch) -> Amago:
    """A module of the current directory, with an environment that no recipe names."""
    Path("sorter.py").write_text((Path(__file__).parents[1] / "sorter.py").read_text())
    monkeypatch.delitem(sys.modules, "sorter", raising=False)
    return amago


def stored(run: str = "a") -> dict[str, Any]:
    return read_toml(Path(run) / "config.toml")


def learned(document: dict[str, Any]) -> dict[str, Any]:
    """The settings that decide what is learned, without the amounts of a stage or of an epoch."""
    tables = {name: dict(document[name]) for name in ("agent", "train", "evaluate", "exploration")}
    for table, key in (("train", "steps"), ("train", "decay_steps"), ("exploration", "steps")):
        del tables[table][key]
    return tables | {"size": document["size"]}


@pytest.mark.system
@pytest.mark.parametrize("name", some(["sorter:Sorter", "gym:CartPole-v1", "gym:Pendulum-v1"], 0))
def test_stages_by_hand_learn_with_the_settings_that_a_run_would_choose(own: Amago, name: str) -> None:
    planned = own("run", "--env", name, "--steps", 600, *SMALL, "--dry-run", "--output", "json").json["settings"]
    done = own("collect", "--env", name, "--steps", 600, *SMALL, "--run", "a", "--output", "json")
    assert done.code == 0, done.err
    assert learned(stored()) == learned(planned)
    entries = [entry for entry in planned["stages"] if entry["stage"] == "train"]
    first = entries[0].get("steps", planned["train"]["steps"])
    updates = first + (planned["epochs"] - 1) * planned["train"]["steps"]
    assert stored()["train"]["steps"] == updates
    assert stored()["train"]["decay_steps"] == 0
    trained = own("train", "--from-lake", "a", "--output", "json")
    assert (trained.code, trained.json["metrics"]["updates"]) == (0, updates)
    score = own("evaluate", "a", "--output", "json")
    assert score.json["metrics"]["episodes"] == planned["evaluate"]["episodes"]
    assert stored()["agent"] == planned["agent"]


def test_repeating_collect_measures_nothing_and_keeps_the_settings(amago: Amago) -> None:
    words = ("collect", "--env", "tmaze", *SMALL, "--run", "a")
    first = amago(*words, "--steps", 300)
    assert "measure: random play: return" in first.err
    assert "amago collect --run a --dry-run" in first.err
    chosen, record = stored(), json.loads(Path("a/run.json").read_text())["recipe"]
    assert record["plan"]["budget"] == {"steps": 300}
    again = amago(*words, "--steps", 500)
    assert "measure" not in again.err
    changed = stored()
    assert changed["collect"].pop("steps") == 500
    chosen["collect"].pop("steps")
    assert changed == chosen
    assert json.loads(Path("a/run.json").read_text())["recipe"] == record
    refused = amago(*words, "--set", "env.corridor=3")
    assert (refused.code, "env.corridor: 10 -> 3" in refused.err) == (2, True)


def test_given_settings_win_and_others_follow_from_them(amago: Amago) -> None:
    Path("mine.toml").write_text("[agent]\nacting_gamma = 0.9\n")
    given = ("--set", "train.context_length=4", "--set", "agent.kind=multi-task", "--set", "train.steps=7")
    done = amago("collect", "-c", "mine.toml", "--env", "tmaze", "--steps", 200, *SMALL, *given, "--run", "a")
    assert done.code == 0, done.err
    config = stored()
    assert config["train"]["context_length"] == 4
    assert config["train"]["batch_size"] == 512 // 4
    assert (config["agent"]["kind"], config["agent"]["acting_gamma"], config["train"]["steps"]) == (
        "multi-task",
        0.9,
        7,
    )
    assert json.loads(Path("a/run.json").read_text())["recipe"]["given"]["train.steps"] == 7


def test_a_dry_run_shows_the_table_before_and_after(amago: Amago) -> None:
    before = amago("collect", "--env", "tmaze", "--steps", 200, *SMALL, "--dry-run")
    assert not Path("runs").exists()
    amago("collect", "--env", "tmaze", "--steps", 200, *SMALL)
    after = amago("collect", "--run", "runs/tmaze", "--dry-run")
    rows = [[line for line in shown.out.splitlines() if line.startswith("# agent.gammas")] for shown in (before, after)]
    assert rows[0] == rows[1] != []
    assert "measure" not in after.err


@pytest.mark.parametrize(
    "words",
    [
        ("-c", "meta-frozen-lake", "--run", "a"),
        ("--env", "tmaze", "--policy", "expert", "--run", "a"),
        ("--env", "tmaze", "--follow", "elsewhere", "--run", "a"),
        ("--env", "tmaze", "--lake", "a"),
    ],
)
def test_nothing_is_chosen_for_recipes_other_policies_and_lakes_alone(amago: Amago, words: tuple[str, ...]) -> None:
    done = amago("collect", *words, "--steps", 40, "--actors", 2, *SMALL)
    assert done.code == 0, done.err
    assert "measure" not in done.err


@pytest.mark.system
def test_fresh_chooses_again_for_another_environment_only(amago: Amago) -> None:
    collect = ("collect", "--steps", 100, *SMALL, "--run", "a")
    amago(*collect, "--env", "tmaze", "--set", "agent.acting_gamma=0.5")
    amago(*collect, "--env", "tmaze", "--fresh")
    assert stored()["agent"]["acting_gamma"] == 0.5
    amago(*collect, "--env", "bandit", "--fresh")
    assert stored()["agent"]["acting_gamma"] != 0.5
    assert json.loads(Path("a/run.json").read_text())["recipe"]["plan"]["measured"]["name"] == "bandit"
    trained = amago("train", "--from-lake", "a", "--steps", 1)
    assert trained.code == 0, trained.err


def test_the_call_chooses_as_the_command(amago: Amago) -> None:
    assert amago("collect", "--env", "tmaze", "--steps", 100, *SMALL, "--run", "a").code == 0
    collect("tmaze", run="b", steps=100, settings={"collect.workers": 0})
    assert stored("a") == stored("b")
