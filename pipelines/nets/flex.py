"""FlexAttention: masks and changes of scores as functions of indices, in one kernel where it is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

if TYPE_CHECKING:
    from pipelines.nets.attention import Sight
    from pipelines.nets.packing import Packing


LEAST = 16  # numbers of a head that its kernels take


def attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, sight: Sight, packing: Packing | None) -> Any:
    """Causal attention (B, H, T, Dh) as `attention.dense`."""
    length, device = q_BHTD.shape[2], q_BHTD.device
    if packing is None:
        mask = _single(length, sight.window, sight.sink, device)
    else:
        mask = packing.keep(("flex", sight.window, sight.sink), lambda: _documents(sight, packing))
    run = _compiled() if device.type == "cuda" else flex_attention
    size = q_BHTD.shape[-1]
    q, k, v = (F.pad(x, (0, max(0, LEAST - size))) for x in (q_BHTD, k_BHTD, v_BHTD))
    return run(q, k, v, score_mod=_capping(sight.cap), block_mask=mask, scale=size**-0.5)[..., :size]


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention)  # lengths become variables once they vary: no kernel for each of them


@functools.cache
def _capping(cap: float | None) -> Callable[..., Tensor] | None:
    if cap is None:
        return None

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@functools.lru_cache(maxsize=16)
def _single(length: int, window: int | None, sink: int, device: torch.device) -> BlockMask:
    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) if window is None else (i >= j) & ((i - j < window) | (j < sink))

    return create_block_mask(seen, None, None, length, length, device=device)


def _documents(sight: Sight, packing: Packing) -> BlockMask:
    document, age = packing.document_RW, packing.age_RW
    window, sink = sight.window, sight.sink

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        together = (document[b, i] == document[b, j]) & (i >= j)
        return together if window is None else together & ((i - j < window) | (age[b, j] < sink))

    rows, width = document.shape
    return create_block_mask(seen, rows, None, width, width, device=document.device)
