"""`policy.mjs` in Node acts as `policy.py` does, and as the policy that was exported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.export import forms, parity
from pipelines.export.assets.policy import OnnxPolicy
from pipelines.export.step_function import StepFunction
from pipelines.files.checksums import seal
from pipelines.lake.spaces import Discrete, Spaces
from pipelines.learning.agent import Agent
from pipelines.learning.bundle import FORMAT, VERSION
from tests.envs.own import Everything, Told
from tests.envs.spaces import convert_spaces
from tests.export.node import NodePolicy
from tests.export.test_policy_bundle import TAKEN
from tests.export.test_step_function import CAPACITY, N, made, recording
from tests.learning.factories import settings

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.full


def bundle(owner: Agent, folder: Path) -> Path:
    """Write what acting through ONNX needs of an agent."""
    function = StepFunction(owner, capacity=CAPACITY)
    files = forms.make_files(function, (forms.ONNX,))
    record = {
        "greedy": True,
        "format": FORMAT,
        "version": VERSION,
        "note": 'ä\x7f\U0001f600 "q"',
        "small": [1e-5, 1.0, 1e22],
    }
    files["policy.json"] = seal(record | {"spaces": owner.spaces.to_json(), **forms.describe_step(function)}, files)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def gru(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle, made once."""
    return bundle(made("gru"), tmp_path_factory.mktemp("gru"))


@pytest.mark.parametrize("name", ["transformer", "gru", "mixed", "tokens", "legal", "box", "multi_discrete", "learned"])
def test_recorded_steps_are_answered_as_the_agent_did(tmp_path: Path, name: str) -> None:
    owner = made(name)
    columns = list(owner.spaces.observation)
    with NodePolicy(bundle(owner, tmp_path), actors=N) as policy:

        def step(given: parity.Arrays, *rest: np.ndarray) -> Mapping[str, np.ndarray]:
            flat = {column: np.ravel(given[column]) for column in columns}
            found = policy("step", flat, *(np.ravel(value) for value in rest))
            return {key: np.reshape(value, (N, -1)) for key, value in found.items()}

        recorded = recording(owner)
        wide = {key: recorded[key].reshape(*recorded[key].shape[:2], -1) for key in ("greedy", "sampled")}
        agreement = parity.compare(recorded | wide, step)
    assert agreement.greatest_difference <= parity.TOLERANCE
    assert (agreement.equal_greedy, agreement.equal_sampled) == (1.0, 1.0)


def played(env: Any, policy: Any) -> list[Any]:
    """Return the actions of an episode, as they leave for the environment."""
    (observation, _), reward, done, actions = env.reset(seed=1), 0.0, False, []
    while not done:
        actions.append(policy(observation, reward))
        assert env.action_space.contains(np.asarray(actions[-1], env.action_space.dtype)), actions[-1]
        observation, reward, done, *_ = env.step(actions[-1])
    return actions


@pytest.mark.parametrize("case", [*TAKEN, "words"])
def test_values_of_every_space_are_exchanged_as_in_python(tmp_path: Path, case: str) -> None:
    env = Told() if case == "words" else Everything(TAKEN[case], length=12)
    spaces = convert_spaces(env.observation_space, env.action_space, name="x")
    path = bundle(Agent(spaces, settings()).eval(), tmp_path)
    expected = played(env, OnnxPolicy(path).act)
    with NodePolicy(path) as policy:
        found = played(env, lambda observation, reward: policy("act", observation, reward))
    np.testing.assert_allclose(np.array(found, float), np.array(expected, float), rtol=1e-5, atol=1e-5)


def test_actors_begin_on_their_own(gru: Path) -> None:
    here, rng = OnnxPolicy(gru, actors=3), np.random.default_rng(0)
    [column] = here.columns.values()
    with NodePolicy(gru, actors=3) as policy:
        for step in range(20):
            begins = rng.random(3) < 0.3
            observation = rng.normal(size=(3, *column["shape"])).astype(np.float32)
            if step:
                here.reset(begins)
                policy("reset", begins)
            reward = rng.normal(size=3).astype(np.float32)
            assert policy("act", observation, reward) == here.act(observation, reward).tolist()


def test_sampled_actions_follow_the_seed_and_the_probabilities(gru: Path) -> None:
    actors, path = 4000, gru
    [column] = OnnxPolicy(path).columns.values()
    observation = np.ones((actors, *column["shape"]), np.float32)
    drawn = {}
    for seed in (1, 2):
        with NodePolicy(path, actors=actors, greedy=False, seed=seed) as policy:
            drawn[seed] = policy("act", observation)
            policy("reset", None)
            other = policy("act", observation)
        assert other != drawn[seed]
    with NodePolicy(path, actors=actors, greedy=False, seed=1) as policy:
        assert policy("act", observation) == drawn[1]
    here = OnnxPolicy(path, actors=actors, greedy=False, seed=0)
    [a, b] = (np.bincount(actions, minlength=4) / actors for actions in (drawn[1], here.act(observation)))
    assert 0.02 < a.max() < 0.98
    np.testing.assert_allclose(a, b, atol=0.05)


def test_one_altered_bit_is_refused(gru: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(gru, tmp_path / "altered"))
    for name in ("policy.json", "policy.onnx"):
        whole = (path / name).read_bytes()
        for place in range(1, len(whole), len(whole) // 6):
            data = bytearray(whole)
            data[place] ^= 1
            (path / name).write_bytes(data)
            with pytest.raises(RuntimeError, match=r"as it was written|JSON"):
                NodePolicy(path)
        (path / name).write_bytes(whole)


@pytest.mark.parametrize(
    ("observation", "words"),
    [([0.0], "numbers, not"), ({}, "not finite"), (None, "not finite"), ([None, 1, 0, 0], "not finite")],
)
def test_a_wrong_observation_is_named(gru: Path, observation: Any, words: str) -> None:
    with NodePolicy(gru) as policy, pytest.raises(RuntimeError, match=words):
        policy("act", observation)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [(999, "not exist"), (-1, "not exist"), (0.5, "not int32"), ("1", "not finite"), (4e9, "not int32")],
)
def test_a_choice_that_cannot_be_is_refused_as_in_python(tmp_path: Path, wrong: Any, words: str) -> None:
    spaces = Spaces(observation={"obs": Discrete(n=5, start=1)}, action=Discrete(n=2))
    path = bundle(Agent(spaces, settings()).eval(), tmp_path)
    with pytest.raises((ValueError, TypeError)):
        OnnxPolicy(path).act(wrong)
    with NodePolicy(path) as policy, pytest.raises(RuntimeError, match=words):
        policy("act", wrong)


def test_an_absent_column_is_named(tmp_path: Path) -> None:
    with NodePolicy(bundle(made("legal"), tmp_path)) as policy, pytest.raises(RuntimeError, match="lacks"):
        policy("act", {})


def test_an_episode_longer_than_the_positions_is_refused(tmp_path: Path) -> None:
    path = bundle(made("learned"), tmp_path)
    most = json.loads((path / "policy.json").read_text())["max_time"]
    [column] = OnnxPolicy(path).columns.values()
    with NodePolicy(path) as policy:
        for _ in range(most):
            policy("act", np.zeros(column["shape"]))
        with pytest.raises(RuntimeError, match=f"more than the {most} steps"):
            policy("act", np.zeros(column["shape"]))
