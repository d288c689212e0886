"""The policy head in both of its forms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional as F

from pipelines.config.model import Activation, ActorSettings
from pipelines.learning.acting import AgentPolicy
from pipelines.nets.actor import Actor
from tests.learning.factories import agent, batch

FUNCTIONS: dict[Activation, Callable[..., torch.Tensor]] = {
    "leaky-relu": F.leaky_relu,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
}


@pytest.mark.parametrize("residual", [False, True])
def test_the_acting_head_is_the_last(residual: bool) -> None:
    actor, h = Actor(5, 3, 4, ActorSettings(hidden=(6, 7), residual=residual)), torch.randn(2, 5)
    torch.testing.assert_close(actor.acting(h), actor(h)[:, -1])


@pytest.mark.parametrize("action", ["discrete", "box"])
def test_an_agent_with_residual_blocks_learns_and_acts(action: str) -> None:
    owner = agent(action, actor={"hidden": [8, 8], "residual": True})
    loss, _ = owner.loss(batch(owner), torch.Generator().manual_seed(0))
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in owner.heads.actor.parameters())
    policy = AgentPolicy(owner.eval(), num_actors=2, capacity=4)
    zero = np.zeros((2, *owner.spaces.action.shape), owner.spaces.action.dtype)
    chosen = policy.act({"obs": np.ones((2, 3), np.float32)}, zero, np.zeros(2, np.float32), np.zeros(2, np.int64))
    assert chosen.shape == zero.shape


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("name", "function"), FUNCTIONS.items())
def test_the_policy_has_the_activation_of_its_settings(
    name: Activation, function: Callable[..., torch.Tensor], residual: bool
) -> None:
    torch.manual_seed(0)
    actor, x = Actor(5, 2, 3, ActorSettings(hidden=(6, 6), residual=residual, activation=name)), torch.randn(7, 5)
    net = actor.net
    if residual:
        first, block = net.hidden
        h = first.last(function(first.hidden[0](x)))
        h = h + block.norm(block.contract(function(block.inner_norm(block.expand(h)))))
    else:
        h = function(net.hidden[2](function(net.hidden[0](x))))
    torch.testing.assert_close(actor(x), net.last(h).view(7, 2, 3))


def test_residual_blocks_need_a_hidden_layer() -> None:
    with pytest.raises(ValidationError, match="need a hidden layer"):
        ActorSettings(hidden=(), residual=True)
