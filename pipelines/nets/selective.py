"""The recurrence of selective state spaces (Gu & Dao 2023, arXiv 2312.00752).

States are S times as large as inputs and outputs, so they exist for one chunk of tokens at a time, and are recomputed
in the backward: memory grows with the states at chunk ends only. Channels are the last dimension, where what states
share is contiguous; powers of two are several times as fast as powers of e. B batch, T time, D channels, S states of a
channel, Z chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pipelines.nets.scan import recur, recur_back

_CPU_STATES, _CUDA_STATES = 1 << 18, 1 << 23  # numbers of a chunk: on a CPU they fit in the cache
_SHORTEST, LONGEST = 4, 64  # tokens of a chunk


def selective_scan(
    x_BTD: Tensor,
    delta_BTD: Tensor,
    rate_DS: Tensor,
    into_BTS: Tensor,
    out_BTS: Tensor,
    state_BDS: Tensor,
    begins_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute y_t = <out_t, h_t>, h_t = exp(delta_t rate) h_{t-1} + delta_t into_t x_t -> (y (B, T, D), last h). States
    are reset where `begins_BT`."""
    if torch.compiler.is_exporting():  # one step of acting, in operators that any runtime has
        decay_BDS = (delta_BTD[:, 0, :, None] * rate_DS).exp()
        last_BDS = decay_BDS * state_BDS + (delta_BTD * x_BTD)[:, 0, :, None] * into_BTS
        return (last_BDS @ out_BTS.transpose(1, 2)).transpose(1, 2), last_BDS
    state_BSD = state_BDS.transpose(1, 2).contiguous()
    rate_SD = rate_DS.t().contiguous()
    y_BTD, last_BSD, _ = _forward(delta_BTD * x_BTD, delta_BTD, rate_SD, into_BTS, out_BTS, state_BSD, begins_BT)
    return y_BTD, last_BSD.transpose(1, 2)


