"""Forward and backward through multilayer perceptrons without an autograd graph, for critics.

Leaky ReLU preserves the sign, so an activation determines its own slope, and everything can be done in place. C
critics, R rows, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SLOPE = 0.01
# Rows of all critics together that are computed at a time: on a CPU, a layer's output stays in the cache.
CPU_ROWS, _CUDA_ROWS = 3584, 1 << 18

_slope = torch.ops.aten.leaky_relu_backward.grad_input


def activations(x_CRW: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """Return each hidden layer's output, given the first one's, `x_CRW`, which comes first in the list."""
    outputs = [x_CRW]
    for weight, bias in zip(weights, biases, strict=True):
        outputs.append(F.leaky_relu_(torch.baddbmm(bias, outputs[-1], weight), SLOPE))
    return outputs


def backward(
    grad_CRW: Tensor,
    outputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    grads: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
) -> Tensor:
    """Return the gradient before the first layer's activation, given the one after the last's.

    That one is overwritten, and so are the `outputs` of layers as wide as the one before, which saves allocations.
    Gradients of weights and of biases are added to `grads`, each in the order of
    `weights`, if given.
    """
    for place in range(len(weights), 0, -1):
        _slope(grad_CRW, outputs[place], SLOPE, True, grad_input=grad_CRW)
        if grads is not None:
            add_product(grads[0][place - 1], outputs[place - 1].mT, grad_CRW)
            grads[1][place - 1].add_(grad_CRW.sum(1, keepdim=True))
        weight = weights[place - 1]
        grad_CRW = torch.bmm(grad_CRW, weight.mT, out=outputs[place] if weight.shape[1] == weight.shape[2] else None)
    return _slope(grad_CRW, outputs[0], SLOPE, True, grad_input=grad_CRW)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a b for each critic, summed in `total`'s precision."""
    if total.dtype == a.dtype:
        total.baddbmm_(a, b)
    else:
        total += torch.bmm(a, b)


def add_products(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a b of all critics, summed in `total`'s precision."""
    if total.dtype == a.dtype:
        total.addbmm_(a, b)
    else:
        total += torch.bmm(a, b).sum(0, dtype=total.dtype)


def chunks(rows: int, copies: int, device: torch.device) -> Iterator[slice]:
    """Split `rows` into slices, where each row stands for `copies` rows of the critics."""
    size = max(1, (_CUDA_ROWS if device.type == "cuda" else CPU_ROWS) // copies)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def may_wait(rows: int, device: torch.device) -> bool:
    """Return whether a pass over so many rows of the critics should first find out which of them are needed. For their
    number the host waits for a device, which in the meantime would have computed all rows of a small pass."""
    return device.type != "cuda" or rows > _CUDA_ROWS


def precision(device: torch.device) -> torch.dtype:
    """Return the dtype to compute products in: autocast's, where it is on."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        if grad.dim() == 0:
            return None, None, *torch._foreach_mul(list(ctx.saved_tensors), grad)
        return None, None, *(saved * grad[(...,) + (None,) * (saved.dim() - grad.dim())] for saved in ctx.saved_tensors)


def attach(value: Tensor, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return `value` with an edge in the autograd graph by which `inputs` receive the precomputed `gradients`.

    Either `value` is a scalar, or each of its elements depends only on the inputs at its own place: gradients
    (*value.shape, ...).
    """
    attached: Callable[..., Tensor] = _Attach.apply
    return attached(value, gradients, *inputs)
