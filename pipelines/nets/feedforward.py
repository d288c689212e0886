"""Memory-free sequence encoders: baselines that must lose wherever memory matters. B batch, T time, N actors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipelines.config.model import FeedForwardSettings, IdentitySettings
from pipelines.nets import init
from pipelines.nets.cache import NoMemory
from pipelines.nets.linear import iterate
from pipelines.nets.packing import Packing
from pipelines.nets.sequence import SequenceEncoder
from pipelines.nets.transformer import TransformerBlock, norm_of


class _MemoryFree(SequenceEncoder):
    """Base of encoders that see one token at a time, without time or past."""

    def memory(
        self, *, num_actors: int, capacity: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> NoMemory:
        return NoMemory()

    def prefill(self, x_NTD: Tensor, time_NT: Tensor, lengths_N: Tensor, memory: Any) -> None:
        pass


class FeedForward(_MemoryFree):
    """The Transformer's blocks without attention: just as wide and deep, so that a Transformer's advantage over it is
    due to memory."""

    def __init__(self, input_size: int, settings: FeedForwardSettings) -> None:
        super().__init__()
        self.output_size, self.dropout = settings.d_model, settings.dropout
        self.embed = init.linear(input_size, settings.d_model, gain=1.0)
        self.blocks = nn.ModuleList(TransformerBlock(settings) for _ in range(settings.num_layers))
        self.norm = norm_of(settings)(settings.d_model)

    def forward(self, x_BTD: Tensor, time_BT: Tensor, packing: Packing | None = None) -> Tensor:
        return self._encode(x_BTD, self.training)

    def step(self, x_ND: Tensor, time_N: Tensor, memory: Any) -> Tensor:
        return self._encode(x_ND, False)

    def update_statistics(self) -> None:
        iterate(self)

    def _encode(self, x: Tensor, dropout: bool) -> Tensor:
        x = F.dropout(self.embed(x).to(self.embed.weight.dtype), self.dropout, dropout)
        for block in self.blocks:
            x = self.run(block, x, None, dropout)
        return self.norm(x)


class Identity(_MemoryFree):
    """The token, unchanged."""

    def __init__(self, input_size: int, settings: IdentitySettings) -> None:
        super().__init__()
        self.output_size = input_size

    def forward(self, x_BTD: Tensor, time_BT: Tensor, packing: Packing | None = None) -> Tensor:
        return x_BTD

    def step(self, x_ND: Tensor, time_N: Tensor, memory: Any) -> Tensor:
        return x_ND