def _chunk(batch: int, length: int, states: int, channels: int, device: torch.device) -> int:
    """Return the number of tokens of a chunk."""
    numbers = _CPU_STATES if device.type == "cpu" else _CUDA_STATES
    return min(length, max(_SHORTEST, min(LONGEST, numbers // (batch * states * channels))))


class _Chunks:
    """States of one chunk after the other, in the same memory."""

    def __init__(
        self, dx_BTD: Tensor, delta_BTD: Tensor, rate_SD: Tensor, into_BTS: Tensor, begins_BT: Tensor | None
    ) -> None:
        self.dx_BTD, self.delta_BTD, self.into_BTS, self.begins_BT = dx_BTD, delta_BTD, into_BTS, begins_BT
        self.log2_SD = rate_SD / math.log(2)
        (batch, self.length, channels), states = dx_BTD.shape, len(rate_SD)
        self.size = _chunk(batch, self.length, states, channels, dx_BTD.device)
        self.decay = dx_BTD.new_empty(batch, self.size, states, channels)
        self.h = dx_BTD.new_empty(batch, 1 + self.size, states, channels)

    def places(self) -> Iterator[slice]:
        return (slice(start, min(start + self.size, self.length)) for start in range(0, self.length, self.size))

    def run(self, at: slice, first_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Compute decays (B, t, S, D) at these places, and states (B, 1 + t, S, D), with `first_BSD` first."""
        delta_BTD, count = self.delta_BTD[:, at], at.stop - at.start
        decay, h = self.decay[:, :count], self.h[:, : count + 1]
        torch.mul(delta_BTD[:, :, None], self.log2_SD, out=decay).exp2_()
        if self.begins_BT is not None:
            decay.masked_fill_(self.begins_BT[:, at, None, None], 0.0)
        h[:, 0] = first_BSD
        torch.mul(self.into_BTS[:, at, :, None], self.dx_BTD[:, at, None], out=h[:, 1:])
        recur(decay, h[:, 1:], first_BSD)
        return decay, h


@torch.library.custom_op("amago::selective_scan", mutates_args=())
def _forward(
    dx_BTD: Tensor, delta_BTD: Tensor, rate_SD: Tensor, into_BTS: Tensor, out_BTS: Tensor, first_BSD: Tensor,
    begins_BT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return y, the last states, and those before each chunk (Z, B, S, D). Not under autocast, nor is the backward."""
    y_BTD, last_BSD, before = torch.empty_like(dx_BTD), first_BSD, []
    chunks = _Chunks(dx_BTD, delta_BTD, rate_SD, into_BTS, begins_BT)
    with torch.autocast(dx_BTD.device.type, enabled=False):
        for at in chunks.places():
            before.append(last_BSD)
            _, h = chunks.run(at, last_BSD)
            y_BTD[:, at] = (out_BTS[:, at, None] @ h[:, 1:])[:, :, 0]
            last_BSD = h[:, -1].clone()
    return y_BTD, last_BSD, torch.stack(before)


@torch.library.custom_op("amago::selective_scan_backward", mutates_args=())
def _backward(
    grad_BTD: Tensor, grad_last_BSD: Tensor, dx_BTD: Tensor, delta_BTD: Tensor, rate_SD: Tensor, into_BTS: Tensor,
    out_BTS: Tensor, before_ZBSD: Tensor, begins_BT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of dx, delta, rate, into, out and the first states. With g_t that of h_t, rows of rates get
    sum_t g_t h_{t-1} decay_t delta_t; sums over channels are sums of products, which are faster than matrix times
    vector for small matrices."""
    grad_dx, grad_delta, grad_into, grad_out = map(torch.empty_like, (dx_BTD, delta_BTD, into_BTS, out_BTS))
    grad_rate_SD, carry_BSD = torch.zeros_like(rate_SD), grad_last_BSD
    chunks = _Chunks(dx_BTD, delta_BTD, rate_SD, into_BTS, begins_BT)
    memory = torch.empty_like(chunks.decay)
    with torch.autocast(dx_BTD.device.type, enabled=False):
        for at, first_BSD in zip([*chunks.places()][::-1], before_ZBSD.unbind()[::-1], strict=True):
            decay, h = chunks.run(at, first_BSD)
            grad_BtD, g = grad_BTD[:, at, None], memory[:, : decay.shape[1]]
            grad_out[:, at] = torch.mul(h[:, 1:], grad_BtD, out=g).sum(-1)
            torch.mul(out_BTS[:, at, :, None], grad_BtD, out=g)
            g[:, -1] += carry_BSD
            recur_back(decay, g)
            carry_BSD = decay[:, 0] * g[:, 0]
            grad_dx[:, at] = (into_BTS[:, at, None] @ g)[:, :, 0]
            decay.mul_(h[:, :-1]).mul_(g)  # from here on, the gradient of delta times rate
            grad_into[:, at] = g.mul_(dx_BTD[:, at, None]).sum(-1)
            grad_delta[:, at] = torch.mul(decay, rate_SD, out=g).sum(2)
            grad_rate_SD += decay.mul_(delta_BTD[:, at, None]).sum((0, 1))
    return grad_dx, grad_delta, grad_rate_SD, grad_into, grad_out, carry_BSD


@_forward.register_fake
def _(
    dx_BTD: Tensor, delta_BTD: Tensor, rate_SD: Tensor, into_BTS: Tensor, out_BTS: Tensor, first_BSD: Tensor,
    begins_BT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, length, channels = dx_BTD.shape
    size = _chunk(batch, length, len(rate_SD), channels, dx_BTD.device)
    chunks = -(-length // size)
    return torch.empty_like(dx_BTD), torch.empty_like(first_BSD), first_BSD.new_empty(chunks, *first_BSD.shape)


@_backward.register_fake
def _(
    grad_BTD: Tensor, grad_last_BSD: Tensor, dx_BTD: Tensor, delta_BTD: Tensor, rate_SD: Tensor, into_BTS: Tensor,
    out_BTS: Tensor, before_ZBSD: Tensor, begins_BT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    given = (dx_BTD, delta_BTD, rate_SD, into_BTS, out_BTS, grad_last_BSD)
    return tuple(map(torch.empty_like, given))  # type: ignore[return-value]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    dx_BTD, delta_BTD, rate_SD, into_BTS, out_BTS, _, begins_BT = inputs
    ctx.save_for_backward(dx_BTD, delta_BTD, rate_SD, into_BTS, out_BTS, output[2], begins_BT)


def _gradients(ctx: Any, grad_BTD: Tensor, grad_last_BSD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(grad_BTD, grad_last_BSD, *ctx.saved_tensors), None


_forward.register_autograd(_gradients, setup_context=_keep)
