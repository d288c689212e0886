"""Linear recurrences over time, h_t = a_t h_{t-1} + b_t: step by step on a CPU, where a step is as fast as memory, in
log T passes on devices where a step is a kernel launch. B batch, T time.

Registered as torch operators, forward and backward alike: a compiled encoder holds one node for each, not T of them.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from pipelines.nets.compute import is_exporting


def linear_scan(a_BT: Tensor, b_BT: Tensor, first_B: Tensor) -> Tensor:
    """Compute h (B, T, ...) for h_t = a_t h_{t-1} + b_t, where h_{-1} = `first_B` (B, ...). Only h is saved for the
    backward."""
    if is_exporting():  # one step of acting, in operators that any runtime has
        return b_BT + a_BT * first_B[:, None]
    return cast(Tensor, _scan(a_BT, b_BT, first_B))


@torch.library.custom_op("amago::linear_scan", mutates_args=())
def _scan(a_BT: Tensor, b_BT: Tensor, first_B: Tensor) -> Tensor:
    h_BT = b_BT.clone()
    recur(a_BT, h_BT, first_B)
    return h_BT


@torch.library.custom_op("amago::linear_scan_backward", mutates_args=())
def _scan_back(grad_BT: Tensor, a_BT: Tensor, h_BT: Tensor, first_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    g_BT, grad_a_BT = grad_BT.clone(), torch.empty_like(h_BT)
    recur_back(a_BT, g_BT)
    torch.mul(g_BT[:, 1:], h_BT[:, :-1], out=grad_a_BT[:, 1:])
    torch.mul(g_BT[:, 0], first_B, out=grad_a_BT[:, 0])
    return grad_a_BT, g_BT, a_BT[:, 0] * g_BT[:, 0]


_scan.register_fake(lambda a_BT, b_BT, first_B: b_BT.clone())
_scan_back.register_fake(
    lambda grad_BT, a_BT, h_BT, first_B: (torch.empty_like(h_BT), grad_BT.clone(), torch.empty_like(a_BT[:, 0]))
)
_scan.register_autograd(
    lambda ctx, grad_BT: _scan_back(grad_BT, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output, inputs[2]),
)


def runs_in_steps(device: torch.device) -> bool:
    """Check whether recurrences run step by step on this device."""
    return device.type == "cpu"


def recur(a_BT: Tensor, h_BT: Tensor, first_B: Tensor) -> None:
    """Run the recurrence in place: `h_BT` holds b before, h after."""
    if not runs_in_steps(h_BT.device):
        h_BT.copy_(scan_by_doubling(a_BT, h_BT, first_B))
        return
    last = first_B
    for a, h in zip(a_BT.unbind(1), h_BT.unbind(1), strict=True):
        last = torch.addcmul(h, a, last, out=h)


def recur_back(a_BT: Tensor, g_BT: Tensor) -> None:
    """Run the recurrence backwards, g_t = grad_t + a_{t+1} g_{t+1}, in place: `g_BT` holds grad before, g after."""
    if not runs_in_steps(g_BT.device):
        later_BT = torch.cat((torch.zeros_like(a_BT[:, :1]), a_BT[:, 1:].flip(1)), 1)
        g_BT.copy_(scan_by_doubling(later_BT, g_BT.flip(1), torch.zeros_like(g_BT[:, 0])).flip(1))
        return
    gs = g_BT.unbind(1)[::-1]
    for a, g, later in zip(a_BT.unbind(1)[:0:-1], gs[1:], gs[:-1], strict=True):
        g.addcmul_(a, later)


def scan_by_doubling(a_BT: Tensor, b_BT: Tensor, first_B: Tensor) -> Tensor:
    """Run the recurrence by Hillis and Steele (1986): pass i combines each place with the one 2^i before it."""
    step = 1
    while step < a_BT.shape[1]:
        b_BT = torch.cat((b_BT[:, :step], torch.addcmul(b_BT[:, step:], a_BT[:, step:], b_BT[:, :-step])), 1)
        a_BT = torch.cat((a_BT[:, :step], a_BT[:, step:] * a_BT[:, :-step]), 1)
        step *= 2
    return torch.addcmul(b_BT, a_BT, first_B[:, None])
