"""A bundle acts step by step exactly as the trained policy does."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest

from pipelines.envs.make import make
from pipelines.envs.spec import ActionCodec, ObservationCodec
from pipelines.errors import InputMissing, IntegrityError, UsageError
from pipelines.export.assets.policy import OnnxPolicy
from pipelines.export.policy_bundle import DeployedPolicy, find_former_files, load_policy, to_environment, write_bundle
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space, Spaces, zeros
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.agent import Agent
from pipelines.rollout.policies import load_policy as run_policy
from pipelines.stages import collect, export, train
from tests.envs.own import Everything
from tests.envs.spaces import convert_spaces
from tests.learning.factories import agent, settings, values
from tests.stages.recipes import tiny


def bundle(tmp_path: Path, **tables: object) -> Path:
    settings = tiny(**tables)
    collect.run(settings, run=tmp_path / "run")
    train.run(settings, run=tmp_path / "run", lakes=[(tmp_path / "run/lake", 1.0)])
    return export.run(settings, run=tmp_path / "run").outputs[0]


@pytest.mark.system
@pytest.mark.parametrize(
    "env",
    [
        {"name": "tmaze", "corridor": 4},
        {"name": "goal-frozen-lake"},
        {"name": "gym:Pendulum-v1"},
        {"name": "tests.envs.own:Told"},
    ],
)
def test_a_bundle_equals_the_trained_policy_over_whole_episodes(tmp_path: Path, env: dict) -> None:
    deployed = load_policy(bundle(tmp_path, env=env), greedy=True)
    batch = make(env["name"], num_envs=1, seed=9, params={k: v for k, v in env.items() if k != "name"})
    spaces = batch.spec.spaces
    trained = run_policy(f"{tmp_path}/run@6", batch, seed=0, greedy=True).policy
    observation = batch.reset()
    action = np.zeros((1, *spaces.action.shape), dtype=spaces.action.dtype)
    reward, time, episodes = np.zeros(1, dtype=np.float32), np.zeros(1, dtype=np.int64), 0
    for _ in range(30):
        action = trained.act(observation, action, reward, time)
        single = {name.removeprefix("obs."): value[0] for name, value in observation.items()}
        chosen = deployed.act(single.get("obs", single), float(reward[0]))
        np.testing.assert_array_equal(chosen, to_environment(action[0], spaces.action))
        result = batch.step(action)
        observation, reward, time = result.observation, result.reward, time + 1
        if (result.terminated | result.truncated)[0]:
            observation, reward, time, episodes = batch.reset(), np.zeros(1, np.float32), np.zeros(1, np.int64), 1
            action = np.zeros_like(action)
            deployed.reset()
    assert episodes or "Pendulum" in env["name"]


@pytest.mark.system
def test_the_bundles_own_loader_drives_a_gymnasium_environment(tmp_path: Path) -> None:
    path = bundle(tmp_path, env={"name": "gym:CartPole-v1"}) / "policy.py"
    spec = importlib.util.spec_from_file_location("bundle_policy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    policy, env = module.load(), gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=0)
    reward = 0.0
    for _ in range(5):
        action = policy.act(observation, float(reward))
        assert env.action_space.contains(action)
        observation, reward, terminated, _, _ = env.step(action)
        if terminated:
            break


def test_actions_cross_into_the_environments_own_units() -> None:
    assert to_environment(np.int32(2), Discrete(n=4, start=10)) == 12
    space = Box(shape=(2,), low=(-2.0, 0.0), high=(2.0, 10.0))
    np.testing.assert_allclose(to_environment(np.array([1.0, -0.5], np.float32), space), [2.0, 2.5])


TAKEN = {
    "choice": gymnasium.spaces.Discrete(3, start=-1),
    "choices": gymnasium.spaces.MultiDiscrete([3, 2], start=[5, -1]),
    "bits": gymnasium.spaces.MultiBinary(3),
    "whole": gymnasium.spaces.Box(np.array([-2, 0]), np.array([2, 9]), dtype=np.int64),
    "half": gymnasium.spaces.Box(-2, 2, (2,), np.float16),
    "double": gymnasium.spaces.Box(0, 3, (1,), np.float64),
}


@pytest.mark.parametrize("case", TAKEN)
def test_a_bundle_and_an_environment_exchange_the_values_of_their_own_spaces(tmp_path: Path, case: str) -> None:
    env = Everything(TAKEN[case], length=12)
    seen, taken = ObservationCodec(env.observation_space, name="x"), ActionCodec(env.action_space, name="x")
    spaces = convert_spaces(env.observation_space, env.action_space, name="x")
    assert Spaces.from_json(json.loads(json.dumps(spaces.to_json()))) == spaces
    owner = Agent(spaces, settings()).eval()
    record = {"spaces": spaces.to_json(), "agent": owner.settings.model_dump(mode="json"), "context_length": 8}
    write_bundle(owner.state_dict(), record | {"update": 0, "env": {}}, tmp_path, greedy=True)
    deployed = load_policy(tmp_path)
    trained = AgentPolicy(owner, num_actors=1, capacity=8, greedy=True)
    (observation, _), previous, reward = env.reset(seed=0), zeros(spaces.action, (1,)), 0.0
    for time in range(12):
        columns = seen.empty(1)
        seen.write(observation, columns, 0)
        previous = trained.act(columns, previous, np.array([reward], np.float32), np.array([time]))
        chosen = deployed.act(observation, reward)
        assert env.action_space.contains(chosen)
        np.testing.assert_allclose(chosen, taken.decode(previous)[0], rtol=1e-6)  # of a double box: in float32
        observation, reward, *_ = env.step(chosen)


@pytest.mark.parametrize("case", TAKEN)
def test_every_action_leaves_as_the_environment_takes_it(case: str) -> None:
    codec, rng = ActionCodec(TAKEN[case], name="x"), np.random.default_rng(0)
    given = np.concatenate([values(codec.space, (500,), rng), zeros(codec.space, (1,))])
    for action, expected in zip(given, codec.decode(given), strict=True):
        np.testing.assert_allclose(to_environment(action, codec.space), expected, rtol=1e-6)
        assert TAKEN[case].contains(to_environment(action, codec.space))


WRONG = [
    (Box(shape=(4,)), [0.0, np.nan, 0.0, 0.0], "not finite"),
    (Box(shape=(4,)), [0.0, 1.0, 2.0], "shape"),
    (Box(shape=(2, 2, 1), dtype="uint8"), np.full((2, 2, 1), 300), "uint8"),
    (Box(shape=(2, 2, 1), dtype="uint8"), np.full((2, 2, 1), 0.5), "uint8"),
    (Discrete(n=4, start=2), 9, "choice"),
    (Discrete(n=4, start=2), 1, "choice"),
    (Discrete(n=4, start=2), 3.7, "int32"),
    (MultiDiscrete(nvec=(3, 4)), [3, 3], "choice"),
]


@pytest.mark.parametrize(("space", "value", "words"), WRONG)
def test_values_that_are_not_of_their_space_are_refused(space: Space, value: Any, words: str) -> None:
    """Cast, they would choose an action that looks as good as any: by a bundle in Python, and by one through ONNX."""
    spaces = Spaces(observation={"obs": space}, action=Discrete(n=2))
    deployed = DeployedPolicy(Agent(spaces, settings()).eval(), capacity=4, greedy=True, seed=0)
    with pytest.raises(UsageError, match=f"observation 'obs'.*{words}"):
        deployed.act(value)
    record = dict(spaces.to_json()["observation"])["obs"]
    alone: Any = SimpleNamespace(actors=1, single=True)
    with pytest.raises(ValueError, match=f"observation 'obs'.*{words}"):
        OnnxPolicy.convert(alone, value, record, "obs")


@pytest.mark.parametrize(("reward", "words"), [(np.nan, "not finite"), (1e300, "not finite"), ("x", "convert")])
def test_a_reward_that_is_not_a_number_is_refused(reward: Any, words: str) -> None:
    spaces = Spaces(observation={"obs": Box(shape=(2,))}, action=Discrete(n=2))
    deployed = DeployedPolicy(Agent(spaces, settings()).eval(), capacity=4, greedy=True, seed=0)
    deployed.act([0.0, 1.0])
    with pytest.raises(UsageError, match=f"the reward: .*{words}"):
        deployed.act([0.0, 1.0], reward)
    deployed.act([0.0, 1.0], np.float64(0.5))


def test_a_directory_that_is_reached_through_one_that_is_not_there_is_looked_into(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("")
    with pytest.raises(UsageError, match=r"contains no policy bundle, but other files: mine\.txt"):
        find_former_files(tmp_path / "absent" / ".." / "notes")


def test_damage_and_absence_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="no policy bundle"):
        load_policy(tmp_path)
    path = bundle(tmp_path) / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(IntegrityError, match="damaged"):
        load_policy(path.parent)


@pytest.mark.system
@pytest.mark.parametrize("name", ["weights.safetensors", "policy.json", "policy.py"])
def test_any_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    path = bundle(tmp_path) / name
    whole = path.read_bytes()
    for place in range(0, len(whole), max(len(whole) // 40, 1)):
        data = bytearray(whole)
        data[place] ^= 1
        path.write_bytes(data)
        with pytest.raises(IntegrityError, match=name):
            load_policy(path.parent)


@pytest.mark.parametrize("changes", [
    {"kind": "multi-task"},
    {"kind": "behaviour-cloning"},
    {"actor": {"hidden": [8], "distribution": "beta"}},
    {"actor": {"hidden": [8], "distribution": "gaussian-mixture"}},
    {"actor": {"hidden": [8], "distribution": "grid"}},
    {"action_mask": "obs.legal"},
])  # fmt: skip
def test_every_agent_and_distribution_acts_from_its_bundle(tmp_path: Path, changes: dict) -> None:
    action = "box" if "actor" in changes else "discrete"
    observation = {"obs.x": Box(shape=(3,)), "obs.legal": MultiBinary(n=4)}
    owner = agent(action, observation, **changes)
    record = {
        "spaces": owner.spaces.to_json(),
        "agent": owner.settings.model_dump(mode="json"),
        "context_length": 8,
        "update": 0,
        "env": {},
    }
    write_bundle(owner.state_dict(), record, tmp_path, greedy=True)
    deployed = load_policy(tmp_path)
    trained = AgentPolicy(owner.eval(), num_actors=1, capacity=8, greedy=True)
    rng = np.random.default_rng(0)
    previous, done = zeros(owner.spaces.action, (1,)), set()
    for time in range(12):
        seen = {"x": rng.normal(size=3).astype("f4"), "legal": np.array([0, time % 2, 1 - time % 2, 0], np.uint8)}
        columns = {f"obs.{name}": value[None] for name, value in seen.items()}
        previous = trained.act(columns, previous, np.ones(1, np.float32), np.array([time]))
        chosen = deployed.act(seen, 1.0)
        np.testing.assert_array_equal(chosen, to_environment(previous[0], owner.spaces.action))
        if "action_mask" in changes:
            assert seen["legal"][chosen]
            done.add(chosen)
    assert "action_mask" not in changes or done == {1, 2}
