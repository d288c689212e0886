"""Gradients in bf16 beside those in float32, tensor by tensor."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from pipelines.learning.acting import AgentPolicy
from pipelines.learning.batch import TensorBatch
from pipelines.learning.diagnostics import inspect
from pipelines.learning.heads import CriticHeads
from pipelines.nets.compute import autocast
from tests.training.test_learner import ENCODERS, SPACES, batch, encoding

# Linears whose output is normalised right away: the loss does not change with their scale, so that the gradient of
# their gain is a sum of large terms that cancel, in bf16 nothing but rounding.
SCALE_FREE = ("merge.gain", "expand.gain")


def gradients(trained: torch.nn.Module, data: TensorBatch, precision: str) -> dict[str, torch.Tensor]:
    agent = copy.deepcopy(trained).train()
    with autocast(torch.device("cpu"), precision):
        loss, _ = agent.loss(data, torch.Generator().manual_seed(5))
    loss.backward()
    return {name: p.grad for name, p in agent.named_parameters() if p.grad is not None}


def unexpected(rng: np.random.Generator) -> TensorBatch:
    """Windows that pay more than those before: of random rewards as expected, the true gradient is next to nothing."""
    windows = batch(rng, size=16, steps=20)
    windows.columns["reward"] += 1
    return TensorBatch.from_numpy(windows, SPACES)


@pytest.mark.parametrize("case", ENCODERS)
def test_gradients_in_bf16_are_those_of_float32(case: str) -> None:
    rng = np.random.default_rng(0)
    trained = encoding(case)
    for _ in range(5):  # away from the start
        trained.step(lambda size: batch(rng, size=16, steps=20))
    data = unexpected(rng)
    full, half = (gradients(trained.agent, data, precision) for precision in ("float32", "bf16"))
    total = torch.stack([grad.norm() for grad in full.values()]).norm()
    error = torch.stack([(full[name] - half[name]).norm() for name in full]).norm()
    assert error < 0.1 * total
    for name, grad in full.items():
        wrong = (grad - half[name]).norm()
        assert wrong < 0.35 * grad.norm() or wrong < 1e-3 * total, name


def test_what_bf16_gets_wrong_has_no_gradient_to_speak_of() -> None:
    rng = np.random.default_rng(0)
    trained = encoding("transformer")
    for _ in range(5):
        trained.step(lambda size: batch(rng, size=16, steps=20))
    data = unexpected(rng)
    full = gradients(trained.agent, data, "float32")
    total = torch.stack([grad.norm() for grad in full.values()]).norm()
    found = {name: grad.norm() for name, grad in full.items() if name.endswith(SCALE_FREE)}
    assert len(found) == 2
    assert max(found.values()) < 1e-4 * total


def test_advantages_keep_their_sign_in_bf16() -> None:
    """They are a hundredth of the values they are differences of, about what bf16 tells apart."""
    rng = np.random.default_rng(0)
    trained = encoding("transformer")
    for _ in range(5):
        trained.step(lambda size: batch(rng, size=16, steps=20))
    agent, data = trained.agent, TensorBatch.from_numpy(batch(rng, size=16, steps=20), SPACES)
    assert isinstance(agent.heads, CriticHeads)
    critic = agent.heads.critic
    critic.biases[-1].data += 1.0
    critic.last_weight.data += 3.0 / critic.last_weight.shape[1]  # the same to the value of every action: about 3
    full = inspect(agent, data)
    with autocast(torch.device("cpu"), "bf16"):
        half = inspect(agent, data)
    real = full["mask"]
    error = np.abs(half["advantage"] - full["advantage"])[real].mean()
    assert error < 0.1 * np.abs(full["advantage"][real]).mean()
    assert (half["weight"] != full["weight"])[real].mean() < 0.03


@pytest.mark.parametrize("case", ENCODERS)
def test_acting_in_bf16_computes_as_learning_does(case: str) -> None:
    trained = encoding(case, precision="bf16")
    trained.agent.eval()
    seen: list[torch.dtype] = []
    trained.agent.timestep.body.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    rng = np.random.default_rng(0)
    windows = batch(rng, size=6, steps=7)
    windows.lengths[:] = 8
    data = TensorBatch.from_numpy(windows, SPACES)
    with torch.no_grad(), autocast(torch.device("cpu"), "bf16"):
        whole = trained.agent.heads.actor.acting(trained.agent.encode(data))
    policy = AgentPolicy(trained.agent, num_actors=6, capacity=8, greedy=True, precision="bf16")
    params: list[torch.Tensor] = []
    acting = trained.agent.heads.actor.acting

    def watched(h: torch.Tensor) -> torch.Tensor:
        params.append(acting(h))
        return params[-1]

    trained.agent.heads.actor.acting = watched  # type: ignore[method-assign]
    columns = windows.columns
    for t in range(8):
        now = {"obs": columns["obs"][:, t]}
        policy.act(now, columns["action"][:, t], columns["reward"][:, t], np.full(6, t))
    assert set(seen) == {torch.bfloat16}
    scale = whole.abs().max()
    assert (torch.stack(params, 1) - whole).abs().max() < 0.05 * scale
    prefix = [{name: column[i, :7] for name, column in columns.items()} for i in range(6)]
    policy.rebuild(prefix)
    policy.act(now, columns["action"][:, 7], columns["reward"][:, 7], np.full(6, 7))
    assert (params[-1] - params[-2]).abs().max() < 0.05 * scale
