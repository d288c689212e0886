"""Causal attention behind two functions: `attend` over whole windows, `attend_cached` for one new token per actor.

Padding is on the right, so causality alone hides it from valid tokens. A backend takes (q, k, v, window, packing), the
first three (B, H, T, Dh), and returns (B, H, T, Dh); `dense` is the reference for all others. `find_obstacle` says
which backends can be used where, `choose` which is fastest.

B batch (or rows of packed windows), H heads, T time, S cache slots, Dh head size.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from pipelines.nets.compute import is_exporting, keep_constant
from pipelines.nets.packing import Packing

KEPT = 1 << 22  # maximum elements of a mask that is cached for other layers and updates: 16 of them are 64 MB
_call_kept = functools.lru_cache(maxsize=16)(operator.call)


def _keep(make: Callable[..., Tensor], size: int, *arguments: Any) -> Tensor:
    """Call `make(*arguments)` for a mask of `size` elements, from a cache of recent ones unless it is large. A compiled
    program always makes its own."""
    kept = size <= KEPT and not torch.compiler.is_compiling()
    return _call_kept(make, *arguments) if kept else make(*arguments)


@dataclass(frozen=True)
class AttentionWindow:
    """Tokens that a query sees besides causality: `size` tokens, itself included (None: all), and the first `sink`
    tokens of the context. Scores s become c tanh(s / c) with c = `logit_clip`, unless None. `dropout`: share of
    attention weights set to 0."""

    size: int | None = None
    sink: int = 0
    logit_clip: float | None = None
    dropout: float = 0.0

    def within(self, length: int) -> AttentionWindow:
        """Simplify for contexts of `length` tokens: drop limits that have no effect."""
        if self.size is None or self.size + self.sink >= length:
            return replace(self, size=None, sink=0)
        return self

    def make_mask(self, length: int, packing: Packing | None, device: torch.device) -> Tensor:
        """Make the mask of the keys that each query sees, bool: of a single context (T, T), or within each document of
        packed rows (R, 1, W, W)."""
        if packing is None:
            return _keep(self._make_causal, length * length, length, self.size, self.sink, device)

        def make() -> Tensor:
            document, index = packing.document_RW, packing.age_RW
            place = torch.arange(packing.width, device=document.device)
            age = place[:, None] - place
            seen = (document[:, :, None] == document[:, None, :]) & (age >= 0)
            if self.size is not None:
                seen &= (age < self.size) | (index < self.sink)[:, None, :]
            return seen[:, None]

        return packing.keep((self.size, self.sink), make)

    def make_blocks(self, length: int, packing: Packing | None, device: torch.device) -> BlockMask:
        """Make the mask of `make_mask` in the form that FlexAttention needs."""
        if packing is None:
            return self._make_causal_blocks(length, self.size, self.sink, device)

        def make() -> BlockMask:
            document, age, size, sink = packing.document_RW, packing.age_RW, self.size, self.sink

            def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                together = (document[b, i] == document[b, j]) & (i >= j)
                return together if size is None else together & ((i - j < size) | (age[b, j] < sink))

            rows, width = document.shape
            return create_block_mask(sees, rows, None, width, width, device=device)

        return packing.keep(("flex", self.size, self.sink), make)

    @staticmethod
    def _make_causal(length: int, size: int | None, sink: int, device: torch.device) -> Tensor:
        """Make a mask (T, T), bool: whether query i sees key j: 0 <= i - j < size, or j < sink."""
        key = torch.arange(length, device=device)
        query = key[:, None]
        return key <= query if size is None else (key <= query) & ((key > query - size) | (key < sink))

    @staticmethod
    def make_band(blocks: int, w: int, sink: int, device: torch.device) -> Tensor:
        """Make a mask (blocks, w, sink + 2 w), bool: which of the keys of `around` each query sees."""
        sink = min(sink, blocks * w)
        query = torch.arange(blocks * w, device=device).view(blocks, w, 1)
        begin = torch.arange(blocks, device=device)[:, None, None] * w
        near = begin - w + torch.arange(2 * w, device=device)
        first = torch.arange(sink, device=device).expand(blocks, 1, -1)
        far = query - first >= w  # only the part of the sink that the window does not reach
        return torch.cat((far, (near >= 0) & (near <= query) & (near > query - w)), -1)

    @staticmethod
    @functools.lru_cache(maxsize=16)
    def _make_causal_blocks(length: int, size: int | None, sink: int, device: torch.device) -> BlockMask:
        def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) if size is None else (i >= j) & ((i - j < size) | (j < sink))

        return create_block_mask(sees, None, None, length, length, device=device)

    @staticmethod
    @functools.cache
    def make_clip(cap: float | None) -> Callable[..., Tensor] | None:
        """Make the modification of scores by a logit clip."""
        # Cached: for another function, though it does the same, FlexAttention would be compiled again.
        if cap is None:
            return None

        def clip(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return cap * torch.tanh(score / cap)

        return clip


_Backend = Callable[[Tensor, Tensor, Tensor, AttentionWindow, Packing | None], Tensor]
HALF = (torch.bfloat16, torch.float16)
_FLEX_HEAD = 16  # minimum head size of FlexAttention's kernels
_MOST_HEAD = 256  # head size that flash-attn and torch's varlen kernel support


def dense(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, window: AttentionWindow, packing: Packing | None = None
) -> Tensor:
    """Compute attention by its definition."""
    return F.dropout(compute_weights(q_BHTD, k_BHTD, window, packing).to(v_BHTD.dtype), window.dropout) @ v_BHTD


def compute_weights(q_BHTD: Tensor, k_BHTD: Tensor, window: AttentionWindow, packing: Packing | None = None) -> Tensor:
    """Compute attention weights (B, H, T, T) before dropout, in float32 or better."""
    seen = window.make_mask(q_BHTD.shape[2], packing, q_BHTD.device)
    return _compute_scores(q_BHTD, k_BHTD, window.logit_clip).masked_fill(~seen, -math.inf).softmax(-1)


def _compute_scores(q: Tensor, k: Tensor, cap: float | None) -> Tensor:
    products = q @ k.transpose(-1, -2)
    scores = (products.float() if products.dtype in HALF else products) / math.sqrt(q.shape[-1])
    return scores if cap is None else cap * (scores / cap).tanh()


def sdpa(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, window: AttentionWindow, packing: Packing | None) -> Tensor:
    """Compute torch's fused attention: memory linear in T unless a window or packing requires a mask."""
    if window.size is None and packing is None:
        return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, dropout_p=window.dropout, is_causal=True)
    seen = window.make_mask(q_BHTD.shape[2], packing, q_BHTD.device)
    return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, attn_mask=seen, dropout_p=window.dropout)


