"""Weights of AMAGO as an agent of ours, against what AMAGO itself computed (tests/learning/amago/golden)."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.config import amago_weights
from pipelines.config.model import AgentSettings
from pipelines.errors import InputMissing, UsageError
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space, Spaces
from pipelines.learning import agent_types
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.agent import Agent
from pipelines.learning.amago_inputs import make_checkpoint
from pipelines.learning.checkpoint import load_agent
from pipelines.nets.actor import BetaPolicy
from pipelines.nets.inputs import to_features
from tests.learning.amago.cases import BATCH, CASES, GOLDEN, LENGTH, Case, draw_tokens, draw_weights

SAMPLES = ("critic_samples", "actor_samples")
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


def write(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write the weights and config.txt of a case as AMAGO does; return the file, and the golden outputs."""
    golden = dict(np.load(GOLDEN / f"{name}.npz"))
    shapes = {name: tuple(shape) for name, shape in json.loads(str(golden.pop("shapes"))).items()}
    path = folder / "policy_weights" / "policy_epoch_12.pt"
    path.parent.mkdir(parents=True)
    torch.save({key: torch.from_numpy(value) for key, value in draw_weights(shapes).items()}, path)
    (folder / "config.txt").write_text(str(golden.pop("config")))
    return path, golden


def spaces_of(case: Case) -> Spaces:
    """Name the spaces of a case as ours, in another order than AMAGO's."""
    columns: dict[str, Space] = {name: Box(shape=shape, dtype=dtype) for name, (shape, dtype) in case.arrays.items()}
    columns |= {name: Discrete(n=n) for name, n in case.choices.items()}
    ours = {"obs" if name == "observation" else f"obs.{name}": space for name, space in columns.items()}
    kind, size = case.action
    action: dict[str, Space] = {"discrete": Discrete(n=size), "bits": MultiBinary(n=size), "box": Box(shape=(size,))}
    return Spaces(observation=ours, action=action[kind])


def load(name: str, folder: Path) -> tuple[Agent, dict[str, Any]]:
    path, golden = write(name, folder)
    weights = amago_weights.read(f"amago:{path}")
    return load_agent(make_checkpoint(weights, spaces_of(CASES[name]))), golden


def tokens_of(case: Case) -> dict[str, Any]:
    tokens = draw_tokens(case)
    names = {name: "obs" if name == "observation" else f"obs.{name}" for name in tokens["observation"]}
    return tokens | {"observation": {names[name]: value for name, value in tokens["observation"].items()}}


def policy_of(agent: Agent, params: torch.Tensor) -> dict[str, torch.Tensor]:
    policy: Any = agent.heads.policy
    if isinstance(agent.spaces.action, Box):
        split = policy._split(params)
        if isinstance(policy, BetaPolicy):
            return dict(zip("ab", split.unbind(-2), strict=True))
        *log_weight, mean, log_std = split  # of a mixture, which has weights
        found = {"mean": mean, "std": log_std.exp()}
        return found | ({"weight": log_weight[0].exp()} if log_weight else {})
    return {"probs": policy.probs(params)}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_outputs_equal_those_of_amago(name: str, tmp_path: Path) -> None:
    agent, golden = load(name, tmp_path)
    tokens = tokens_of(CASES[name])
    observation = {key: torch.from_numpy(value) for key, value in tokens["observation"].items()}
    action, reward = torch.from_numpy(tokens["action"]), torch.from_numpy(tokens["reward"])
    time = torch.arange(LENGTH).expand(BATCH, -1)
    states = agent.sequence(agent.timestep(observation, action, reward, time), time)
    torch.testing.assert_close(states, torch.from_numpy(golden["states"]), **CLOSE)
    for key, value in policy_of(agent, agent.heads.actor(states)).items():
        torch.testing.assert_close(value, torch.from_numpy(golden[f"policy_{key}"]), **CLOSE)
    values = values_of(agent, states.flatten(0, 1), action.flatten(0, 1)).unflatten(1, (BATCH, LENGTH))
    torch.testing.assert_close(values.permute(1, 2, 0, 3), torch.from_numpy(golden["values"]), **CLOSE)


