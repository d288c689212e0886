"""FlexAttention: masks and score modifications as functions of indices, in one kernel where compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

if TYPE_CHECKING:
    from pipelines.nets.attention import AttentionWindow
    from pipelines.nets.packing import Packing


_LEAST = 16  # minimum head size of its kernels


def attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, window: AttentionWindow, packing: Packing | None) -> Any:
    """Compute causal attention (B, H, T, Dh), as `attention.dense`."""
    length, device = q_BHTD.shape[2], q_BHTD.device
    if packing is None:
        mask = _single(length, window.size, window.sink, device)
    else:
        mask = packing.keep(("flex", window.size, window.sink), lambda: _documents(window, packing))
    run = _compiled() if device.type == "cuda" else flex_attention
    size = q_BHTD.shape[-1]
    q, k, v = (F.pad(x, (0, max(0, _LEAST - size))) for x in (q_BHTD, k_BHTD, v_BHTD))
    return run(q, k, v, score_mod=_capping(window.logit_clip), block_mask=mask, scale=size**-0.5)[..., :size]


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention)  # lengths become dynamic once they vary: no kernel per length


@functools.cache
def _capping(cap: float | None) -> Callable[..., Tensor] | None:
    if cap is None:
        return None

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@functools.lru_cache(maxsize=16)
def _single(length: int, size: int | None, sink: int, device: torch.device) -> BlockMask:
    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) if size is None else (i >= j) & ((i - j < size) | (j < sink))

    return create_block_mask(seen, None, None, length, length, device=device)


def _documents(window: AttentionWindow, packing: Packing) -> BlockMask:
    document, age = packing.document_RW, packing.age_RW
    size, sink = window.size, window.sink

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        together = (document[b, i] == document[b, j]) & (i >= j)
        return together if size is None else together & ((i - j < size) | (age[b, j] < sink))

    rows, width = document.shape
    return create_block_mask(seen, rows, None, width, width, device=document.device)