def banded(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, window: AttentionWindow, packing: Packing | None) -> Tensor:
    """Compute sliding windows by torch's fused attention, in blocks of as many queries: time and memory linear in T.

    A block of w queries sees the w keys before it, its own, and the sink.
    """
    assert window.size is not None
    w, sink = window.size, window.sink
    batch, _, length, _ = q_BHTD.shape
    blocks = -(-length // w)
    q, k, v = (F.pad(x, (0, 0, 0, blocks * w - length)).unflatten(2, (blocks, w)) for x in (q_BHTD, k_BHTD, v_BHTD))

    def around(x: Tensor) -> Tensor:
        """Map (B, H, blocks, w, Dh) to (B, H, blocks, sink + 2 w, Dh): the sink, the previous block, the block."""
        before = F.pad(x[:, :, :-1], (0, 0, 0, 0, 1, 0))
        first = x.flatten(2, 3)[:, :, None, :sink].expand(-1, -1, blocks, -1, -1)
        return torch.cat((first, before, x), 3)

    seen = _keep(window.make_band, blocks * w * (sink + 2 * w), blocks, w, sink, q_BHTD.device)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, around(k), around(v)))  # (B blocks, H, ., Dh)
    seen = seen.expand(batch, -1, -1, -1).flatten(0, 1)[:, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=window.dropout)
    out = out.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)
    return out[:, :, :length]


