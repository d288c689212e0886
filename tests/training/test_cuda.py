"""The same mathematics on a CUDA device: updates, checkpoints, acting."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines.learning.acting import AgentPolicy
from pipelines.training import checkpoint as checkpoints
from tests.training.test_learner import ENCODERS, batch, encoding, learner, uneven

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_an_update_gives_the_loss_of_the_cpu() -> None:
    data = batch(np.random.default_rng(0))
    cpu, cuda = learner(device="cpu"), learner(device="cuda")
    for (name, a), b in zip(cpu.agent.state_dict().items(), cuda.agent.state_dict().values(), strict=True):
        assert torch.equal(a, b.cpu()), name
    ours, theirs = cpu.step(lambda size: data), cuda.step(lambda size: data)
    # Ensemble members are drawn by each device's own generator: only what does not depend on them is compared.
    torch.testing.assert_close(ours["q"], theirs["q"].cpu(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours["entropy"], theirs["entropy"].cpu(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", ENCODERS)
@pytest.mark.parametrize("switches", [{}, {"compile": True, "packing": True, "tf32": True}], ids=["eager", "compiled"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_every_encoder_learns_there(case: str, switches: dict[str, object], precision: str) -> None:
    data = uneven(np.random.default_rng(0))
    there = encoding(case, device="cuda", precision=precision, **switches)
    here = encoding(case, device="cpu")
    for _ in range(2):
        ours, theirs = there.step(lambda size: data), here.step(lambda size: data)
        torch.testing.assert_close(ours["critic_loss"].cpu(), theirs["critic_loss"], rtol=0.1, atol=0.1)
        assert torch.isfinite(ours["grad_norm"])
    assert there.notices == []


def test_a_checkpoint_of_cuda_continues_there_and_acts_on_the_cpu(tmp_path: Path) -> None:
    data = batch(np.random.default_rng(0))
    whole, parts = learner(device="cuda", average=0.9), learner(device="cuda", average=0.9)
    for _ in range(4):
        whole.step(lambda size: data)
    for _ in range(2):
        parts.step(lambda size: data)
    parts.save(tmp_path, {"env": {}})
    again = learner(device="cuda", average=0.9)
    again.restore(checkpoints.load(tmp_path))
    for _ in range(2):
        again.step(lambda size: data)
    for a, b in zip(whole.parameters, again.parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    observation, none = {"obs": np.zeros((3, 3), np.float32)}, np.zeros(3, np.float32)
    actions = []
    for device in ("cuda", "cpu"):
        agent = again.agent.to(device).eval()
        policy = AgentPolicy(agent, num_actors=3, capacity=5, greedy=True, device=device)
        actions.append(policy.act(observation, np.zeros(3, np.int32), none, np.zeros(3, np.int64)))
    np.testing.assert_array_equal(*actions)
