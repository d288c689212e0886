"""Causal Transformer: pre-norm with the two extra norms and the head scale of NormFormer (Shleifer et al. 2021, arXiv
2110.09456), sigma-reparametrised linears (Zhai et al. 2023), leaky ReLU; each can be disabled or replaced. And
its baselines without memory, which must lose wherever memory matters.

B batch, N actors, T time, D width, H heads, S slots, Dh head size. The residual stream has the parameters' precision
even under autocast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipelines.config.model import FeedForwardSettings, IdentitySettings, TransformerSettings
from pipelines.nets import init
from pipelines.nets.attention import AttentionWindow, attend, attend_cached, compute_weights, dense
from pipelines.nets.cache import KVCache, NoMemory
from pipelines.nets.compute import Linear
from pipelines.nets.linear import SigmaLinear, make_activation, make_norm, update_spectral_norms
from pipelines.nets.packing import Packing
from pipelines.nets.sequence import SequenceEncoder, Stepper


def compute_angles(time: Tensor, size: int) -> Tensor:
    """Compute time / 10000^(2i / size) for i < size / 2, rounded up: (..., ceil(size / 2))."""
    rate = torch.exp(torch.arange(0, size, 2, device=time.device) * (-math.log(1e4) / size))
    return time[..., None] * rate


class Sinusoid(nn.Module):
    """Sines and cosines of the time index (Vaswani et al. 2017, section 3.5)."""

    def __init__(self, width: int, rows: int = 1024) -> None:
        super().__init__()
        self.width = width
        table = torch.empty(rows, width) if init.is_outline() else self._rows(torch.arange(rows))
        self.register_buffer("table", table, persistent=False)
        self.table: Tensor

    def _rows(self, time: Tensor) -> Tensor:
        phase = compute_angles(time, self.width)
        return torch.stack((phase.sin(), phase.cos()), -1).flatten(-2)[..., : self.width]

    def forward(self, time_BT: Tensor) -> Tensor:
        if time_BT.is_cuda or torch.compiler.is_compiling():  # where reading the times would sync the device
            return self._rows(time_BT)
        last = int(time_BT.max()) if time_BT.numel() else 0
        while last >= len(self.table):  # grown by doubling, so that a step costs one lookup
            self.table = self._rows(torch.arange(2 * len(self.table), device=self.table.device))
        return self.table[time_BT]


class LearnedTable(nn.Module):
    """A learned vector per time index. Padding may have indices beyond the table and reads the last row."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(init.fill_positions(torch.empty(rows, width)))

    def forward(self, time_BT: Tensor) -> Tensor:
        return self.weight[time_BT.clamp_max(len(self.weight) - 1)]


