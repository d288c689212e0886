"""`--size`, and the size chosen where no network setting is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Amago

RECIPE = """
report = false
epochs = 1
[env]
name = "tmaze"
corridor = 3
[collect]
steps = 40
actors = 2
workers = 0
[train]
steps = 1
context_length = 4
batch_size = 2
[[stages]]
stage = "collect"
[[stages]]
stage = "train"
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def settings(amago: Amago, *words: object) -> dict[str, Any]:
    shown = amago(*words, "--dry-run", "--output", "json")
    assert shown.code == 0, shown.err
    return shown.json["settings"]


def network(amago: Amago, *words: object) -> tuple[str, int, float]:
    """The size that is recorded, the width of the encoder, the learning rate."""
    found = settings(amago, *words)
    return found["size"], found["agent"]["sequence"]["d_model"], found["train"]["learning_rate"]


@pytest.fixture
def lake(amago: Amago) -> str:
    """A lake without a run: nothing was chosen for it."""
    collected = amago("collect", "--env", "tmaze", "--lake", "x", "--steps", 40, "--actors", 2, "--workers", 0)
    assert collected.code == 0, collected.err
    return "x"


@pytest.mark.system
@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_default_network_is_tiny_and_the_run_keeps_it(amago: Amago, lake: str) -> None:
    assert network(amago, "train", "--from-lake", lake) == ("tiny", 64, 1e-3)
    first = amago("train", "--from-lake", lake, "--steps", 1, "--set", "train.learning_rate=2e-3")
    assert first.code == 0, first.err
    assert "train: no GPU found: using a tiny network; --size small" in first.err
    again = amago("train", "--from-lake", lake, "--steps", 2)
    assert again.code == 0, again.err
    assert "tiny network" not in again.err
    assert network(amago, "train", "--from-lake", lake) == ("tiny", 64, 2e-3)


@pytest.mark.usefixtures("gpu")
def test_with_a_gpu_the_default_network_is_base(amago: Amago, lake: str) -> None:
    assert network(amago, "train", "--from-lake", lake) == ("", 256, 1e-4)
    assert network(amago, "train", "--from-lake", lake, "--set", "train.device=cpu") == ("tiny", 64, 1e-3)


@pytest.mark.usefixtures("no_gpu")
def test_network_settings_of_the_user_are_kept(amago: Amago, lake: str) -> None:
    wide = ("--set", "agent.timestep.output=40")
    assert network(amago, "train", "--from-lake", lake, *wide) == ("", 256, 1e-4)
    assert network(amago, "train", "--from-lake", lake, "--size", "base") == ("base", 256, 1e-4)
    assert network(amago, "train", "--from-lake", lake, "-c", "quickstart")[:2] == ("", 64)
    assert network(amago, "train", "--from-lake", lake, "-c", "mazerunner")[:2] == ("base", 256)
    Path("mine.toml").write_text('size = "small"')
    assert network(amago, "train", "--from-lake", lake, "-c", "mine.toml") == ("small", 128, 5e-4)


@pytest.mark.usefixtures("no_gpu")
def test_a_run_that_collected_by_a_recipe_has_the_network_of_the_recipe(amago: Amago) -> None:
    more = ("--set", "collect.actors=2", "--set", "collect.workers=0", "--steps", 40)
    assert amago("collect", "-c", "tmaze", "--run", "x", *more).code == 0
    found = settings(amago, "train", "--from-lake", "x")
    assert (found["agent"]["sequence"]["d_model"], found["train"]["batch_size"]) == (64, 24)
    assert found["size"] == ""


@pytest.mark.system
@pytest.mark.usefixtures("no_gpu")
def test_a_recipe_without_a_network_is_tiny_also_when_it_is_run_again(
    amago: Amago, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mine.toml").write_text(RECIPE)
    done = amago("run", "mine.toml")
    assert done.code == 0, done.err
    assert "tiny network" in done.err
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # it goes on elsewhere
    again = amago("run", "mine.toml", "--output", "json")
    assert again.json["status"] == "skipped", again.err
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert amago("run", "mine.toml", "--set", "epochs=2").code == 0
    refused = amago("run", "mine.toml", "--size", "small")
    assert refused.code == 2
    assert "agent.sequence.d_model: 64 -> 128" in refused.err


def test_an_option_overrides_a_recipe_s_network(amago: Amago) -> None:
    assert network(amago, "run", "quickstart", "--size", "large")[:2] == ("large", 512)
    assert amago("run", "quickstart", "--size", "huge").code == 2
