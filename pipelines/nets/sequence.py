"""Interface of sequence encoders: whole windows while learning, one token at a time while acting.

N actors, B batch, T time, D width. Padding is on the right, so no forward needs a mask. Windows may share rows: then B
are rows, and `packing` maps places to windows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipelines.config.model import SEQUENCE_ENCODERS
from pipelines.errors import UsageError
from pipelines.nets.cache import Memory
from pipelines.nets.packing import Packing


class Stepper(Protocol):
    """One step of acting for all actors; `stale` once the weights it copied have changed."""

    @property
    def stale(self) -> bool: ...

    def __call__(self, x_ND: Tensor, time_N: Tensor, memory: Any) -> Tensor: ...


class PlainStep:
    """An encoder's own step."""

    stale = False

    def __init__(self, encoder: SequenceEncoder) -> None:
        self._encoder = encoder

    def __call__(self, x_ND: Tensor, time_N: Tensor, memory: Any) -> Tensor:
        return self._encoder.step(x_ND, time_N, memory)


class SequenceEncoder(nn.Module, ABC):
    """Base of sequence encoders. `forward` may use dropout while training; `step` and `prefill` never do."""

    output_size: int
    max_time: int | None = None  # number of time indices that it can encode; None: any
    activation_checkpointing = False  # recompute the inside of blocks in the backward: less memory, more time

    @abstractmethod
    def forward(self, x_BTD: Tensor, time_BT: Tensor, packing: Packing | None = None) -> Tensor:
        """Encode (B, T, input_size) -> (B, T, output_size); `time_BT` is each token's index in its trajectory. No
        information passes between the documents of a packed row."""

    @abstractmethod
    def memory(
        self, *, num_actors: int, capacity: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Memory:
        """Allocate empty memories of `num_actors` actors, as `dtype`; attention keeps at most `capacity` tokens of
        each."""

    @abstractmethod
    def step(self, x_ND: Tensor, time_N: Tensor, memory: Any) -> Tensor:
        """Encode one token of every actor -> (N, output_size); equals `forward` at that token. Changes `memory`."""

    @abstractmethod
    def prefill(self, x_NTD: Tensor, time_NT: Tensor, lengths_N: Tensor, memory: Any) -> None:
        """Set `memory` to its content after stepping through each actor's first `lengths_N` tokens."""

    def require_time(self, last: int) -> None:
        """Raise UsageError if the time index `last` cannot be encoded. Called with numbers that the host knows, so that
        there is no device sync."""
        if self.max_time is not None and last >= self.max_time:
            raise UsageError(
                f"time index {last} is beyond the {self.max_time} rows of the learned positions",
                hint=f"set agent.sequence.max_time to {last + 1} or more, or use another agent.sequence.position",
            )

    def stepper(self) -> Stepper:
        """Make the fastest `step` for acting without gradient; if it holds a copy of weights, `stale` says when to
        make another."""
        return PlainStep(self)

    def update_statistics(self) -> None:
        """Update running estimates, if the encoder has any; called once before each update."""

    def inspect(self, x_BTD: Tensor, time_BT: Tensor) -> dict[str, Tensor]:
        """Compute figures for the log from a forward of a few windows: 0-d tensors by name."""
        self.forward(x_BTD, time_BT)
        return {}

    def shardable(self) -> list[nn.Module]:
        """List the modules whose weights ranks may share out: those in `blocks`, if the encoder has such a list. It
        must call each as a module, and compute with its weights nowhere else."""
        blocks = getattr(self, "blocks", None)
        return [*blocks] if isinstance(blocks, nn.ModuleList) else []

    def run(self, block: nn.Module, *inputs: Any) -> Any:
        """Run `block(*inputs)`, with activation checkpointing if enabled."""
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)


def make_sequence_encoder(input_size: int, settings: Any) -> SequenceEncoder:
    """Construct the encoder that `settings.kind` names."""
    return SEQUENCE_ENCODERS.get(settings.kind)(input_size, settings)
