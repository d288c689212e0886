"""Training with V-trace on lakes that have the log-probabilities of actions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelines.config.settings import Settings
from pipelines.errors import InputMissing
from pipelines.stages import collect, train


def settings(steps: int = 4, *, logp: bool = True) -> Settings:
    wanted: dict[str, Any] = {"steps": 200, "actors": 2, "logp": logp}
    learning = {"steps": steps, "context_length": 8, "batch_size": 4, "threads": 1}
    agent = {"trace": "vtrace", "sequence": {"kind": "gru"}, "gammas": [0.9]}
    return Settings.model_validate({"env": {"name": "bandit"}, "collect": wanted, "train": learning, "agent": agent})


@pytest.mark.system
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    collect.run(settings(), lake=tmp_path / "lake")
    lakes = [(tmp_path / "lake", 1.0)]
    train.run(settings(4), run=tmp_path / "whole", lakes=lakes)
    for steps in (2, 4):
        train.run(settings(steps), run=tmp_path / "parts", lakes=lakes)
    whole, parts = (
        (tmp_path / name / "checkpoints" / "000004" / "weights.safetensors").read_bytes() for name in ("whole", "parts")
    )
    assert whole == parts


def test_lakes_with_and_without_logp_are_not_mixed(tmp_path: Path) -> None:
    for logp in (True, False):
        collect.run(settings(logp=logp), lake=tmp_path / f"{logp}")
    with pytest.raises(InputMissing, match="cannot be mixed: only one of them has logp"):
        train.run(settings(), run=tmp_path / "run", lakes=[(tmp_path / "True", 1.0), (tmp_path / "False", 1.0)])
    assert not (tmp_path / "run" / "config.toml").exists()
