"""Causal Transformer: pre-norm with the two extra norms and the head scale of NormFormer (Shleifer et al. 2021, arXiv
2110.09456), sigma-reparametrised linears (Zhai et al. 2023), leaky ReLU; each can be disabled or replaced.

B batch, N actors, T time, D width, H heads, Dh head size. The residual stream has the parameters' precision even under
autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipelines.config.encoders import BlockSettings, TransformerSettings
from pipelines.nets import init
from pipelines.nets.activation import activation
from pipelines.nets.attention import AttentionWindow, attend, attend_cached, dense, weights
from pipelines.nets.cache import KVCache
from pipelines.nets.linear import SigmaLinear, iterate
from pipelines.nets.packing import Packing
from pipelines.nets.positions import LearnedTable, Sinusoid, rotate
from pipelines.nets.sequence import SequenceEncoder, Stepper
from pipelines.nets.stepping import QuickStep

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
SEEN = 64  # last queries of a window whose attention is logged


class TransformerBlock(nn.Module):
    """Transformer block: x + norm(attention(norm(x))), then x + linear(norm(act(linear(norm(x))))); only the latter for
    settings that are not a Transformer's."""

    def __init__(self, settings: BlockSettings) -> None:
        super().__init__()
        width, inner = settings.d_model, settings.d_ff
        self.dropout = settings.dropout
        extra = norm_of(settings) if settings.normformer else nn.Identity
        linear = SigmaLinear if settings.sigma_reparam else init.stream_linear
        if isinstance(settings, TransformerSettings):
            self.num_heads, self.dropout_qkv = settings.num_heads, settings.dropout_qkv
            self.before_attention, self.after_attention = norm_of(settings)(width), extra(width)
            self.qkv, self.merge = linear(width, 3 * width), linear(width, width)
            self.head_scale = nn.Parameter(torch.ones(settings.num_heads, 1, 1)) if settings.head_scale else None
        self.before_ff, self.inside_ff = norm_of(settings)(width), extra(inner)
        self.expand, self.contract = linear(width, inner), linear(inner, width)
        self.activation = activation(settings.activation)

    def forward(self, x_BTD: Tensor, attention: Attention | None, dropout: bool = False) -> Tensor:
        """Apply the block. `attention` maps q, k, v (B, H, T, Dh) to (B, H, T, Dh); None: no attention."""
        if attention is not None:
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


def norm_of(settings: BlockSettings) -> type[nn.LayerNorm | nn.RMSNorm]:
    return nn.LayerNorm if settings.norm == "layer" else nn.RMSNorm


class Transformer(SequenceEncoder):
    """Causal Transformer."""

    def __init__(self, input_size: int, settings: TransformerSettings) -> None:
        super().__init__()
        self.settings = settings
        self.output_size = settings.d_model
        self.embed = init.linear(input_size, settings.d_model, gain=1.0)
        self.position: nn.Module | None = None
        if settings.position == "sinusoid":
            self.position = Sinusoid(settings.d_model)
        elif settings.position == "learned":
            self.position, self.max_time = LearnedTable(settings.d_model, settings.max_time), settings.max_time
        self.blocks = nn.ModuleList(TransformerBlock(settings) for _ in range(settings.num_layers))
        self.norm = norm_of(settings)(settings.d_model)

    @property
    def window(self) -> AttentionWindow:
        """Return the attention window of the settings, without dropout."""
        settings = self.settings
        return AttentionWindow(size=settings.window, sink=settings.sink, logit_clip=settings.logit_clip)

    def forward(self, x_BTD: Tensor, time_BT: Tensor, packing: Packing | None = None) -> Tensor:
        x_BTD = F.dropout(self._embed(x_BTD, time_BT), self.settings.dropout, self.training)
        backend = self.settings.attention
        window = replace(self.window, dropout=self.settings.dropout_attention if self.training else 0.0)

        def attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
            q_BHTD, k_BHTD = self._turn(q_BHTD, k_BHTD, time_BT)
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
        for layer, block in enumerate(self.blocks):

            def attention(q_NH1D: Tensor, k_NH1D: Tensor, v_NH1D: Tensor, layer: int = layer) -> Tensor:
                q_NH1D, k_NH1D = self._turn(q_NH1D, k_NH1D, time_N1)
                keys, values = memory.append(layer, k_NH1D[:, :, 0], v_NH1D[:, :, 0])
                cap = self.settings.logit_clip
                return attend_cached(q_NH1D[:, :, 0], keys, values, memory.visible_NS, cap)[:, :, None]

            x_N1D = block(x_N1D, attention)
        return self.norm(x_N1D)[:, 0]

    def stepper(self) -> Stepper:
        """Return a step with scales multiplied into weights, where that is known to be faster."""
        quick = QuickStep.applies(self) and self.embed.weight.device.type == "cpu"
        return QuickStep(self) if quick and not torch.is_autocast_enabled("cpu") else super().stepper()

    def prefill(self, x_NTD: Tensor, time_NT: Tensor, lengths_N: Tensor, memory: KVCache) -> None:
        x_NTD = self._embed(x_NTD, time_NT)
        window = AttentionWindow(size=memory.ring, sink=memory.sink, logit_clip=self.settings.logit_clip)
        for layer, block in enumerate(self.blocks):

            def attention(q_NHTD: Tensor, k_NHTD: Tensor, v_NHTD: Tensor, layer: int = layer) -> Tensor:
                q_NHTD, k_NHTD = self._turn(q_NHTD, k_NHTD, time_NT)
                memory.fill(layer, k_NHTD, v_NHTD, lengths_N)
                return attend(q_NHTD, k_NHTD, v_NHTD, window=window, backend=self.settings.attention)

            x_NTD = block(x_NTD, attention)

    def update_statistics(self) -> None:
        iterate(self)

    def inspect(self, x_BTD: Tensor, time_BT: Tensor) -> dict[str, Tensor]:
        """Return the mean entropy of attention, in nats, over heads and the last queries."""
        x_BTD = self._embed(x_BTD, time_BT)
        window, entropies = self.window.within(x_BTD.shape[1]), []

        def attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
            q_BHTD, k_BHTD = self._turn(q_BHTD, k_BHTD, time_BT)
            share = weights(q_BHTD, k_BHTD, window)[:, :, -SEEN:]
            entropies.append(torch.special.entr(share).sum(-1).mean())
            return dense(q_BHTD, k_BHTD, v_BHTD, window)

        for block in self.blocks:
            x_BTD = block(x_BTD, attention)
        return {"attention_entropy": torch.stack(entropies).mean()}

    def _embed(self, x_BTD: Tensor, time_BT: Tensor) -> Tensor:
        x_BTD = self.embed(x_BTD).to(self.embed.weight.dtype)
        return x_BTD if self.position is None else x_BTD + self.position(time_BT)

    def _turn(self, q_BHTD: Tensor, k_BHTD: Tensor, time_BT: Tensor) -> tuple[Tensor, Tensor]:
        if self.settings.position != "rope":
            return q_BHTD, k_BHTD
        return rotate(q_BHTD, time_BT), rotate(k_BHTD, time_BT)
