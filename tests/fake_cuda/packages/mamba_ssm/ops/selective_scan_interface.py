"""A stand-in for mamba-ssm 2.3.2: the signature of its function, what its csrc/selective_scan/selective_scan.cpp
refuses, and its reference in place of kernels."""

from __future__ import annotations

from typing import Any

import torch

from tests.fake_cuda.device import kernel

selective_scan_cuda: Any = object()  # the extension, which is None where it was not built


def selective_scan_fn(
    u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, delta_bias: Any = None,
    delta_softplus: bool = False, return_last_state: bool = False,
) -> Any:  # fmt: skip
    if selective_scan_cuda is None:
        raise AttributeError("'NoneType' object has no attribute 'fwd'")
    assert u.dtype in (torch.float32, torch.float16, torch.bfloat16)
    assert A.dtype == torch.float32
    assert delta.dtype == B.dtype == C.dtype == u.dtype
    assert all(x.is_cuda for x in (u, delta, A, B, C))
    assert all(x.stride(-1) == 1 for x in (u, delta, B, C))
    (batch, channels, length), states = u.shape, A.shape[1]
    assert states <= 256, "selective_scan only supports state dimension <= 256"
    assert delta.shape == u.shape
    assert A.shape == (channels, states)
    assert B.shape == C.shape == (batch, states, length)
    return kernel("selective_scan", _reference, u, delta, A, B, C)


def _reference(u: Any, delta: Any, A: Any, B: Any, C: Any) -> Any:
    state, out = u.new_zeros(u.shape[0], u.shape[1], A.shape[1]), []
    for t in range(u.shape[2]):
        new = (delta[:, :, t] * u[:, :, t])[..., None] * B[:, None, :, t]
        state = torch.exp(delta[:, :, t, None] * A) * state + new
        out.append((state * C[:, None, :, t]).sum(-1))
    return torch.stack(out, 2)