def flash(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, window: AttentionWindow, packing: Packing | None) -> Tensor:
    """Compute attention with the package flash-attn (Dao 2023, arXiv 2307.08691)."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    left = -1 if window.size is None else window.size - 1
    options = {
        "causal": True,
        "window_size": (left, 0),
        "softcap": window.logit_clip or 0.0,
        "dropout_p": window.dropout,
    }
    if packing is None:
        out = flash_attn_func(*(x.transpose(1, 2) for x in (q_BHTD, k_BHTD, v_BHTD)), **options)
        return out.transpose(1, 2)
    longest, ends = packing.width, packing.cumulative
    parts = (packing.take_tokens(x) for x in (q_BHTD, k_BHTD, v_BHTD))
    return packing.put_tokens(flash_attn_varlen_func(*parts, ends, ends, longest, longest, **options))


def varlen(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, window: AttentionWindow, packing: Packing | None) -> Tensor:
    """Compute torch's own attention over documents of any lengths."""
    from torch.nn.attention.varlen import varlen_attn

    assert packing is not None
    left = -1 if window.size is None else window.size - 1
    longest, ends, size = packing.width, packing.cumulative, q_BHTD.shape[-1]
    q_NHD, k_NHD, v_NHD = (
        F.pad(packing.take_tokens(x), (0, -size % 8)) for x in (q_BHTD, k_BHTD, v_BHTD)
    )  # the kernel needs multiples of 8
    out_NHD = varlen_attn(q_NHD, k_NHD, v_NHD, ends, ends, longest, longest, scale=size**-0.5, window_size=(left, 0))
    assert isinstance(out_NHD, Tensor)
    return packing.put_tokens(out_NHD[..., :size])


def flex(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, window: AttentionWindow, packing: Packing | None) -> Tensor:
    """Compute FlexAttention: masks and the logit clip as functions of indices, in one kernel, compiled on CUDA."""
    device, size = q_BHTD.device, q_BHTD.shape[-1]
    mask = window.make_blocks(q_BHTD.shape[2], packing, device)
    run = _compile_flex() if device.type == "cuda" else flex_attention
    q, k, v = (F.pad(x, (0, max(0, _FLEX_HEAD - size))) for x in (q_BHTD, k_BHTD, v_BHTD))
    out: Tensor = run(q, k, v, score_mod=window.make_clip(window.logit_clip), block_mask=mask, scale=size**-0.5)[
        ..., :size
    ]
    return out


@functools.cache
def _compile_flex() -> Any:
    return torch.compile(flex_attention)  # lengths become dynamic once they vary: no kernel per length


BACKENDS: dict[str, _Backend] = {
    "dense": dense,
    "sdpa": sdpa,
    "banded": banded,
    "flex": flex,
    "flash": flash,
    "varlen": varlen,
}


def find_obstacle(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    window: AttentionWindow,
    *,
    packed: bool = False,
    head: int = 64,
) -> str | None:
    """Find out why backend `name` cannot be used for this, with heads of size `head`, or None if it can."""
    half = dtype in HALF
    if name in ("flash", "varlen", "flex") and device.type != "cuda":
        return "needs CUDA to be fast" if name == "flex" else "needs CUDA"
    if name in ("flash", "varlen", "flex") and (missing := lacks(name)):
        return missing
    if name in ("flash", "varlen") and not half:
        return "needs bf16"
    if name in ("flash", "varlen") and window.sink:
        return "does not support sinks"
    if name in ("flash", "varlen") and head > _MOST_HEAD:
        return f"supports heads of at most {_MOST_HEAD}"
    if name == "flash" and window.logit_clip is not None and window.dropout:
        return "does not support dropout with a logit clip"
    if name in ("sdpa", "banded", "varlen") and window.logit_clip is not None:
        return "does not support a logit clip"
    if name in ("flex", "varlen") and window.dropout:
        return "does not support dropout"
    if name == "varlen" and not packed:
        return "is for packed rows"
    if name == "banded" and packed:
        return "is not for packed rows"
    if name == "banded" and window.size is None:
        return "is for sliding windows"
    return None


def list_obstacles(device: torch.device) -> dict[str, str | None]:
    """List why each backend can never be used on `device`; None: it can."""
    best = {"banded": AttentionWindow(size=1)}
    return {
        name: find_obstacle(name, device, torch.bfloat16, best.get(name, AttentionWindow()), packed=name == "varlen")
        for name in BACKENDS
    }


