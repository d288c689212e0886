"""The policies that come with the package: proved, small, and as good as their reports say."""

from __future__ import annotations

import json
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.config import places, policy_files
from pipelines.envs.make import make
from pipelines.evaluation.runner import evaluate
from pipelines.export.verification import verify
from pipelines.rollout.policies import load_trained, trained
from tests.export.node import NodePolicy
from tests.export.zoo import with_onnx
from tests.tiers import some

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["alchemy", "cartpole", "quickstart", "tmaze"]
# Least scores: what a user is promised, in docs/exporting.md.
SCORES = {"alchemy": 110.0, "cartpole": 400.0, "quickstart": 3.5, "tmaze": 0.95}


def report(name: str) -> dict[str, Any]:
    """Return the scores of the proof."""
    return dict(json.loads((places.locate_in_zoo(name) / "parity.json").read_text())["evaluations"])


def test_the_zoo_is_complete_and_packaged() -> None:
    assert places.list_zoo() == NAMES
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = document["tool"]["setuptools"]["package-data"]["pipelines"]
    for name in NAMES:
        files = list(places.locate_in_zoo(name).iterdir())
        assert sum(path.stat().st_size for path in files) < 2_000_000
        relative = [path.relative_to(ROOT / "pipelines").as_posix() for path in files]
        assert all(any(fnmatch(path, pattern) for pattern in patterns) for path in relative)
        assert set(policy_files.read_record(places.locate_in_zoo(name))["files"]) | {"policy.json"} == {
            path.name for path in files
        }


@pytest.mark.system
@pytest.mark.parametrize("name", some(NAMES, 0))
def test_each_policy_verifies(name: str) -> None:
    found = verify(places.locate_in_zoo(name), trust=False)
    assert found.holds
    assert list(found.forms) == ["weights"]
    assert found.forms["weights"].steps == 1_000


@pytest.mark.parametrize("name", NAMES)
def test_its_scores_are_those_of_its_form_and_good(name: str) -> None:
    scores = report(name)
    low, high = scores["original"]["return_ci95"]
    assert low <= scores["onnx"]["return_mean"] <= high
    assert scores["original"]["episodes"] == 500
    assert scores["original"]["return_mean"] >= SCORES[name]


def play(env: Any, act: Any, episodes: int) -> np.ndarray:
    """Return the returns of episodes of a policy `act(observation, previous action, reward, time)`."""

    class Policy:
        def act(self, *given: Any) -> np.ndarray:
            return np.asarray(act(*given), np.int32)

    return evaluate(env, Policy(), episodes=episodes).returns


def environment(name: str, actors: int) -> Any:
    """Return the environment of a policy, with tasks that are not those of the report."""
    own = policy_files.load_record(places.locate_in_zoo(name))["env"]
    return make(own.pop("name"), num_envs=actors, seed=5, split="test", params=own)


def require_near(name: str, returns: np.ndarray) -> None:
    """Require the mean of returns within four standard errors of the reported one."""
    scores = report(name)["original"]
    error = scores["return_std"] * np.sqrt(1 / len(returns) + 1 / scores["episodes"])
    assert abs(returns.mean() - scores["return_mean"]) <= 4 * error + 1e-6


@pytest.mark.parametrize("name", some(NAMES, 2))
def test_fresh_episodes_are_near_the_reported_score(name: str) -> None:
    env = environment(name, 25)
    acting = trained(load_trained(f"zoo:{name}").checkpoint, env, policy_id="", seed=0, greedy=True)
    require_near(name, play(env, acting.policy.act, 50))


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_node_scores_what_the_report_says(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    actors, episodes = 25, 50
    env = environment(name, actors)
    with NodePolicy(with_onnx(name, tmp_path / "bundle"), actors=actors) as policy:

        def act(columns: Any, _: Any, reward: np.ndarray, time: np.ndarray) -> Any:
            policy("reset", time == 0)
            [observation] = columns.values()
            return policy("act", observation, reward)

        require_near(name, play(env, act, episodes))