def rotate(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions (Su et al. 2021, arXiv 2104.09864): rotate (x_i, x_{i + Dh/2}) by the time's angles."""
    first, second = x_BHTD.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
SEEN = 64  # last queries of a window whose attention is logged
_Affine = tuple[Tensor, Tensor]
_Norm = tuple[list[int], Tensor, Tensor, float]


class TransformerBlock(nn.Module):
    """Transformer block: x + norm(attention(norm(x))), then x + linear(norm(act(linear(norm(x)))))."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        width, inner = settings.d_model, settings.d_ff
        self.dropout = settings.dropout
        norm = partial(make_norm, settings.norm)
        extra: Callable[[int], nn.Module] = norm if settings.normformer else nn.Identity
        plain = partial(init.make_layer, Linear, fill=init.fill_stream)
        linear = SigmaLinear if settings.sigma_reparam else plain
        self.num_heads, self.dropout_qkv = settings.num_heads, settings.dropout_qkv
        self.before_attention, self.after_attention = norm(width), extra(width)
        self.qkv, self.merge = linear(width, 3 * width), linear(width, width)
        self.head_scale = nn.Parameter(torch.ones(settings.num_heads, 1, 1)) if settings.head_scale else None
        self.before_ff, self.inside_ff = norm(width), extra(inner)
        self.expand, self.contract = linear(width, inner), linear(inner, width)
        self.activation = make_activation(settings.activation)

    def forward(self, x_BTD: Tensor, attention: Attention, dropout: bool = False) -> Tensor:
        """Apply the block. `attention` maps q, k, v (B, H, T, Dh) to (B, H, T, Dh)."""
        x_BTD = x_BTD + self._mix(x_BTD, attention, dropout)
        return x_BTD + F.dropout(self._feed(x_BTD), self.dropout, dropout)

    def _mix(self, x_BTD: Tensor, attention: Attention, dropout: bool) -> Tensor:
        batch, length, width = x_BTD.shape
        qkv = F.dropout(self.qkv(self.before_attention(x_BTD)), self.dropout_qkv, dropout)
        qkv = qkv.view(batch, length, 3, self.num_heads, -1)
        q_BHTD, k_BHTD, v_BHTD = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed_BHTD = attention(q_BHTD, k_BHTD, v_BHTD)
        if self.head_scale is not None:
            mixed_BHTD = mixed_BHTD * self.head_scale
        return self.after_attention(self.merge(mixed_BHTD.transpose(1, 2).reshape(batch, length, width)))

    def _feed(self, x_BTD: Tensor) -> Tensor:
        return self.contract(self.inside_ff(self.activation(self.expand(self.before_ff(x_BTD)))))


class Transformer(SequenceEncoder):
    """Causal Transformer."""

    def __init__(self, input_size: int, settings: TransformerSettings) -> None:
        super().__init__()
        self.settings = settings
        self.output_size = settings.d_model
        self.embed = init.make_linear(input_size, settings.d_model, gain=1.0)
        self.position: nn.Module | None = None
        if settings.position in ("sinusoid", "both"):
            self.position = Sinusoid(settings.d_model)
        elif settings.position == "learned":
            self.position, self.max_time = LearnedTable(settings.d_model, settings.max_time), settings.max_time
        self.blocks = nn.ModuleList(TransformerBlock(settings) for _ in range(settings.num_layers))
        self.norm = make_norm(settings.norm, settings.d_model)

    @property
    def window(self) -> AttentionWindow:
        """The attention window of the settings, without dropout."""
        settings = self.settings
        return AttentionWindow(size=settings.window, sink=settings.sink, logit_clip=settings.logit_clip)

    def forward(self, x_BTD: Tensor, time_BT: Tensor, packing: Packing | None = None) -> Tensor:
        x_BTD = F.dropout(self._embed(x_BTD, time_BT), self.settings.dropout, self.training)
        backend = self.settings.attention
        window = replace(self.window, dropout=self.settings.dropout_attention if self.training else 0.0)
        turn = self._make_turn(time_BT)

        def attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
            q_BHTD, k_BHTD = turn(q_BHTD, k_BHTD)
            return attend(q_BHTD, k_BHTD, v_BHTD, window=window, packing=packing, backend=backend)

        for block in self.blocks:
            x_BTD = self.run(block, x_BTD, attention, self.training)
        return self.norm(x_BTD)

    def memory(
        self, *, num_actors: int, capacity: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> KVCache:
        settings = self.settings
        sink = min(settings.sink, capacity - 1) if settings.window else 0
        return KVCache(
            num_layers=settings.num_layers,
            num_actors=num_actors,
            num_heads=settings.num_heads,
            head_size=settings.d_model // settings.num_heads,
            ring=min(capacity - sink, settings.window or capacity),
            sink=sink,
            device=device,
            dtype=dtype,
        )

    def step(self, x_ND: Tensor, time_N: Tensor, memory: KVCache) -> Tensor:
        time_N1 = time_N[:, None]
        x_N1D = self._embed(x_ND[:, None], time_N1)
        memory.begin_step()
        turn = self._make_turn(time_N1)
        for layer, block in enumerate(self.blocks):

            def attention(q_NH1D: Tensor, k_NH1D: Tensor, v_NH1D: Tensor, layer: int = layer) -> Tensor:
                q_NH1D, k_NH1D = turn(q_NH1D, k_NH1D)
                keys, values = memory.append(layer, k_NH1D[:, :, 0], v_NH1D[:, :, 0])
                cap = self.settings.logit_clip
                return attend_cached(q_NH1D[:, :, 0], keys, values, memory.visible_NS, cap)[:, :, None]

            x_N1D = block(x_N1D, attention)
        return self.norm(x_N1D)[:, 0]

    def stepper(self) -> Stepper:
        """Make a step with scales multiplied into weights, where that can be done."""
        return QuickStep(self) if QuickStep.applies(self) else super().stepper()

    def prefill(self, x_NTD: Tensor, time_NT: Tensor, lengths_N: Tensor, memory: KVCache) -> None:
        x_NTD = self._embed(x_NTD, time_NT)
        window = AttentionWindow(size=memory.ring, sink=memory.sink, logit_clip=self.settings.logit_clip)
        turn = self._make_turn(time_NT)
        for layer, block in enumerate(self.blocks):

            def attention(q_NHTD: Tensor, k_NHTD: Tensor, v_NHTD: Tensor, layer: int = layer) -> Tensor:
                q_NHTD, k_NHTD = turn(q_NHTD, k_NHTD)
                memory.fill(layer, k_NHTD, v_NHTD, lengths_N)
                return attend(q_NHTD, k_NHTD, v_NHTD, window=window, backend=self.settings.attention)

            x_NTD = block(x_NTD, attention)

    def update_statistics(self) -> None:
        update_spectral_norms(self)

    def inspect(self, x_BTD: Tensor, time_BT: Tensor) -> dict[str, Tensor]:
        """Compute the mean entropy of attention, in nats, over heads and the last queries."""
        x_BTD = self._embed(x_BTD, time_BT)
        window, entropies = self.window.within(x_BTD.shape[1]), []
        turn = self._make_turn(time_BT)

        def attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
            q_BHTD, k_BHTD = turn(q_BHTD, k_BHTD)
            share = compute_weights(q_BHTD, k_BHTD, window)[:, :, -SEEN:]
            entropies.append(torch.special.entr(share).sum(-1).mean())
            return dense(q_BHTD, k_BHTD, v_BHTD, window)

        for block in self.blocks:
            x_BTD = block(x_BTD, attention)
        return {"attention_entropy": torch.stack(entropies).mean()}

    def _embed(self, x_BTD: Tensor, time_BT: Tensor) -> Tensor:
        x_BTD = self.embed(x_BTD).to(self.embed.weight.dtype)
        return x_BTD if self.position is None else x_BTD + self.position(time_BT)

    def _make_turn(self, time_BT: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Make the function that applies rotary positions, if the encoder has them, to queries and keys (B, H, T, Dh).
        The angles are the same for all layers."""
        if self.settings.position not in ("rope", "both"):
            return lambda q_BHTD, k_BHTD: (q_BHTD, k_BHTD)
        phase = compute_angles(time_BT, self.settings.d_model // self.settings.num_heads)[:, None]
        cos, sin = phase.cos(), phase.sin()
        if self.settings.position == "both":
            # Every other head finds steps by their time index alone, which a rotation would hide.
            heads = (torch.arange(self.settings.num_heads, device=cos.device) % 2 == 0)[:, None, None]
            cos, sin = torch.where(heads, cos, 1.0), torch.where(heads, sin, 0.0)
        return lambda q_BHTD, k_BHTD: (rotate(q_BHTD, cos, sin), rotate(k_BHTD, cos, sin))


class QuickStep:
    """A Transformer's `step` as a few large operations, for acting: only what one token needs. Equal to it up to
    rounding. Requires LayerNorm and no logit clip: see `applies`.

    Spectral scales, head scales and score scales are multiplied into the weights once, and cast to the precision that
    autocast has then, so this is a copy of the weights: it must be remade when they change (`stale`).
    """

    def __init__(self, transformer: Transformer) -> None:
        self._transformer = transformer
        self._tensors = [*transformer.parameters(), *transformer.buffers()]
        # Optimizers change weights in place, which raises a tensor's version: comparing versions costs no pass over
        # the weights.
        self._versions = self._now()
        with torch.no_grad():
            weight = transformer.embed.weight
            kind = weight.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
            self._layers = [_Layer(block, dtype) for block in transformer.blocks]  # type: ignore[arg-type]
        self._rope = transformer.settings.position in ("rope", "both")

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
        turn = transformer._make_turn(time_N[:, None])
        with torch.autocast(x_ND.device.type, enabled=False):
            attention = self._make_attention(memory, x_ND.device)
            for number, layer in enumerate(self._layers):
                qkv = F.linear(layer.normalize(x_ND, layer.before_attention), *layer.qkv)
                q_NHD, k_NHD, v_NHD = qkv.view(len(x_ND), 3, memory.num_heads, -1).unbind(1)
                if self._rope:
                    q, k = turn(q_NHD[:, :, None], k_NHD[:, :, None])
                    q_NHD, k_NHD = q[:, :, 0].to(v_NHD.dtype), k[:, :, 0].to(v_NHD.dtype)
                mixed = F.linear(attention(number, q_NHD, k_NHD, v_NHD), *layer.merge)
                x_ND = x_ND + layer.normalize(mixed, layer.after_attention)
                inner = layer.activation(F.linear(layer.normalize(x_ND, layer.before_ff), *layer.expand))
                x_ND = x_ND + F.linear(layer.normalize(inner, layer.inside_ff), *layer.contract)
            return transformer.norm(x_ND)

    @staticmethod
    def _make_attention(memory: KVCache, device: torch.device) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        """Make the function that appends a layer's keys and values (N, H, Dh) to the memory, and attends to it: to
        (N, H Dh). A CPU multiplies matrices of all actors and heads; a device has a kernel for the whole."""
        if device.type == "cpu":
            mask = memory.bias()

            def attend_flat(layer: int, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor) -> Tensor:
                keys, values = memory.append_flat(layer, k_NHD, v_NHD)
                scores = torch.baddbmm(mask, q_NHD.reshape(len(mask), 1, -1), keys.transpose(1, 2))
                return torch.bmm(scores.softmax(-1), values).view(len(q_NHD), -1)

            return attend_flat
        seen = memory.visible_NS[:, None, None]

        def attend_at_once(layer: int, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor) -> Tensor:
            keys, values = memory.append(layer, k_NHD, v_NHD)
            q_NH1D = q_NHD[:, :, None]
            return F.scaled_dot_product_attention(q_NH1D, keys, values, attn_mask=seen, scale=1.0).view(len(q_NHD), -1)

        return attend_at_once


class _Layer:
    """A block's weights as its step uses them."""

    def __init__(self, block: TransformerBlock, dtype: torch.dtype) -> None:
        self.dtype = dtype
        size = block.merge.weight.shape[1] // block.num_heads
        weight, bias = self._read_affine(block.qkv)
        weight, bias = weight.clone(), bias.clone()
        weight[: size * block.num_heads] /= math.sqrt(size)
        bias[: size * block.num_heads] /= math.sqrt(size)
        self.qkv = weight.to(dtype), bias.to(dtype)
        weight, bias = self._read_affine(block.merge)
        if block.head_scale is not None:
            weight = weight * block.head_scale.flatten().repeat_interleave(size)
        self.merge = weight.to(dtype), bias.to(dtype)
        weight, bias = self._read_affine(block.expand)
        self.expand = weight.to(dtype), bias.to(dtype)
        weight, bias = self._read_affine(block.contract)
        self.contract = weight.to(dtype), bias.to(dtype)
        self.before_attention, self.after_attention = (
            self._read_norm(block.before_attention),
            self._read_norm(block.after_attention),
        )
        self.before_ff, self.inside_ff = self._read_norm(block.before_ff), self._read_norm(block.inside_ff)
        self.activation = block.activation

    @staticmethod
    def _read_affine(layer: nn.Module) -> _Affine:
        assert isinstance(layer, SigmaLinear | nn.Linear)
        weight = layer.weight * layer.scale() if isinstance(layer, SigmaLinear) else layer.weight
        return weight.detach(), layer.bias.detach()

    @staticmethod
    def _read_norm(layer: nn.Module) -> _Norm | None:
        if not isinstance(layer, nn.LayerNorm):
            return None
        return list(layer.normalized_shape), layer.weight.detach(), layer.bias.detach(), layer.eps

    def normalize(self, x: Tensor, norm: _Norm | None) -> Tensor:
        """Normalise in the parameters' precision, to that of products."""
        return (x if norm is None else torch.layer_norm(x.to(norm[1].dtype), *norm)).to(self.dtype)


class _MemoryFree(SequenceEncoder):
    """Base of encoders that see one token at a time, without time or past."""

    def memory(
        self, *, num_actors: int, capacity: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> NoMemory:
        return NoMemory()

    def prefill(self, x_NTD: Tensor, time_NT: Tensor, lengths_N: Tensor, memory: Any) -> None:
        pass


class FeedForwardBlock(nn.Module):
    """Residual block: x + act(norm(linear(act(norm(linear(x))))))."""

    def __init__(self, settings: FeedForwardSettings) -> None:
        super().__init__()
        width, inner, kind = settings.d_model, settings.d_ff, settings.norm
        self.dropout, self.activation = settings.dropout, make_activation(settings.activation)
        self.expand, self.contract = init.make_linear(width, inner), init.make_linear(inner, width)
        self.inner_norm, self.norm = (nn.Identity() if kind == "none" else make_norm(kind, n) for n in (inner, width))

    def forward(self, x: Tensor, dropout: bool) -> Tensor:
        inner = F.dropout(self.activation(self.inner_norm(self.expand(x))), self.dropout, dropout)
        return x + F.dropout(self.activation(self.norm(self.contract(inner))), self.dropout, dropout)


class FeedForward(_MemoryFree):
    """A residual network just as wide and deep as a Transformer, so that a Transformer's advantage over it is due to
    memory (AMAGO's FFTrajEncoder)."""

    def __init__(self, input_size: int, settings: FeedForwardSettings) -> None:
        super().__init__()
        self.output_size, self.dropout = settings.d_model, settings.dropout
        self.embed, self.activation = (
            init.make_linear(input_size, settings.d_model),
            make_activation(settings.activation),
        )
        self.blocks = nn.ModuleList(FeedForwardBlock(settings) for _ in range(settings.num_layers))
        self.last = init.make_linear(settings.d_model, settings.d_model, gain=1.0)
        self.norm = nn.LayerNorm(settings.d_model)

    def forward(self, x_BTD: Tensor, time_BT: Tensor, packing: Packing | None = None) -> Tensor:
        return self._encode(x_BTD, self.training)

    def step(self, x_ND: Tensor, time_N: Tensor, memory: Any) -> Tensor:
        return self._encode(x_ND, False)

    def _encode(self, x: Tensor, dropout: bool) -> Tensor:
        embedded = self.activation(self.embed(x)).to(self.embed.weight.dtype)
        x = F.dropout(embedded, self.dropout, dropout)
        for block in self.blocks:
            x = self.run(block, x, dropout)
        return F.dropout(self.norm(self.last(x)), self.dropout, dropout)


class Identity(_MemoryFree):
    """The token, unchanged."""

    def __init__(self, input_size: int, settings: IdentitySettings) -> None:
        super().__init__()
        self.output_size = input_size

    def forward(self, x_BTD: Tensor, time_BT: Tensor, packing: Packing | None = None) -> Tensor:
        return x_BTD

    def step(self, x_ND: Tensor, time_N: Tensor, memory: Any) -> Tensor:
        return x_ND
