"""Activation functions that encoders and policies can be built with."""

from __future__ import annotations

from torch import nn

from pipelines.config.model import Activation

ACTIVATIONS: dict[Activation, type[nn.Module]] = {
    "leaky-relu": nn.LeakyReLU,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "mish": nn.Mish,
}
_RECTIFIERS = (nn.LeakyReLU, nn.ReLU)


def activation(name: Activation, *, inplace: bool = False) -> nn.Module:
    """Construct the module called `name`. `inplace`: overwrite the input where the backward does not need it."""
    kind = ACTIVATIONS[name]
    return kind(inplace=True) if inplace and kind in _RECTIFIERS else kind()
