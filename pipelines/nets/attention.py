"""Causal attention behind two functions: `attend` over whole windows, `attend_cached` for one new token an actor.

Padding stands on the right, so causality alone keeps real tokens from seeing it. A backend is a function
(q, k, v, window) -> out, all (B, H, T, Dh); one that needs something special joins `BACKENDS` and `choose`.
B batch, H heads, T time, S cache slots, Dh head size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Backend = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]


@functools.lru_cache(maxsize=16)
def visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """(T, T) bool: whether query i sees key j: 0 <= i - j < window."""
    index = torch.arange(length, device=device)
    age = index[:, None] - index[None, :]
    return (age >= 0) if window is None else (age >= 0) & (age < window)


def sdpa(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, window: int | None) -> Tensor:
    """torch's fused attention: memory linear in T where no window forces a mask."""
    length = q_BHTD.shape[2]
    if window is None or window >= length:
        return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
    mask = visible(length, window, q_BHTD.device)
    return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, attn_mask=mask)


def dense(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, window: int | None) -> Tensor:
    """Attention as it is written on paper: the yardstick of every other backend."""
    scores = q_BHTD @ k_BHTD.transpose(-1, -2) / math.sqrt(q_BHTD.shape[-1])
    scores = scores.masked_fill(~visible(q_BHTD.shape[2], window, q_BHTD.device), -math.inf)
    return scores.softmax(-1) @ v_BHTD


BACKENDS: dict[str, Backend] = {"sdpa": sdpa, "dense": dense}


def choose(name: str) -> Backend:
    """The backend called `name`; "auto" takes the fastest that runs everywhere."""
    return BACKENDS["sdpa" if name == "auto" else name]


def attend(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, *, window: int | None = None, backend: str = "auto"
) -> Tensor:
    """Causal self-attention -> (B, H, T, Dh); a query sees itself and at most `window` - 1 tokens before it."""
    return choose(backend)(q_BHTD, k_BHTD, v_BHTD, window)


def attend_cached(q_BHD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, visible_BS: Tensor) -> Tensor:
    """One query an actor against the slots of its cache that hold a token -> (B, H, Dh)."""
    out = F.scaled_dot_product_attention(q_BHD[:, :, None], k_BHSD, v_BHSD, attn_mask=visible_BS[:, None, None])
    return out[:, :, 0]
