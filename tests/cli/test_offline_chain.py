"""Somebody's HDF5 file becomes a policy by the commands of docs/offline.md, by hand and by the offline recipes.

h5py writes the file with the script of that page, numpy counts what is in it, and gymnasium plays the exported policy.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from pipelines.config.settings import EnvSettings, EvaluateSettings
from pipelines.export.policy_bundle import load_policy
from pipelines.rollout.environment import make_evaluation_env
from tests.cli.conftest import Amago, tiny

h5py = pytest.importorskip("h5py")
gymnasium = pytest.importorskip("gymnasium")

ENV, EPISODES = "gym:Pendulum-v1", 3
PAGE = (Path(__file__).parents[2] / "docs/offline.md").read_text()


@pytest.fixture
def steps(amago: Amago) -> dict[str, np.ndarray]:
    """The arrays of own.hdf5, as h5py reads them: fewer episodes than the page has."""
    [text] = [text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "own.hdf5" in text]
    exec(text.replace("range(20)", "range(4)"), {})
    with h5py.File("own.hdf5") as file:
        return {name: file[name][()] for name in file}


def score_in_gymnasium(bundle: str, seeds: list[int]) -> list[float]:
    """Returns of the policy of a bundle in episodes with these seeds."""
    policy, env, returns = load_policy(bundle), gymnasium.make("Pendulum-v1"), []
    for seed in seeds:
        policy.reset()
        (observation, _), reward, total, over = env.reset(seed=seed), 0.0, 0.0, False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(policy.act(observation, float(reward)))
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return returns


@pytest.mark.system
@pytest.mark.parametrize("way", ["by hand", "d4rl", "offline-to-online"])
def test_a_file_becomes_a_policy(amago: Amago, steps: dict[str, np.ndarray], way: str) -> None:
    if way == "by hand":
        chain = [
            ("collect", "--from", "own.hdf5", "--env", ENV, "--run", "own"),
            ("train", "--from-lake", "own", "--steps", 5),
        ]
    else:
        given = ("source.name=own.hdf5", f"env.name={ENV}", "train.steps=5", "evaluate.episodes=2", *tiny()[1::2])
        sets = [word for assignment in given for word in ("--set", assignment)]
        chain = [("run", way, "--profile", "smoke", "--run", "own", *sets)]
    for words in chain:
        done = amago(*words, "--output", "json", "-q")
        assert done.code == 0, done.err

    if way == "by hand":
        shown = amago("collect", "--run", "own", "--dry-run")
        assert "choices for --steps 800" in shown.out, shown.out
        assert "a recorded step is learned from 16 times" in shown.out
    lake = "own/offline" if way == "offline-to-online" else "own"
    found = amago("lake", "sql", lake, 'select length, "return" as total, env from trajectories', "--output", "json")
    starts = np.flatnonzero(np.r_[True, (steps["terminals"] | steps["timeouts"])[:-1]])
    returns = np.add.reduceat(steps["rewards"].astype(np.float64), starts)
    assert {row["env"] for row in found.json} == {ENV}
    assert sum(row["length"] for row in found.json) == len(steps["rewards"]) == 800
    np.testing.assert_allclose(sorted(row["total"] for row in found.json), sorted(returns), rtol=1e-6)

    scored = amago("evaluate", "own", "--episodes", EPISODES, "--set", "evaluate.seed=5", "--output", "json")
    exported = amago("export", "own", "--to", "policy", "--output", "json")
    assert (scored.code, exported.code) == (0, 0), scored.err + exported.err
    figures = scored.json["metrics"]
    env = make_evaluation_env(EnvSettings(name=ENV), EvaluateSettings(seed=5, split="test"), actors=EPISODES)
    env.reset()
    seeds = [int(seed) for seed in env.seeds(np.arange(EPISODES)) if seed is not None]
    played = score_in_gymnasium("policy", seeds)
    assert figures["return_min"] == pytest.approx(min(played), rel=1e-3)
    assert figures["return_max"] == pytest.approx(max(played), rel=1e-3)
    assert figures["return_mean"] == pytest.approx(np.mean(played), rel=1e-3)