def values_of(agent: Agent, h_ND: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Compute values (C, N, G) in units of scaled rewards, of actions as they are, without label smoothing."""
    heads, popart = agent._critics()
    if hasattr(heads.critic, "states"):
        features = to_features(action, agent.spaces.action)
        # AMAGO's critics receive numbers within +-.999.
        features = features.clamp(-0.999, 0.999)[:, None, None].expand(-1, len(agent.gammas), 1, -1)
        values = heads.critic(heads.critic.states(h_ND), features)[..., 0]
    else:
        table = heads.critic(h_ND)
        values = table.gather(-1, action.long()[:, None, None].expand(*table.shape[:3], 1))[..., 0]
    return popart.denormalize(values) if heads.normalized else values


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_steps_of_acting_equal_those_of_amago(name: str, tmp_path: Path) -> None:
    agent, golden = load(name, tmp_path)
    tokens, policy = tokens_of(CASES[name]), AgentPolicy(agent, num_actors=BATCH, capacity=LENGTH)
    for t in range(LENGTH):
        observation = {key: value[:, t] for key, value in tokens["observation"].items()}
        params, _ = policy.parameters(observation, tokens["action"][:, t], tokens["reward"][:, t], np.full(BATCH, t))
        for key, value in policy_of(agent, params).items():
            torch.testing.assert_close(value, torch.from_numpy(golden[f"acting_{key}"][:, t]), **CLOSE)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "not a state dict"),
        (b"PK\x03\x04 cut", "not a state dict"),
        ({"a": object}, "not a state dict"),
        ([torch.zeros(2)], "not a state dict"),
        ({}, "not a state dict"),
        ({"epoch": 3}, "not a state dict"),
        ({"a": torch.zeros(1).expand(1 << 40)}, "larger than the file"),
        ({"a": torch.tensor([float("nan")])}, "not finite"),
        ({"layers.0.weight": torch.zeros(3, 3)}, "lacks 'tstep_encoder.base.in_layer.weight'"),
    ],
)
def test_a_file_that_is_no_state_dict_of_amago_is_one_line(content: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(InputMissing, match=text) as raised:
        amago_weights.read(f"amago:{path}")
    assert "\n" not in str(raised.value)


def test_code_in_a_file_is_not_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"a": Evil()}, tmp_path / "policy.pt")
    with pytest.raises(InputMissing, match="not a state dict"):
        amago_weights.read(f"amago:{tmp_path / 'policy.pt'}")
    assert not (tmp_path / "ran").exists()


def test_a_truncated_or_compressed_file_is_refused(tmp_path: Path) -> None:
    path, _ = write("gru", tmp_path)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(InputMissing, match="not a state dict"):
            amago_weights.read(f"amago:{path}")
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    with pytest.raises(InputMissing, match="not a state dict"):
        amago_weights.read(f"amago:{path}")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("tstep_encoder.base.in_norm.norm.weight", "'tstep_encoder.base.in_norm.norm.weight', which the networks"),
        ("-tstep_encoder.out_norm.norm.weight", "lacks 'tstep_encoder.out_norm.norm.weight'"),
        ("-traj_encoder.rnn.bias_hh_l1", "lacks 'traj_encoder.rnn.bias_hh_l1'"),
        ("+actor.base.in_layer.weight", "'actor.base.in_layer.weight' has the shape"),
        ("actor.residual_blocks.0.0.weight", "lacks 'actor.inp.in_layer.weight'"),
        ("NCritics.activation = 'relu'", "NCritics.activation"),
        ("FFTstepEncoder.activation = 'adaptive'", "adaptive"),
        ("InputNorm.beta = 7.5", r"agent\.timestep\.normalize_rate would be 7\.5"),
    ],
)
def test_another_network_of_amago_is_named(change: str, text: str, tmp_path: Path) -> None:
    path, _ = write("gru", tmp_path)
    state = torch.load(path, weights_only=True)
    if " = " in change:
        config = tmp_path / "config.txt"
        name = change.partition(" = ")[0]
        kept = [line for line in config.read_text().splitlines() if not line.startswith(name)]
        config.write_text("\n".join([*kept, change]))
    elif change.startswith("-"):
        del state[change[1:]]
    elif change.startswith("+"):
        state[change[1:]] = torch.zeros(3, 7)
    else:
        state[change] = torch.zeros(3)
    torch.save(state, path)
    with pytest.raises(InputMissing, match=text):
        amago_weights.read(f"amago:{path}")


def test_settings_without_config_are_the_defaults_of_amago(tmp_path: Path) -> None:
    path, _ = write("gru-multitask", tmp_path)
    told = amago_weights.read(f"amago:{path}").agent
    (tmp_path / "config.txt").unlink()
    guessed = amago_weights.read(f"amago:{path}").agent
    assert agent_types.resolve(AgentSettings(**guessed)) == agent_types.resolve(AgentSettings(**told))
    assert {key for key in told if told[key] != guessed[key]} <= {"actor_weight", "bc_weight", *SAMPLES}
    assert (told["kind"], told["critic"]["bins"], told["acting_gamma"]) == ("multi-task", 16, 0.999)


def test_discounts_that_nothing_tells_are_asked_for(tmp_path: Path) -> None:
    path, _ = write("transformer-multitask-box", tmp_path)
    agent = amago_weights.read(f"amago:{path}").agent
    assert (agent["gammas"], agent["critic"]["low"], agent["critic"]["symlog"]) == ([0.5, 0.9], -50, False)
    (tmp_path / "config.txt").unlink()
    with pytest.raises(InputMissing, match=r"3 discounts.*config\.txt"):
        amago_weights.read(f"amago:{path}")


def test_gin_is_parsed_as_text() -> None:
    text = """
# Parameters for Agent:
# =====================
Agent.gamma = 0.9
amago.nets.actor_critic.Actor.continuous_dist_type = @policy_dists.Beta
scope/Agent.tau = 0.5
Multigammas.discrete = \\
    [0.1,
     0.2]
import os
Evil.value = __import__('os').system('true')
Deep.value = """
    found = amago_weights.parse_gin(text + "[" * 500)
    assert found["Agent.gamma"] == 0.9
    assert found["Actor.continuous_dist_type"] == "@policy_dists.Beta"
    assert found["Agent.tau"] == 0.5
    assert found["Multigammas.discrete"] == [0.1, 0.2]
    assert found["Evil.value"] == "__import__('os').system('true')"
    assert found["Deep.value"] == "[" * 500


def test_windows_of_attention_count_the_query(tmp_path: Path) -> None:
    path, _ = write("transformer", tmp_path)
    config = tmp_path / "config.txt"
    kept = [line for line in config.read_text().splitlines() if "attention_type" not in line]
    chosen = ["TformerTrajEncoder.attention_type = @SlidingWindowFlexAttention"]
    config.write_text("\n".join([*kept, *chosen, "SlidingWindowFlexAttention.window_size = 4"]))
    assert amago_weights.read(f"amago:{path}").agent["sequence"]["window"] == 5


def test_other_spaces_are_refused(tmp_path: Path) -> None:
    path, _ = write("gru", tmp_path)
    weights = amago_weights.read(f"amago:{path}")
    for observation, action in (((6,), Discrete(n=3)), ((5,), Discrete(n=4)), ((5,), Box(shape=(3,)))):
        spaces = Spaces(observation={"obs": Box(shape=observation)}, action=action)
        with pytest.raises(InputMissing, match="other spaces"):
            load_agent(make_checkpoint(weights, spaces))
    with pytest.raises(UsageError, match="no MultiDiscrete actions"):
        make_checkpoint(weights, Spaces(observation={"obs": Box(shape=(5,))}, action=MultiDiscrete(nvec=(3, 3))))


def test_columns_that_amago_did_not_observe_are_hidden(tmp_path: Path) -> None:
    path, _ = write("grid-transformer", tmp_path)
    weights = amago_weights.read(f"amago:{path}")
    view: Space = Box(shape=(5, 6, 2), dtype="uint8")
    spaces = Spaces(observation={"obs.more": Box(shape=(2,)), "obs.view": view}, action=Discrete(n=3))
    assert load_agent(make_checkpoint(weights, spaces)).settings.timestep.columns == {"obs.more": "hidden"}
    with pytest.raises(UsageError, match=r'agent\.timestep\.columns=\{"obs\.more"="hidden"\}'):
        make_checkpoint(weights, spaces, AgentSettings.model_validate(weights.agent))
