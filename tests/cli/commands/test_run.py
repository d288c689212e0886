from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config.load import read_toml
from tests.cli.conftest import Amago

RECIPE = """
about = "two short rounds"
epochs = 2
[env]
name = "tmaze"
corridor = 3
[agent.timestep]
hidden = [8]
output = 8
[agent.sequence]
kind = "feedforward"
hidden = [8]
output = 8
[agent.actor]
hidden = [8]
[agent.critic]
hidden = [8]
[collect]
steps = 40
actors = 2
[train]
steps = 2
window = 4
batch_size = 2
threads = 1
[evaluate]
episodes = 4
[[stages]]
stage = "collect"
[[stages]]
stage = "train"
[[stages]]
stage = "evaluate"
start_epoch = -1
"""


@pytest.fixture
def recipe(amago: Amago) -> Path:
    path = Path("short.toml")
    path.write_text(RECIPE)
    return path


def test_every_stage_runs_and_the_same_command_skips_what_is_done(amago: Amago, recipe: Path) -> None:
    done = amago("run", recipe, "--output", "json")
    assert done.code == 0, done.err
    assert (done.json["status"], done.json["run"]) == ("done", "runs/short")
    assert amago("run", recipe, "--output", "json").json["status"] == "skipped"


def test_the_written_configuration_runs_again(amago: Amago, recipe: Path) -> None:
    assert amago("run", recipe, "--run", "a").code == 0
    again = amago("run", "a/config.toml", "--run", "b")
    assert again.code == 0, again.err
    assert read_toml(Path("a/config.toml")) == read_toml(Path("b/config.toml"))


def test_a_change_is_refused_unless_fresh(amago: Amago, recipe: Path) -> None:
    assert amago("run", recipe).code == 0
    refused = amago("run", recipe, "--set", "train.batch_size=3")
    assert refused.code == 2
    assert "train.batch_size: 2 -> 3" in refused.err
    assert amago("run", recipe, "--set", "train.batch_size=3", "--fresh").code == 0


def test_a_dry_run_prints_toml_that_runs_and_touches_nothing(amago: Amago, recipe: Path) -> None:
    shown = amago("run", recipe, "--set", "env.corridor=2", "--dry-run")
    assert shown.code == 0, shown.err
    assert shown.out.startswith("# run would write run: runs/short")
    assert not Path("runs").exists()
    Path("resolved.toml").write_text(shown.out)
    assert amago("run", "resolved.toml").code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["tmazz"], 2, "did you mean 'tmaze'"),
        (["nowhere.toml"], 3, "nowhere.toml"),
        (["short.toml", "--set", "stages.0.step=3"], 2, "stages.0.step"),
        (["short.toml", "--set", "stages.9.steps=3"], 2, "stages.9.steps"),
        (["short.toml:env.x"], 2, "no recipe"),
    ],
)
def test_mistakes_are_named_without_a_traceback(
    amago: Amago, recipe: Path, arguments: list[str], code: int, words: str
) -> None:
    failed = amago("run", *arguments)
    assert failed.code == code, failed.err
    assert words in failed.err
    assert "Traceback" not in failed.err
