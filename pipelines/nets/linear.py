"""Linear layers: the spectrally reparametrised one of the Transformer, and the plain MLP; activations. I in, O out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipelines.config.model import Activation
from pipelines.nets import init, ranks
from pipelines.nets.compute import Kept

ACTIVATIONS: dict[Activation, type[nn.Module]] = {
    "leaky-relu": nn.LeakyReLU,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "mish": nn.Mish,
}
_RECTIFIERS = (nn.LeakyReLU, nn.ReLU)


def make_activation(name: Activation, *, inplace: bool = False) -> nn.Module:
    """Construct the module called `name`. `inplace`: overwrite the input where the backward does not need it."""
    kind = ACTIVATIONS[name]
    return kind(inplace=True) if inplace and kind in _RECTIFIERS else kind()


def make_norm(kind: Literal["layer", "rms"], size: int) -> nn.LayerNorm | nn.RMSNorm:
    """Construct the norm over the last dimension that a setting names."""
    # By default, torch's RMSNorm adds the epsilon of the precision, which bounds no token that is nearly zero.
    return nn.LayerNorm(size) if kind == "layer" else nn.RMSNorm(size, eps=1e-5)


_Module = TypeVar("_Module", bound=nn.Module)


class SigmaLinear(nn.Module):
    """Linear layer y = (gain / sigma(W)) W x + b, sigma(W) the spectral norm (Zhai et al. 2023, arXiv 2303.06296).

    sigma is estimated by power iteration. `update_spectral_norms` takes one step, once per update; `forward` changes
    nothing, so that repeated passes, cached steps and micro-batches agree.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(init.fill_stream(torch.empty(outputs, inputs)))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("left", torch.randn(outputs))
        self.register_buffer("right", torch.zeros(inputs))
        self.left: Tensor
        self.right: Tensor
        self._sigma = Kept[Tensor]()
        if init.is_outline():
            return
        self.left = F.normalize(self.left, dim=0)
        for _ in range(8):
            self.iterate([self])

    @torch.no_grad()
    def sigma(self) -> Tensor:
        """Estimate the spectral norm (0-d), in the weight's precision even under autocast."""
        if not torch.compiler.is_compiling():  # versions of tensors would be constants of the program
            kept = self._sigma.find((self.weight, self.left, self.right))
            if kept is not None:
                return kept
        with torch.autocast(self.weight.device.type, enabled=False):
            return torch.dot(self.left, torch.mv(self.weight, self.right))

    @classmethod
    @torch.no_grad()
    def iterate(cls, layers: Sequence[SigmaLinear]) -> list[Tensor]:
        """Take one power iteration on the singular vectors of all layers, and return their spectral norms. Of a sharded
        weight each rank has only some rows: no weight is gathered, and two sums over ranks serve all layers."""
        is_sharded = [ranks.is_sharded(layer.weight) for layer in layers]
        parts: list[tuple[Tensor, slice]] = [
            (cast(Any, layer.weight).to_local(), ranks.find_own_rows(len(layer.left)))
            if sharded
            else (layer.weight, slice(None))
            for layer, sharded in zip(layers, is_sharded, strict=True)
        ]
        with torch.autocast(layers[0].left.device.type, enabled=False):
            products = [
                torch.mv(weight.t(), layer.left[rows]) for layer, (weight, rows) in zip(layers, parts, strict=True)
            ]
            cls._set_directions([layer.right for layer in layers], cls._sum_over_ranks(products, is_sharded))
            products = [torch.mv(weight, layer.right) for layer, (weight, _) in zip(layers, parts, strict=True)]
            for place, (layer, (_, rows)) in enumerate(zip(layers, parts, strict=True)):
                if is_sharded[place]:
                    own = products[place]
                    products[place] = torch.zeros_like(layer.left)
                    products[place][rows] = own
            return cls._set_directions([layer.left for layer in layers], cls._sum_over_ranks(products, is_sharded))

    @staticmethod
    def _sum_over_ranks(products: list[Tensor], is_sharded: Sequence[bool]) -> list[Tensor]:
        """Sum the products of sharded weights over ranks, in one message."""
        cut = [product for product, sharded in zip(products, is_sharded, strict=True) if sharded]
        flat = ranks.sum_tensor(torch.cat(cut)) if cut else torch.empty(0)
        totals = iter(flat.split([len(product) for product in cut]))
        return [next(totals) if sharded else product for product, sharded in zip(products, is_sharded, strict=True)]

    @staticmethod
    def _set_directions(vectors: list[Tensor], products: list[Tensor]) -> list[Tensor]:
        """Set unit vectors to the directions of `products`, which are overwritten, and return their norms."""
        norms = [*torch.stack(torch._foreach_norm(products)).clamp_min_(1e-12).unbind()]
        torch._foreach_div_(products, norms)
        torch._foreach_copy_(vectors, products)
        return norms

    def keep_sigma(self, norm: Tensor) -> None:
        """Keep what an update's iteration has computed, for the update's passes: <left, weight right> is the norm that
        `left` was divided by."""
        self._sigma.set((self.weight, self.left, self.right), norm)

    def scale(self) -> Tensor:
        """Compute gain / sigma (0-d), without gradient."""
        return self.gain.detach() / self.sigma()

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            scaled: Callable[..., Tensor] = _Scaled.apply
            return F.linear(x, scaled(self.weight, self.gain, self.left, self.right, self.sigma()), self.bias)
        if x.numel() < self.weight.numel():  # fewer rows than outputs: scaling the product is cheaper
            return torch.addcmul(self.bias, F.linear(x, self.weight), self.scale())
        return F.linear(x, self.weight * self.scale(), self.bias)


class _Scaled(torch.autograd.Function):
    """weight gain / sigma, sigma = <left, weight right>. By hand, the gradient takes two passes over a matrix; as torch
    composes it, it takes five."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gain: Tensor, left: Tensor, right: Tensor, sigma: Tensor) -> Tensor:
        scale = gain / sigma
        ctx.save_for_backward(weight, left, right, sigma, scale)
        return weight * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        weight, left, right, sigma, scale = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_gain = torch.dot(grad.flatten(), weight.flatten()) / sigma
        return torch.addr(grad, left * grad_gain, right, alpha=-1).mul_(scale), grad_gain, None, None, None


def update_spectral_norms(network: nn.Module) -> None:
    """Take one power iteration in every `SigmaLinear` of `network`."""
    layers = [module for module in network.modules() if isinstance(module, SigmaLinear)]
    if layers:
        for layer, norm in zip(layers, SigmaLinear.iterate(layers), strict=True):
            layer.keep_sigma(norm)


def fold(network: _Module) -> _Module:
    """Replace every `SigmaLinear` of `network` by the plain linear layer that it is at present; returns `network`."""
    for name, module in [*network.named_children()]:
        if not isinstance(module, SigmaLinear):
            fold(module)
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
            self.hidden.extend((init.make_linear(inputs, width), make_activation(activation)))
            inputs = width
        self.last = init.make_linear(inputs, outputs, gain=gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(x))
