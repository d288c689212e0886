"""Linear recurrences over time, h_t = a_t h_{t-1} + b_t, and what stands on them. B batch, T time, D channels,
S states of a channel."""

from __future__ import annotations

from itertools import repeat
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 32  # tokens whose states exist at a time in a selective scan


def linear_scan(a_BT: Tensor, b_BT: Tensor, first_B: Tensor) -> Tensor:
    """h (B, T, ...) for h_t = a_t h_{t-1} + b_t, where h_{-1} = `first_B` (B, ...). Only h is kept for the backward."""
    return cast(Tensor, _Scan.apply(a_BT, b_BT, first_B))


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a_BT: Tensor, b_BT: Tensor, first_B: Tensor) -> Tensor:
        h_BT = _run(a_BT, b_BT, first_B)
        ctx.save_for_backward(a_BT, h_BT, first_B)
        return h_BT

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a_BT, h_BT, first_B = ctx.saved_tensors
        (grad_BT,) = grads
        # g_t = grad_t + a_{t+1} g_{t+1}: the same recurrence, backwards
        later_BT = torch.cat((a_BT[:, 1:], torch.zeros_like(a_BT[:, :1])), 1)
        g_BT = _run(later_BT, grad_BT, torch.zeros_like(first_B), backwards=True)
        before_BT = torch.cat((first_B[:, None], h_BT[:, :-1]), 1)
        return g_BT * before_BT, g_BT, a_BT[:, 0] * g_BT[:, 0]


def _run(a_BT: Tensor, b_BT: Tensor, first_B: Tensor, *, backwards: bool = False) -> Tensor:
    """The recurrence, from the last place to the first if `backwards`: step by step on a CPU, in log T passes on
    devices where a step is a launch."""
    if a_BT.device.type == "cpu":
        h_BT, last = torch.empty_like(b_BT), first_B
        for t in range(a_BT.shape[1] - 1, -1, -1) if backwards else range(a_BT.shape[1]):
            last = torch.addcmul(b_BT[:, t], a_BT[:, t], last, out=h_BT[:, t])
        return h_BT
    a_BT, b_BT = (a_BT.flip(1), b_BT.flip(1)) if backwards else (a_BT, b_BT)
    h_BT = doubling(a_BT, b_BT, first_B)
    return h_BT.flip(1) if backwards else h_BT


def doubling(a_BT: Tensor, b_BT: Tensor, first_B: Tensor) -> Tensor:
    """The recurrence by Hillis and Steele (1986): pass i joins each place with the one 2^i before it."""
    step = 1
    while step < a_BT.shape[1]:
        b_BT = torch.cat((b_BT[:, :step], torch.addcmul(b_BT[:, step:], a_BT[:, step:], b_BT[:, :-step])), 1)
        a_BT = torch.cat((a_BT[:, :step], a_BT[:, step:] * a_BT[:, :-step]), 1)
        step *= 2
    return torch.addcmul(b_BT, a_BT, first_B[:, None])


def selective_scan(
    x_BTD: Tensor,
    delta_BTD: Tensor,
    rate_DS: Tensor,
    into_BTS: Tensor,
    out_BTS: Tensor,
    state_BDS: Tensor,
    begins_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Selective state spaces (Gu & Dao 2023, arXiv 2312.00752): y_t = <out_t, h_t>,
    h_t = exp(delta_t rate) h_{t-1} + delta_t into_t x_t -> (y (B, T, D), last h). States are forgotten where
    `begins_BT`. Chunk by chunk, each computed again in the backward: states of all tokens never exist together.
    """
    outputs = []
    parts = (t.split(CHUNK, 1) for t in (x_BTD, delta_BTD, into_BTS, out_BTS))
    begun = repeat(None) if begins_BT is None else begins_BT.split(CHUNK, 1)
    for x, delta, into, out, begins in zip(*parts, begun, strict=False):
        inputs = (x, delta, rate_DS, into, out, state_BDS, begins)
        if torch.is_grad_enabled():
            y_BTD, state_BDS = checkpoint(_chunk, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            y_BTD, state_BDS = _chunk(*inputs)
        outputs.append(y_BTD)
    return torch.cat(outputs, 1), state_BDS


def _chunk(
    x_BTD: Tensor,
    delta_BTD: Tensor,
    rate_DS: Tensor,
    into_BTS: Tensor,
    out_BTS: Tensor,
    state_BDS: Tensor,
    begins_BT: Tensor | None,
) -> tuple[Tensor, Tensor]:
    decay_BTDS = torch.exp(delta_BTD[..., None] * rate_DS)
    if begins_BT is not None:
        decay_BTDS = decay_BTDS.masked_fill(begins_BT[..., None, None], 0.0)
    drive_BTDS = (delta_BTD * x_BTD)[..., None] * into_BTS[:, :, None]
    h_BTDS = linear_scan(decay_BTDS, drive_BTDS, state_BDS)
    return (h_BTDS @ out_BTS[..., None])[..., 0], h_BTDS[:, -1].clone()  # a view would keep all of h
