"""Linear layers: the spectrally reparametrised one of the Transformer, and the plain MLP. I in, O out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipelines.config.encoders import Activation
from pipelines.nets import init, ranks
from pipelines.nets.activation import activation as make_activation

_Module = TypeVar("_Module", bound=nn.Module)


class SigmaLinear(nn.Module):
    """Linear layer y = (gain / sigma(W)) W x + b, sigma(W) the spectral norm (Zhai et al. 2023, arXiv 2303.06296).

    sigma is estimated by power iteration. `iterate` takes one step, once per update; `forward` changes nothing, so that
    repeated passes, cached steps and micro-batches agree.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(init.stream_(torch.empty(outputs, inputs)))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("left", torch.randn(outputs))
        self.register_buffer("right", torch.zeros(inputs))
        self.left: Tensor
        self.right: Tensor
        if init.is_outline():
            return
        self.left = F.normalize(self.left, dim=0)
        for _ in range(8):
            self.iterate()

    @torch.no_grad()
    def iterate(self) -> None:
        """Take one power iteration on the singular vectors."""
        with torch.autocast(self.weight.device.type, enabled=False):
            right = torch.mv(self.weight.t(), self.left)
            self.right.copy_(right / right.norm().clamp_min(1e-12))
            left = torch.mv(self.weight, self.right)
            self.left.copy_(left / left.norm().clamp_min(1e-12))

    def scale(self) -> Tensor:
        """Return gain / sigma, 0-d, differentiable in weight and gain, in their precision even under autocast."""
        with torch.autocast(self.weight.device.type, enabled=False):
            return self.gain / torch.dot(self.left, torch.mv(self.weight, self.right))

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() < self.weight.numel():  # fewer rows than outputs: scaling the product is cheaper
            return torch.addcmul(self.bias, F.linear(x, self.weight), self.scale())
        return F.linear(x, self.weight * self.scale(), self.bias)


def iterate(network: nn.Module) -> None:
    """Take one power iteration in every `SigmaLinear` of `network`."""
    sharded = []
    for module in network.modules():
        if isinstance(module, SigmaLinear):
            if ranks.is_sharded(module.weight):
                sharded.append(module)
            else:
                module.iterate()
    if sharded:
        _iterate_sharded(sharded)


@torch.no_grad()
def _iterate_sharded(layers: Sequence[SigmaLinear]) -> None:
    """Take one power iteration in layers of whose weights each rank has only some rows: no weight is gathered, and two
    sums over ranks serve all layers."""
    parts: list[tuple[Tensor, slice]] = [
        (cast(Any, layer.weight).to_local(), ranks.own_rows(len(layer.left))) for layer in layers
    ]
    with torch.autocast(layers[0].left.device.type, enabled=False):
        products = [torch.mv(weight.t(), layer.left[rows]) for layer, (weight, rows) in zip(layers, parts, strict=True)]
        for layer, right in zip(layers, ranks.totals(products), strict=True):
            layer.right.copy_(right / right.norm().clamp_min(1e-12))
        products = [torch.zeros_like(layer.left) for layer in layers]
        for product, layer, (weight, rows) in zip(products, layers, parts, strict=True):
            product[rows] = torch.mv(weight, layer.right)
        for layer, left in zip(layers, ranks.totals(products), strict=True):
            layer.left.copy_(left / left.norm().clamp_min(1e-12))


def folded(network: _Module) -> _Module:
    """Replace every `SigmaLinear` of `network` by the plain linear layer that it is at present; returns `network`."""
    for name, module in [*network.named_children()]:
        if not isinstance(module, SigmaLinear):
            folded(module)
            continue
        outputs, inputs = module.weight.shape
        plain = nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=module.weight.dtype)
        with torch.no_grad():
            plain.weight.copy_(module.weight * module.scale())
            plain.bias.copy_(module.bias)
        setattr(network, name, plain.requires_grad_(module.weight.requires_grad))
    return network


class MLP(nn.Module):
    """Hidden linears with activations, then an output linear (`gain` None: initialised like a hidden one).

    Nothing is done in place: the output of a linear on (B, T, ...) is a view, and autograd copies views that change.
    """

    def __init__(
        self, inputs: int, hidden: Sequence[int], outputs: int, *,
        gain: float | None = None, activation: Activation = "leaky-relu",
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden = nn.Sequential()
        for width in hidden:
            self.hidden.extend((init.linear(inputs, width), make_activation(activation)))
            inputs = width
        self.last = init.linear(inputs, outputs, gain=gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(x))
