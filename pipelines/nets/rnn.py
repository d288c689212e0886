"""Gated recurrent unit (Cho et al. 2014). B batch, T time, N actors, D width, L layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from pipelines.config.model import GRUSettings
from pipelines.nets import init
from pipelines.nets.packing import Packing
from pipelines.nets.sequence import SequenceEncoder


class State:
    """Memory of recurrent encoders: tensors (L, N, ...), zero when empty."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = list(tensors)

    def reset(self, mask_N: Tensor) -> None:
        for tensor in self.tensors:
            tensor[:, mask_N] = 0.0

    @contextlib.contextmanager
    def at(self, actors_B: Tensor) -> Iterator[State]:
        """See `Selectable`."""
        chosen = State(*(tensor[:, actors_B] for tensor in self.tensors))
        yield chosen
        for tensor, new in zip(self.tensors, chosen.tensors, strict=True):
            tensor[:, actors_B] = new

    def restore(self, before: Sequence[Tensor], mask_N: Tensor) -> None:
        """Undo changes to the actors in `mask_N` since `before`."""
        for tensor, old in zip(self.tensors, before, strict=True):
            tensor[:, mask_N] = old[:, mask_N]


class SteppedEncoder(SequenceEncoder):
    """Base of recurrent encoders that fill their memory step by step."""

    def prefill(self, x_NTD: Tensor, time_NT: Tensor, lengths_N: Tensor, memory: State) -> None:
        for t in range(x_NTD.shape[1]):
            before = [tensor.clone() for tensor in memory.tensors]
            self.step(x_NTD[:, t], time_NT[:, t], memory)
            memory.restore(before, lengths_N <= t)
        memory.reset(lengths_N == 0)


class GRU(SequenceEncoder):
    """Stacked GRU, then a linear to the output size and LayerNorm. The recurrence has the parameters' precision, even
    under autocast."""

    def __init__(self, input_size: int, settings: GRUSettings) -> None:
        super().__init__()
        self.settings = settings
        self.output_size = settings.output
        self.rnn = nn.GRU(input_size, settings.hidden, settings.num_layers, batch_first=True)
        self.head = nn.Sequential(
            init.linear(settings.hidden, settings.output, gain=1.0), nn.LayerNorm(settings.output)
        )

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.rnn.parameters()).dtype

    def forward(self, x_BTD: Tensor, time_BT: Tensor, packing: Packing | None = None) -> Tensor:
        with torch.autocast(x_BTD.device.type, enabled=False):
            x_BTD = x_BTD.to(self._dtype)
            out_BTD = self.rnn(x_BTD)[0] if packing is None else self._documents(x_BTD, packing)
        return self.head(out_BTD)

    def _documents(self, x_RWD: Tensor, packing: Packing) -> Tensor:
        order_N, sizes_T = packing.by_age
        out_ND = self.rnn(PackedSequence(x_RWD.flatten(0, 1)[order_N], sizes_T))[0].data
        out_RWD = out_ND.new_zeros(*x_RWD.shape[:2], out_ND.shape[-1])
        return out_RWD.flatten(0, 1).index_copy(0, order_N, out_ND).view_as(out_RWD)

    def memory(
        self, *, num_actors: int, capacity: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> State:
        return State(torch.zeros(self.settings.num_layers, num_actors, self.settings.hidden, device=device))

    def step(self, x_ND: Tensor, time_N: Tensor, memory: State) -> Tensor:
        with torch.autocast(x_ND.device.type, enabled=False):
            out_N1D, memory.tensors[0] = self.rnn(x_ND[:, None].to(self._dtype), memory.tensors[0])
        return self.head(out_N1D[:, 0])

    def prefill(self, x_NTD: Tensor, time_NT: Tensor, lengths_N: Tensor, memory: State) -> None:
        packed = pack_padded_sequence(
            x_NTD.to(self._dtype), lengths_N.clamp_min(1).cpu(), batch_first=True, enforce_sorted=False
        )
        with torch.autocast(x_NTD.device.type, enabled=False):
            memory.tensors[0] = self.rnn(packed)[1]
        memory.reset(lengths_N == 0)
