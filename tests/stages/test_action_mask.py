"""No illegal action reaches an environment that says what is legal, whoever acts: it would raise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.errors import StageFailed, UsageError
from pipelines.lake.reading import trajectories
from pipelines.lake.store import Lake
from pipelines.stages import collect, train
from pipelines.stages import run as chain
from tests.stages.recipes import tiny
from tests.tiers import some

LEGAL = {"action_mask": "obs.legal"}
NOISY = {"start": 1.0, "end": 1.0, "randomize": False}


def settings(action: str = "discrete", *, agent: dict[str, Any] = LEGAL, **tables: Any) -> Any:
    env = {"name": "tests.envs.restricted:Restricted", "action": action}
    tables["collect"] = {"workers": 0} | tables.get("collect", {})
    return tiny(env=env, agent=agent, exploration=NOISY, **tables)


def recorded(place: Path) -> tuple[np.ndarray, np.ndarray]:
    """What was legal (N, choices) and the Discrete actions that were taken (N,)."""
    found = [t.columns for t in trajectories(Lake(place))]
    legal = np.concatenate([columns["obs.legal"][:-1] for columns in found])
    return legal.astype(bool), np.concatenate([columns["action"][1:] for columns in found])


def assert_legal(place: Path) -> None:
    legal, actions = recorded(place)
    assert len(actions) >= 100
    free = ~legal.any(1)
    assert free.any()
    assert (legal[np.arange(len(actions)), actions] | free).all()
    assert len(set(actions.tolist())) == 5


@pytest.mark.parametrize("action", some(["discrete", "multi_discrete", "multi_binary"], 0))
def test_random_actions_are_legal(tmp_path: Path, action: str) -> None:
    collect.run(settings(action), run=tmp_path / "run")
    if action == "discrete":
        assert_legal(tmp_path / "run")
    with pytest.raises(StageFailed, match="is not legal"):
        collect.run(settings(action, agent={}), run=tmp_path / "other")


@pytest.mark.system
@pytest.mark.parametrize("told", some([LEGAL, {}], 1))
def test_a_trained_policy_explores_legally_even_where_only_its_run_knows_the_column(
    tmp_path: Path, told: dict[str, Any]
) -> None:
    home = tmp_path / "run"
    collect.run(settings(), run=home)
    train.run(settings(), run=home, lakes=[(home / "lake", 1.0)])
    collect.run(settings(agent=told, collect={"policy": str(home)}), run=tmp_path / "second")
    assert_legal(tmp_path / "second")
    collect.run(settings(agent=told, collect={"follow": str(home)}), run=tmp_path / "third")
    assert_legal(tmp_path / "third")


def test_who_follows_a_run_without_a_checkpoint_begins_legally(tmp_path: Path) -> None:
    collect.run(settings(collect={"follow": str(tmp_path / "later")}), run=tmp_path / "run")
    assert_legal(tmp_path / "run")


@pytest.mark.system
def test_a_chain_explores_legally(tmp_path: Path) -> None:
    stages = [{"stage": "collect", "steps": 100}, {"stage": "train", "steps": 2}]
    chain.run(settings(stages=stages, epochs=2), run=tmp_path / "run")
    assert_legal(tmp_path / "run")


def test_a_column_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'obs.mask' is not an observation of shape \(5,\)"):
        collect.run(settings(agent={"action_mask": "obs.mask"}), run=tmp_path / "run")
    assert not (tmp_path / "run/lake").exists()
    assert not (tmp_path / "run/config.toml").exists()
