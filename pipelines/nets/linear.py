"""Linear layers: the spectrally reparametrised one of the Transformer, and the plain MLP; activations. I in, O out."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipelines.config.model import Activation
from pipelines.nets import init, ranks
from pipelines.nets.compute import Kept, Linear, cast_weights, choose_dtype, keep_float32

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
        self._prepared = Kept[tuple[Tensor, Tensor]]()
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
        if layers[0].weight.device.type != "cpu" and not any(is_sharded):
            return cls._iterate_together(layers)
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
        """Set unit vectors to the directions of `products`, and return their norms."""
        norms = [*torch.stack(torch._foreach_norm(products)).clamp_min_(1e-12).unbind()]
        torch._foreach_copy_(vectors, torch._foreach_div(products, norms))
        return norms

    @classmethod
    def _iterate_together(cls, layers: Sequence[SigmaLinear]) -> list[Tensor]:
        """Do what `iterate` does on a device, where a kernel costs as much as a pass over a small matrix: matrices of
        one shape are multiplied at once."""
        ordered = sorted(layers, key=lambda layer: layer.weight.shape)
        counts = Counter((layer.weight.shape[0], layer.weight.shape[1]) for layer in ordered)
        flat = torch.cat([layer.weight.view(-1) for layer in ordered])
        parts = flat.split([number * outputs * inputs for (outputs, inputs), number in counts.items()])
        stacks = [part.view(number, *shape) for part, (shape, number) in zip(parts, counts.items(), strict=True)]
        right = cls._step_together(
            [stack_LOI.mT for stack_LOI in stacks],
            torch.cat([layer.left for layer in ordered]),
            [layer.right for layer in ordered],
        )[0]
        norms = cls._step_together(stacks, right, [layer.left for layer in ordered])[1]
        norm_of = dict(zip(ordered, norms, strict=True))
        return [norm_of[layer] for layer in layers]

    @staticmethod
    def _step_together(
        stacks: Sequence[Tensor], given: Tensor, vectors: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Multiply stacks of matrices (L, O, I) by all the vectors of I entries that follow each other in `given`. Set
        the unit `vectors` of O entries to the directions of the products; returns these one after the other, and the
        products' norms."""
        sizes = tuple(len(vector) for vector in vectors)
        flat = given.new_empty(sum(sizes))
        inputs = given.split([stack.shape[0] * stack.shape[2] for stack in stacks])
        outputs = flat.split([stack.shape[0] * stack.shape[1] for stack in stacks])
        with keep_float32():
            for stack, x, y in zip(stacks, inputs, outputs, strict=True):
                torch.bmm(stack, x.view(len(stack), -1, 1), out=y.view(len(stack), -1, 1))
        norms_L = torch.stack(torch._foreach_norm([*flat.split(sizes)])).clamp_min_(1e-12)
        # One division of all entries: of a list, with numbers that differ in shape, it would be a kernel for each.
        flat.div_(norms_L.index_select(0, _number_entries(sizes, norms_L.device)))
        torch._foreach_copy_([*vectors], [*flat.split(sizes)])
        return flat, [*norms_L.unbind()]

    def keep_sigma(self, norm: Tensor) -> None:
        """Keep what an update's iteration has computed, for the update's passes: <left, weight right> is the norm that
        `left` was divided by."""
        self._sigma.set((self.weight, self.left, self.right), norm)

    def scale(self) -> Tensor:
        """Compute gain / sigma (0-d), without gradient."""
        return self.gain.detach() / self.sigma()

    def tensors(self) -> list[Tensor]:
        """List what the scaled weight and the bias depend on."""
        return [self.weight, self.gain, self.left, self.right, self.bias]

    def keep_prepared(self, weight: Tensor, bias: Tensor) -> None:
        """Keep the scaled weight, with gradient, for as long as what it depends on does not change."""
        self._prepared.set(self.tensors(), (weight, bias))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            prepared = None if torch.compiler.is_compiling() else self._prepared.find(self.tensors())
            if prepared is not None:
                return F.linear(x, *prepared)
            scaled: Callable[..., Tensor] = _Scaled.apply
            return F.linear(x, scaled(self.weight, self.gain, self.left, self.right, self.sigma()), self.bias)
        if x.numel() < self.weight.numel():  # fewer rows than outputs: scaling the product is cheaper
            return torch.addcmul(self.bias, F.linear(x, self.weight), self.scale())
        return F.linear(x, self.weight * self.scale(), self.bias)


