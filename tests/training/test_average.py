"""The running mean of the weights: by hand, through checkpoints, and in the units of the values it stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.data.batch import Batch
from pipelines.lake.spaces import Box, Discrete, Space, Spaces
from pipelines.learning import checkpoint as checkpoints
from pipelines.learning.agent import Agent
from pipelines.learning.batch import TensorBatch
from pipelines.learning.checkpoint import load_agent
from pipelines.learning.diagnostics import inspect
from pipelines.learning.heads import CriticHeads
from pipelines.training.learner import Learner
from tests.stages.recipes import tiny
from tests.training.test_learner import SPACES, batch, learner


def denormalized_last_layer(agent: Agent, weight: torch.Tensor, bias: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The same layer with outputs in units of scaled rewards, by the present statistics, in float64."""
    assert isinstance(agent.heads, CriticHeads)
    assert agent.popart is not None
    columns = agent.heads.critic.num_outputs
    sigma = agent.popart.sigma_G.double().repeat_interleave(columns)
    mu = agent.popart.mu_G.double().repeat_interleave(columns)
    return (weight.detach() * sigma).numpy(), (bias.detach() * sigma + mu).numpy()


def units(rng: np.random.Generator, reward: float) -> Batch:
    windows = batch(rng)
    windows.columns["reward"][:] *= reward
    return windows


@pytest.mark.parametrize("action", [Discrete(n=4), Box(shape=(2,))], ids=["table", "sampled"])
def test_the_average_of_last_layers_is_that_of_their_values_whatever_popart_does(action: Space) -> None:
    """An average of the layers in true units needs no correction when the statistics move: both must agree."""
    settings = tiny(train={"ema_decay": 0.9, "learning_rate": 1e-2}, agent={"popart": {"beta": 0.3}})
    spaces = Spaces(observation=SPACES.observation, action=action)
    trained = Learner(spaces, settings.agent, settings.train, seed=3)
    names = [name for name, p in trained.agent.named_parameters() if p.requires_grad]
    places = [names.index(f"heads.critic.{name}") for name in ("last_weight", "last_bias")]
    rng = np.random.default_rng(0)

    def windows(reward: float) -> Batch:
        data = units(rng, reward)
        if isinstance(action, Box):
            data.columns["action"] = rng.uniform(-1, 1, (*data.columns["action"].shape, 2)).astype(np.float32)
        return data

    trained.step(lambda size: windows(1.0))  # the first update of PopArt gives initial weights their units
    expected = denormalized_last_layer(trained.agent, *(trained.average[place] for place in places))
    sigmas = []
    for update, reward in enumerate((1.0, 30.0, 300.0, 0.1, 5.0), start=1):
        trained.step(lambda size, reward=reward: windows(reward))
        decay = min(0.9, (1 + update) / (10 + update))
        online = denormalized_last_layer(trained.agent, *(trained.parameters[place] for place in places))
        expected = tuple(decay * e + (1 - decay) * p for e, p in zip(expected, online, strict=True))
        actual = denormalized_last_layer(trained.agent, *(trained.average[place] for place in places))
        for ours, theirs in zip(actual, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())
        assert trained.agent.popart is not None
        sigmas.append(trained.agent.popart.sigma_G.max().item())
    assert max(sigmas) > 20 * min(sigmas)  # the statistics did move


def test_values_of_an_averaged_checkpoint_do_not_move_when_only_the_statistics_do(tmp_path: Path) -> None:
    """As `lake sample --values` reports them. The rate is next to nothing, so weights stay where they are."""
    settings = tiny(train={"ema_decay": 0.9, "learning_rate": 1e-12}, agent={"timestep": {"normalize": False}})
    trained = Learner(SPACES, settings.agent, settings.train, seed=3)
    trained.step(lambda size: units(np.random.default_rng(0), 1.0))
    windows = TensorBatch.from_numpy(batch(np.random.default_rng(5)), SPACES)

    def values() -> dict[str, np.ndarray]:
        trained.save(tmp_path, {"env": {}})
        return inspect(load_agent(checkpoints.load(tmp_path)), windows)

    before = values()
    for _ in range(3):
        trained.step(lambda size: units(np.random.default_rng(1), 200.0))
    after = values()
    for name in ("q", "v"):
        np.testing.assert_allclose(after[name], before[name], rtol=2e-3, atol=2e-3)


def test_the_average_is_a_running_mean_that_survives_a_checkpoint(tmp_path: Path) -> None:
    data = batch(np.random.default_rng(0))
    trained = learner(ema_decay=0.9)
    names = [name for name, p in trained.agent.named_parameters() if p.requires_grad]
    plain = [i for i, name in enumerate(names) if "critic.last" not in name]  # those two follow PopArt: see above
    expected = {i: trained.parameters[i].detach().clone() for i in plain}
    for update in range(12):
        trained.step(lambda size: data)
        decay = min(0.9, (1 + update) / (10 + update))
        expected = {i: decay * e + (1 - decay) * trained.parameters[i].detach() for i, e in expected.items()}
    for i, value in expected.items():
        torch.testing.assert_close(trained.average[i], value, rtol=1e-5, atol=1e-6)
    trained.save(tmp_path, {"env": {}})
    checkpoint = checkpoints.load(tmp_path)
    again = learner(ema_decay=0.9)
    again.restore(checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(trained.average, again.average, strict=True))
    name, parameter = next(iter(trained.agent.named_parameters()))
    assert torch.equal(checkpoint.acting[name], trained.average[0])
    assert torch.equal(checkpoint.weights[name], parameter)
    assert not torch.equal(checkpoint.acting[name], checkpoint.weights[name])


@pytest.mark.parametrize("kind", ["actor-critic", "multi-task", "behaviour-cloning"])
def test_an_averaged_run_continues_from_a_checkpoint_to_the_bit(tmp_path: Path, kind: str) -> None:
    def fresh() -> Learner:
        settings = tiny(train={"ema_decay": 0.9}, agent={"kind": kind})
        return Learner(SPACES, settings.agent, settings.train, seed=3)

    data: list[Any] = [units(np.random.default_rng(seed), 10.0**seed) for seed in range(4)]
    whole = fresh()
    for windows in data:
        whole.step(lambda size, windows=windows: windows)
    first = fresh()
    for windows in data[:2]:
        first.step(lambda size, windows=windows: windows)
    first.save(tmp_path, {"env": {}})
    again = fresh()
    again.restore(checkpoints.load(tmp_path))
    for windows in data[2:]:
        again.step(lambda size, windows=windows: windows)
    for ours, theirs in zip(again.average, whole.average, strict=True):
        assert torch.equal(ours, theirs)
    assert again.agent.state_dict().keys() == load_agent(checkpoints.load(tmp_path)).state_dict().keys()


def test_without_an_average_the_last_weights_act(tmp_path: Path) -> None:
    trained = learner()
    trained.save(tmp_path, {"env": {}})
    checkpoint = checkpoints.load(tmp_path)
    assert all(torch.equal(value, checkpoint.weights[name]) for name, value in checkpoint.acting.items())
