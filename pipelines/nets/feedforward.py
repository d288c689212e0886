"""Memory-free sequence encoders: the baselines that must lose wherever memory counts. B batch, T time, N actors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipelines.config.encoders import FeedForwardSettings, IdentitySettings
from pipelines.nets.cache import NoMemory
from pipelines.nets.linear import MLP
from pipelines.nets.packing import Packing
from pipelines.nets.sequence import SequenceEncoder


class FeedForward(SequenceEncoder):
    """LayerNorm(MLP(token)): time and past are not seen."""

    def __init__(self, input_size: int, settings: FeedForwardSettings) -> None:
        super().__init__()
        self.output_size = settings.output
        self.body: nn.Module = nn.Sequential(
            MLP(input_size, settings.hidden, settings.output), nn.LayerNorm(settings.output)
        )

    def forward(self, x_BTD: Tensor, time_BT: Tensor, packing: Packing | None = None) -> Tensor:
        return self.body(x_BTD)

    def memory(
        self, *, num_actors: int, capacity: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> NoMemory:
        return NoMemory()

    def step(self, x_ND: Tensor, time_N: Tensor, memory: Any) -> Tensor:
        return self.body(x_ND)

    def prefill(self, x_NTD: Tensor, time_NT: Tensor, lengths_N: Tensor, memory: Any) -> None:
        pass


class Identity(FeedForward):
    """The token as it is."""

    def __init__(self, input_size: int, settings: IdentitySettings) -> None:
        SequenceEncoder.__init__(self)
        self.output_size = input_size
        self.body = nn.Identity()
