"""Every weight initialisation of the networks, in one place. All draw from torch's global generator, which `Agent`
forks and seeds.

hidden    orthogonal, gain sqrt(2) (a rectifier or similar follows); biases zero
output    orthogonal, small gain: .01 for policies (near uniform at first), .1 for values
positions normal, std sqrt(1/2), the RMS of the sinusoid; the tokens they are added to have an RMS of about 1
stream    truncated normal, std .02, cut at two std: linears of the Transformer, whose scale is learned anyway
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_Layer = TypeVar("_Layer", bound=nn.Module)
POLICY_GAIN = 0.01
VALUE_GAIN = 0.1


def is_outline() -> bool:
    """Check whether modules are built as an outline (`pipelines.nets.outline`), whose tensors have no values.

    Values are then not computed: that would take time, and import the compiler of torch for some functions.
    """
    return torch.get_default_device().type == "meta"


def hidden_(weight: Tensor) -> Tensor:
    """Fill `weight` (out, in, ...) for a layer followed by an activation."""
    return nn.init.orthogonal_(weight, gain=math.sqrt(2))


def _output_(weight: Tensor, gain: float) -> Tensor:
    """Fill `weight` (out, in) of a last layer."""
    return nn.init.orthogonal_(weight, gain=gain)


def stream_(weight: Tensor) -> Tensor:
    """Fill `weight` (out, in) of a linear on the residual stream."""
    return nn.init.trunc_normal_(weight, std=0.02, a=-0.04, b=0.04)


def positions_(weight: Tensor) -> Tensor:
    """Fill `weight` (rows, width) of a learned table of positions."""
    return weight if is_outline() else nn.init.normal_(weight, std=math.sqrt(0.5))


def members_(weight_CIO: Tensor, gain: float) -> Tensor:
    """Fill each member (in, out) of an ensemble's weights with its own orthogonal matrix."""
    # A forged record may ask for any number of members.
    if is_outline():
        return weight_CIO
    with torch.no_grad():
        for member in weight_CIO:
            member.copy_(nn.init.orthogonal_(torch.empty(member.shape[1], member.shape[0]), gain=gain).T)
    return weight_CIO


def linear(inputs: int, outputs: int, *, gain: float | None = None) -> nn.Linear:
    """Construct a linear layer, hidden by default, an output layer if `gain` is given; its bias starts at zero."""
    layer = empty(nn.Linear, inputs, outputs)
    hidden_(layer.weight) if gain is None else _output_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def stream_linear(inputs: int, outputs: int) -> nn.Linear:
    """Construct a plain linear layer on the residual stream."""
    layer = empty(nn.Linear, inputs, outputs)
    stream_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def empty(layer: type[_Layer], *arguments: Any, **options: Any) -> _Layer:
    """Construct a layer whose values are not initialised."""
    # By itself, skip_init puts a layer on the CPU, even where an outline is built.
    made: _Layer = nn.utils.skip_init(layer, *arguments, **options, device=torch.get_default_device())
    return made
