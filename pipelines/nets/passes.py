"""Forward and backward through multilayer perceptrons without an autograd graph, for critics.

Leaky ReLU preserves the sign, so an activation determines its own slope, and everything can be done in place. R rows, W
width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SLOPE = 0.01
CPU_ROWS, _CUDA_ROWS = 1792, 1 << 16  # rows of a member at a time: on a CPU a layer's output stays in the cache

_slope = torch.ops.aten.leaky_relu_backward.grad_input


def activations(x_RW: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """Return each hidden layer's output, given the first one's, `x_RW`, which comes first in the list."""
    outputs = [x_RW]
    for weight, bias in zip(weights, biases, strict=True):
        outputs.append(F.leaky_relu_(torch.addmm(bias, outputs[-1], weight), SLOPE))
    return outputs


def backward(
    grad_RW: Tensor,
    outputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    grads: Sequence[tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Return the gradient before the first layer's activation, given the one after the last's, which is overwritten.

    Gradients of weights and biases are added to `grads`, in the order of `weights`, if given.
    """
    for place in range(len(weights), 0, -1):
        _slope(grad_RW, outputs[place], SLOPE, True, grad_input=grad_RW)
        if grads is not None:
            weight, bias = grads[place - 1]
            add_product(weight, outputs[place - 1].t(), grad_RW)
            bias += grad_RW.sum(0)
        grad_RW = grad_RW @ weights[place - 1].t()
    return _slope(grad_RW, outputs[0], SLOPE, True, grad_input=grad_RW)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a b, summed in `total`'s precision."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def chunks(rows: int, copies: int, device: torch.device) -> Iterator[slice]:
    """Split `rows` into slices, where each row stands for `copies` rows of a member."""
    size = max(1, (_CUDA_ROWS if device.type == "cuda" else CPU_ROWS) // copies)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


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
        return None, None, *(saved * grad[(...,) + (None,) * (saved.dim() - grad.dim())] for saved in ctx.saved_tensors)


def attach(value: Tensor, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return `value` with an edge in the autograd graph by which `inputs` receive the precomputed `gradients`.

    Either `value` is a scalar, or each of its elements depends only on the inputs at its own place: gradients
    (*value.shape, ...).
    """
    attached: Callable[..., Tensor] = _Attach.apply
    return attached(value, gradients, *inputs)
