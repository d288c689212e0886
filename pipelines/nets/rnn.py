"""Gated recurrent unit (Cho et al. 2014). B batch, T time, N actors, D width, L layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipelines.config.model import GRUSettings
from pipelines.nets import init
from pipelines.nets.sequence import SequenceEncoder


class GRUMemory:
    """State of every layer and actor, (L, N, hidden)."""

    def __init__(self, state_LND: Tensor) -> None:
        self.state_LND = state_LND

    def reset(self, mask_N: Tensor) -> None:
        self.state_LND.masked_fill_(mask_N[:, None], 0.0)


class GRU(SequenceEncoder):
    """Stacked GRU, then a linear to the output size and LayerNorm."""

    def __init__(self, input_size: int, settings: GRUSettings) -> None:
        super().__init__()
        self.settings = settings
        self.output_size = settings.output
        self.rnn = nn.GRU(input_size, settings.hidden, settings.num_layers, batch_first=True)
        self.head = nn.Sequential(
            init.linear(settings.hidden, settings.output, gain=1.0), nn.LayerNorm(settings.output)
        )

    def forward(self, x_BTD: Tensor, time_BT: Tensor) -> Tensor:
        return self.head(self.rnn(x_BTD)[0])

    def memory(self, *, num_actors: int, capacity: int, device: torch.device | str = "cpu") -> GRUMemory:
        return GRUMemory(torch.zeros(self.settings.num_layers, num_actors, self.settings.hidden, device=device))

    def step(self, x_ND: Tensor, time_N: Tensor, memory: GRUMemory) -> Tensor:
        out_N1D, memory.state_LND = self.rnn(x_ND[:, None], memory.state_LND)
        return self.head(out_N1D[:, 0])

    def prefill(self, x_NTD: Tensor, time_NT: Tensor, lengths_N: Tensor, memory: GRUMemory) -> None:
        packed = nn.utils.rnn.pack_padded_sequence(
            x_NTD, lengths_N.clamp_min(1).cpu(), batch_first=True, enforce_sorted=False
        )
        memory.state_LND = self.rnn(packed)[1]
        memory.reset(lengths_N == 0)
