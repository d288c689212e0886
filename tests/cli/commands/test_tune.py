from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w

from tests.cli.commands.test_sweep import recipe
from tests.cli.conftest import Amago

SPACE = "[train.learning_rate]\nlow = 1e-4\nhigh = 1e-2\nlog = true\n[agent.critic.hidden]\nchoices = [[8], [4, 4]]\n"


@pytest.fixture
def tiny(amago: Amago) -> None:
    recipe()
    Path("space.toml").write_text(SPACE)


@pytest.mark.usefixtures("tiny")
def test_mistakes_are_reported_before_anything_runs(amago: Amago) -> None:
    assert amago("tune", "tiny.toml").code == 2
    assert amago("tune", "tiny.toml", "--space", "nothing.toml").code == 3
    for text in ("[train.learning_rat]\nlow = 1\nhigh = 2", "[train.batch_size]\nlow = -5\nhigh = 2"):
        Path("wrong.toml").write_text(text)
        refused = amago("tune", "tiny.toml", "--space", "wrong.toml")
        assert refused.code == 2, text
        assert "train." in refused.err
    looked = amago("tune", "tiny.toml", "--space", "space.toml", "--dry-run")
    assert looked.code == 0
    assert "train.learning_rate" in looked.out
    assert not Path("runs").exists()


@pytest.mark.usefixtures("tiny")
def test_without_optuna_the_extra_is_named(amago: Amago, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    missing = amago("tune", "tiny.toml", "--space", "space.toml")
    assert missing.code == 3
    assert 'pip install "amago[tune]"' in missing.err


@pytest.mark.full
@pytest.mark.usefixtures("tiny")
def test_real_runs_are_tuned_and_the_best_is_a_recipe(amago: Amago) -> None:
    pytest.importorskip("optuna")
    words = ("tune", "tiny.toml", "--space", "space.toml", "--trials", 2, "--jobs", 2, "--confirm", 1, "--run", "tuned")
    done = amago(*words, "--output", "json")
    assert done.code == 0, done.err
    metrics = done.json["metrics"]
    assert metrics["complete"] == 2
    assert len(metrics["confirmed"]["scores"]) == 1
    best = tomllib.loads(Path("tuned/best.toml").read_text())
    assert best["train"]["learning_rate"] == metrics["best"]["settings"]["train.learning_rate"]
    assert best["agent"]["critic"]["hidden"] in ([8], [4, 4])
    assert amago("run", "tuned/best.toml", "--dry-run").code == 0
    assert amago("compare", "tuned").code == 0
    assert amago(*words, "--output", "json").json["metrics"] == metrics


@pytest.mark.system
def test_a_recipe_without_stages_is_tuned_and_its_best_is_one(amago: Amago) -> None:
    pytest.importorskip("optuna")
    text = 'minutes = 0.02\nenv = { name = "tmaze", corridor = 3 }\ncollect = { workers = 0 }\n'
    Path("mine.toml").write_text(text)
    Path("space.toml").write_text("[train.batch_size]\nchoices = [5]\n")
    words = ("tune", "mine.toml", "--space", "space.toml", "--confirm", 0, "--run", "tuned", "--trials")
    assert amago(*words, 1).code == 0
    best = tomllib.loads(Path("tuned/best.toml").read_text())
    assert best == tomllib.loads(text) | {"train": {"batch_size": 5}}
    shown = amago("run", "tuned/best.toml", "--dry-run", "--output", "json").json
    assert (shown["budget"], shown["settings"]["train"]["batch_size"]) == ({"minutes": 0.02}, 5)
    Path("mine.toml").write_text(text.replace("0.02", "0.06"))
    refused = amago(*words, 2)
    assert (refused.code, "minutes: 0.02 -> 0.06" in refused.err) == (2, True), refused.err


@pytest.mark.system
@pytest.mark.usefixtures("tiny")
def test_trials_of_two_experiments_are_not_ranked_together(amago: Amago) -> None:
    pytest.importorskip("optuna")
    table = tomllib.loads(Path("tiny.toml").read_text())
    two = {"a": table, "b": table | {"env": {"name": "bandit"}}}
    Path("two.toml").write_text(tomli_w.dumps(two))
    words = ("--space", "space.toml", "--trials", 1, "--confirm", 0, "--run", "tuned")
    assert amago("tune", "two.toml:a", *words).code == 0
    best = Path("tuned/best.toml").read_text()
    changes = {
        "env.name: 'tmaze' -> 'bandit'": ("two.toml:b",),
        "train.steps: 6 -> 7": ("two.toml:a", "--set", "train.steps=7"),
        "seed: 0 -> 9": ("two.toml:a", "--set", "seed=9"),
        "agent.sequence.d_model: 8 -> ": ("two.toml:a", "--size", "small"),
    }
    for difference, change in changes.items():
        refused = amago("tune", *change, *words, "--trials", 2)
        assert refused.code == 2, change
        assert difference in refused.err
    assert not Path("tuned/trial-0001").exists()
    assert Path("tuned/best.toml").read_text() == best
