"""The policy head: parameters of one action distribution per discount. G discounts, P parameters, D width."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipelines.config.model import Activation, ActorSettings
from pipelines.nets import init
from pipelines.nets.linear import MLP


class _ResidualLayer(nn.Module):
    """Residual layer: x + linear(act(linear(norm(x))))."""

    def __init__(self, width: int, inner: int, activation: Activation) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.body = MLP(width, (inner,), width, gain=1.0, activation=activation)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(self.norm(x))


class Actor(nn.Module):
    """MLP, optionally of residual layers, whose last layer has one head per discount, the acting one last. Its output
    is at least float32, whatever the precision."""

    def __init__(self, input_size: int, num_discounts: int, num_params: int, settings: ActorSettings) -> None:
        super().__init__()
        self.num_discounts, self.num_params = num_discounts, num_params
        outputs = num_discounts * num_params
        if not settings.residual:
            self.net = MLP(input_size, settings.hidden, outputs, gain=init.POLICY_GAIN, activation=settings.activation)
            return
        width = settings.hidden[0]
        self.net = MLP(width, (), outputs, gain=init.POLICY_GAIN)
        blocks = (_ResidualLayer(width, inner, settings.activation) for inner in settings.hidden)
        self.net.hidden = nn.Sequential(init.linear(input_size, width, gain=1.0), *blocks, nn.LayerNorm(width))

    def forward(self, h: Tensor) -> Tensor:
        """Map (..., D) to (..., G, P)."""
        return _full(self.net(h)).unflatten(-1, (self.num_discounts, self.num_params))

    def acting(self, h: Tensor) -> Tensor:
        """Map (..., D) to (..., P) with the acting discount's head alone."""
        last, first = self.net.last, (self.num_discounts - 1) * self.num_params
        return _full(F.linear(self.net.hidden(h), last.weight[first:], last.bias[first:]))


def _full(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
