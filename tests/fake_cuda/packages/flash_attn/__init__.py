"""A stand-in for flash-attn 2.8.3: the signatures of flash_attn_interface.py, what csrc/flash_attn/flash_api.cpp
refuses, and the definition of attention in place of kernels."""

from __future__ import annotations

from typing import Any

import torch

from tests.fake_cuda.device import documents, host_ends

__version__ = "2.8.3"


def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    assert q.dim() == 4
    _require_supported(q, k, v, dropout_p, softcap)
    batch, length = q.shape[:2]
    ends = [place * length for place in range(batch + 1)]
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    out = documents(*flat, ends, scale=softmax_scale, window=_limits(window_size, causal), cap=softcap)
    return out.unflatten(0, (batch, length))


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
) -> Any:  # fmt: skip
    assert q.dim() == 3
    _require_supported(q, k, v, dropout_p, softcap)
    ends = host_ends(cu_seqlens_q, max_seqlen_q, len(q))
    return documents(q, k, v, ends, scale=softmax_scale, window=_limits(window_size, causal), cap=softcap)


def _limits(window: tuple[int, int], causal: bool) -> tuple[int, int]:
    return (window[0], 0) if causal else window


def _require_supported(q: Any, k: Any, v: Any, dropout_p: float, softcap: float) -> None:
    assert q.is_cuda, "Input tensor must be on CUDA device"
    assert q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type"
    assert q.dtype == k.dtype == v.dtype, "query and key must have the same dtype"
    assert q.shape[-1] <= 256, "FlashAttention forward only supports head dimension at most 256"
    assert all(x.stride(-1) == 1 for x in (q, k, v)), "Input tensor must have contiguous last dimension"
    if softcap > 0:
        assert dropout_p == 0.0, "Softcapping does not support dropout for now"
