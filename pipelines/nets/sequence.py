"""What every sequence encoder offers: whole windows while learning, one token at a time while acting.

N actors, B batch, T time, D width. Padding stands on the right, so no forward needs a mask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from pipelines.config.model import SEQUENCE_ENCODERS
from pipelines.nets.cache import Memory


class SequenceEncoder(nn.Module, ABC):
    """Base of sequence encoders. `forward` may use dropout while training; `step` and `prefill` never do."""

    output_size: int

    @abstractmethod
    def forward(self, x_BTD: Tensor, time_BT: Tensor) -> Tensor:
        """Memory-laden vectors (B, T, output_size); `time_BT` is each token's index in its trajectory."""

    @abstractmethod
    def memory(self, *, num_actors: int, capacity: int, device: torch.device | str = "cpu") -> Memory:
        """Empty memories of `num_actors` actors; attention keeps at most `capacity` tokens of each."""

    @abstractmethod
    def step(self, x_ND: Tensor, time_N: Tensor, memory: Any) -> Tensor:
        """One token of every actor -> (N, output_size); equals `forward` at that token. Changes `memory`."""

    @abstractmethod
    def prefill(self, x_NTD: Tensor, time_NT: Tensor, lengths_N: Tensor, memory: Any) -> None:
        """Set `memory` to what stepping through each actor's first `lengths_N` tokens would leave."""

    def update_statistics(self) -> None:
        """Called once before an update; encoders with running estimates move them here."""


def sequence_encoder(input_size: int, settings: Any) -> SequenceEncoder:
    """The encoder that `settings.kind` names."""
    return SEQUENCE_ENCODERS.get(settings.kind)(input_size, settings)
