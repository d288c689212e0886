"""The Transformer's step as a few large operations, for acting on a CPU: only what one token needs.

Spectral scales, head scales and score scales are multiplied into the weights once, so this is a copy of the weights: it
must be remade when they change (`stale`). Equal to `Transformer.step` up to rounding. N actors, D width, H heads, S
slots, Dh head size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipelines.nets.cache import KVCache
from pipelines.nets.linear import SigmaLinear

if TYPE_CHECKING:
    from pipelines.nets.transformer import Transformer, TransformerBlock

Affine = tuple[Tensor, Tensor]
Norm = tuple[list[int], Tensor, Tensor, float]


class QuickStep:
    """A Transformer's `step` with its current weights. Requires LayerNorm and no logit clip: see `applies`."""

    def __init__(self, transformer: Transformer) -> None:
        self._transformer = transformer
        self._tensors = [*transformer.parameters(), *transformer.buffers()]
        self._versions = self._now()
        with torch.no_grad():
            self._layers = [_Layer(block) for block in transformer.blocks]  # type: ignore[arg-type]
        self._rope = transformer.settings.position == "rope"

    @staticmethod
    def applies(transformer: Transformer) -> bool:
        settings = transformer.settings
        return settings.norm == "layer" and settings.logit_clip is None

    def _now(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]

    @property
    def stale(self) -> bool:
        """Whether the weights have changed since."""
        return self._now() != self._versions

    def __call__(self, x_ND: Tensor, time_N: Tensor, memory: KVCache) -> Tensor:
        transformer = self._transformer
        x_ND = transformer._embed(x_ND[:, None], time_N[:, None])[:, 0]
        memory.begin_step()
        mask = memory.bias()
        n, heads = len(x_ND), memory.num_heads
        for number, layer in enumerate(self._layers):
            qkv = _linear(_normed(x_ND, layer.before_attention), layer.qkv).view(n, 3, heads, -1)
            q_NHD, k_NHD, v_NHD = qkv.unbind(1)
            if self._rope:
                q, k = transformer._turn(q_NHD[:, :, None], k_NHD[:, :, None], time_N[:, None])
                q_NHD, k_NHD = q[:, :, 0], k[:, :, 0]
            keys, values = memory.append_flat(number, k_NHD, v_NHD)
            scores = torch.baddbmm(mask, q_NHD.reshape(n * heads, 1, -1), keys.transpose(1, 2))
            mixed = torch.bmm(scores.softmax(-1), values).view(n, -1)
            x_ND = x_ND + _normed(_linear(mixed, layer.merge), layer.after_attention)
            inner = _linear(_normed(x_ND, layer.before_ff), layer.expand)
            inner = _normed(layer.activation(inner), layer.inside_ff)
            x_ND = x_ND + _linear(inner, layer.contract)
        return transformer.norm(x_ND)


class _Layer:
    """A block's weights as its step uses them."""

    def __init__(self, block: TransformerBlock) -> None:
        size = block.merge.weight.shape[1] // block.num_heads
        weight, bias = _affine(block.qkv)
        weight, bias = weight.clone(), bias.clone()
        weight[: size * block.num_heads] /= math.sqrt(size)
        bias[: size * block.num_heads] /= math.sqrt(size)
        self.qkv = weight, bias
        weight, bias = _affine(block.merge)
        if block.head_scale is not None:
            weight = weight * block.head_scale.flatten().repeat_interleave(size)
        self.merge = weight, bias
        self.expand, self.contract = _affine(block.expand), _affine(block.contract)
        self.before_attention, self.after_attention = _norm(block.before_attention), _norm(block.after_attention)
        self.before_ff, self.inside_ff = _norm(block.before_ff), _norm(block.inside_ff)
        self.activation = block.activation


def _affine(layer: nn.Module) -> Affine:
    assert isinstance(layer, SigmaLinear | nn.Linear)
    weight = layer.weight * layer.scale() if isinstance(layer, SigmaLinear) else layer.weight
    return weight.detach(), layer.bias.detach()


def _norm(layer: nn.Module) -> Norm | None:
    if not isinstance(layer, nn.LayerNorm):
        return None
    return list(layer.normalized_shape), layer.weight.detach(), layer.bias.detach(), layer.eps


def _linear(x: Tensor, affine: Affine) -> Tensor:
    return F.linear(x, *affine)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    shape, weight, bias, eps = norm
    return torch.layer_norm(x, shape, weight, bias, eps)