@functools.lru_cache(maxsize=16)
def _number_entries(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Number the vector of each entry, where vectors of these sizes follow each other."""
    return torch.from_numpy(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)).to(device)


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


@dataclass(frozen=True)
class _RowPlaces:
    """Places of the numbers of L matrices in one, whose R rows are W wide. A matrix has whole rows of it, and whole
    blocks of `block` numbers.

    `layer_R`: the matrix of each row; `left_R` and `right_R`: the places of its singular vectors' entries among all
    left entries, and all right ones in groups of W; `layer_O`: the matrix of each left entry; `share_LB`: 1 where a
    block belongs to a matrix.
    """

    width: int
    block: int
    layer_R: Tensor
    left_R: Tensor
    right_R: Tensor
    layer_O: Tensor
    share_LB: Tensor

    @classmethod
    @functools.lru_cache(maxsize=8)
    def of(cls, shapes: tuple[tuple[int, int], ...], device: torch.device) -> _RowPlaces:
        """Lay out matrices of these shapes."""
        width = math.gcd(*(inputs for _, inputs in shapes))
        block = math.gcd(*(outputs * inputs for outputs, inputs in shapes))
        sizes, lefts, rights, first_left, first_right = [], [], [], 0, 0
        for outputs, inputs in shapes:
            groups = inputs // width
            sizes.append(outputs * groups)
            lefts.append(first_left + np.repeat(np.arange(outputs), groups))
            rights.append(first_right + np.tile(np.arange(groups), outputs))
            first_left, first_right = first_left + outputs, first_right + groups
        number = np.arange(len(shapes))
        blocks = np.repeat(number, [outputs * inputs // block for outputs, inputs in shapes])
        arrays = (
            np.repeat(number, sizes),
            np.concatenate(lefts),
            np.concatenate(rights),
            np.repeat(number, [outputs for outputs, _ in shapes]),
            (blocks == number[:, None]).astype(np.float32),
        )
        return cls(width, block, *(torch.from_numpy(array).to(device) for array in arrays))


class _ScaledTogether(torch.autograd.Function):
    """Weights of L layers as `_Scaled` computes them, in another precision, and their biases in that. On a device, a
    kernel costs as much as a pass over a small matrix: here are about 20 of them, not 9 a layer.

    Nothing is saved in autograd's way, which would allow one backward only."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, layers: Sequence[SigmaLinear], *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(layers)
        weights, gains, biases = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
        shapes = tuple((weight.shape[0], weight.shape[1]) for weight in weights)
        layout = _RowPlaces.of(shapes, weights[0].device)
        flat_RW = torch.cat([weight.view(-1, layout.width) for weight in weights])
        sigma_L = torch.stack([layer.sigma() for layer in layers])
        scale_R1 = (torch.stack(gains) / sigma_L)[layout.layer_R, None]
        scaled_RW = torch.mul(flat_RW, scale_R1, out=flat_RW.new_empty(flat_RW.shape, dtype=dtype))
        cast = [torch.empty_like(bias, dtype=dtype) for bias in biases]
        torch._foreach_copy_(cast, biases)
        ctx.layout, ctx.shapes, ctx.flat_RW, ctx.sigma_L, ctx.scale_R1 = layout, shapes, flat_RW, sigma_L, scale_R1
        ctx.left_O = torch.cat([layer.left for layer in layers])
        ctx.right = torch.cat([layer.right for layer in layers])
        return *_cut(scaled_RW, shapes), *cast

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        layout, count = ctx.layout, len(ctx.shapes)
        narrow_RW = torch.cat([grad.reshape(-1, layout.width) for grad in grads[:count]])
        grad_RW = narrow_RW.to(ctx.flat_RW.dtype)
        dots_B = (grad_RW * ctx.flat_RW).view(-1, layout.block).sum(1)
        grad_gain_L = torch.mv(layout.share_LB.to(dots_B.dtype), dots_B) / ctx.sigma_L
        left_O = ctx.left_O * grad_gain_L[layout.layer_O]
        right_RW = ctx.right.view(-1, layout.width)[layout.right_R]
        grad_RW = torch.addcmul(grad_RW, left_O[layout.left_R, None], right_RW, value=-1).mul_(ctx.scale_R1)
        grad_biases = [torch.empty_like(grad, dtype=grad_RW.dtype) for grad in grads[count:]]
        torch._foreach_copy_(grad_biases, [*grads[count:]])
        return None, None, *_cut(grad_RW, ctx.shapes), *grad_gain_L.unbind(), *grad_biases


def _cut(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Cut a tensor into matrices of these shapes, which share its memory."""
    parts = flat.view(-1).split([outputs * inputs for outputs, inputs in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def prepare_weights(*networks: nn.Module) -> None:
    """Make the weights that the next pass of `networks`, which are on one device, computes with: cast to autocast's
    precision, and scaled. Otherwise each layer does that by itself, as on a CPU, in compiled networks, and where ranks
    share out a layer."""
    kind = next(networks[0].parameters()).device.type
    if kind == "cpu":  # whose time goes into passes over weights, not into calls
        return
    modules = [module for each in networks if each._compiled_call_impl is None for module in each.modules()]
    if torch.is_autocast_enabled(kind):
        cast_weights([each for each in modules if isinstance(each, Linear) and not ranks.is_sharded(each.weight)])
    if not torch.is_grad_enabled():
        return
    layers = [each for each in modules if isinstance(each, SigmaLinear) and not ranks.is_sharded(each.weight)]
    if layers:
        scaled: Callable[..., tuple[Tensor, ...]] = _ScaledTogether.apply
        tensors = [
            [layer.weight for layer in layers],
            [layer.gain for layer in layers],
            [layer.bias for layer in layers],
        ]
        made = scaled(choose_dtype(layers[0].weight.device), layers, *tensors[0], *tensors[1], *tensors[2])
        for layer, weight, bias in zip(layers, made, made[len(layers) :], strict=False):
            layer.keep_prepared(weight, bias)


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