@keep_constant
def lacks(name: str) -> str | None:
    """Find what CUDA backend `name` needs and this installation lacks; None: nothing."""
    if name == "flex":
        return None if find_spec("triton") is not None else "triton is not installed"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return "needs a GPU of the Ampere generation, or later"
    if name == "varlen":
        has_windows = False
        if find_spec("torch.nn.attention.varlen") is not None:
            import inspect

            from torch.nn.attention.varlen import varlen_attn

            has_windows = {"window_size", "scale"} <= inspect.signature(varlen_attn).parameters.keys()
        return None if has_windows else "this torch has no torch.nn.attention.varlen with windows"
    if find_spec("flash_attn") is None:
        return 'flash-attn is not installed (pip install "amago[flash]")'
    try:
        import flash_attn  # noqa: F401
    except ImportError as error:  # built without CUDA, or for another torch
        return f"flash-attn cannot be imported ({error})"
    return None


def choose(
    name: str, device: torch.device, dtype: torch.dtype, window: AttentionWindow, *, length: int,
    packed: bool = False, head: int = 64,
) -> str:  # fmt: skip
    """Choose a backend: the one called `name` where it can be used, otherwise (and for "auto") the fastest."""
    if name != "auto" and find_obstacle(name, device, dtype, window, packed=packed, head=head) is None:
        return name
    # torch's own kernels are cuDNN's on Hopper, which flash-attn 2 does not reach, and flash-attn's on Ampere.
    is_whole = window.size is None and not packed
    wishes = ["sdpa"] if is_whole else ["flash", "varlen"]
    if window.size is not None and window.size * 4 <= length:
        wishes += ["flex", "banded"]
    if window.logit_clip is not None:
        wishes += ["flash", "flex"]
    wishes += ["sdpa", "dense"]
    return next(wish for wish in wishes if find_obstacle(wish, device, dtype, window, packed=packed, head=head) is None)


def attend(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    *,
    window: AttentionWindow | None = None,
    packing: Packing | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute causal self-attention -> (B, H, T, Dh), within each document of packed rows."""
    length, device = q_BHTD.shape[2], q_BHTD.device
    window = (window or AttentionWindow()).within(length)
    q_BHTD, k_BHTD = q_BHTD.to(v_BHTD.dtype), k_BHTD.to(v_BHTD.dtype)
    computing: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if torch.is_autocast_enabled(device.type):  # backends are chosen by, and compute in, their inputs' dtype
        dtype = torch.get_autocast_dtype(device.type)
        if device.type == "cpu" and torch.is_grad_enabled():
            dtype = torch.float32  # the backward of the CPU's half-precision kernel is several times slower
        q_BHTD, k_BHTD, v_BHTD = (x.to(dtype) for x in (q_BHTD, k_BHTD, v_BHTD))
        computing = torch.autocast(device.type, enabled=False)
    packed, head = packing is not None, q_BHTD.shape[-1]
    name = choose(backend, device, q_BHTD.dtype, window, length=length, packed=packed, head=head)
    with computing:
        return BACKENDS[name](q_BHTD, k_BHTD, v_BHTD, window, packing)


@contextlib.contextmanager
def avoid_plans(device: torch.device) -> Iterator[None]:
    """Make a context in which torch leaves attention to other kernels than cuDNN's. That makes a plan for each shape,
    which takes 38 ms on an H200, and each step of acting has a token more than the one before."""
    if device.type != "cuda":
        yield
        return
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


def attend_cached(
    q_BHD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, visible_BS: Tensor, cap: float | None = None
) -> Tensor:
    """Attend with one query per actor to the occupied slots of its cache -> (B, H, Dh)."""
    q_BH1D, seen = q_BHD[:, :, None].to(k_BHSD.dtype), visible_BS[:, None, None]
    if cap is None and not is_exporting():  # ONNX would transpose all keys, twice
        return F.scaled_dot_product_attention(q_BH1D, k_BHSD, v_BHSD, attn_mask=seen)[:, :, 0]
    scores = _compute_scores(q_BH1D, k_BHSD, cap)
    return (scores.masked_fill(~seen, -math.inf).softmax(-1).to(v_BHSD.dtype) @ v_BHSD)[:, :, 0]
