"""Gated recurrent units: the GRU (Cho et al. 2014), and minimal ones (Feng et al. 2024, arXiv 2410.01201), whose gates
see the token, not the state, so that a window is a scan. B batch, T time, N actors, D width, W state size, L layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from pipelines.config.model import GRUSettings, MinGRUSettings
from pipelines.nets import init
from pipelines.nets.cache import State
from pipelines.nets.packing import Packing
from pipelines.nets.scan import linear_scan
from pipelines.nets.sequence import SequenceEncoder


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
            init.make_linear(settings.hidden, settings.output, gain=1.0), nn.LayerNorm(settings.output)
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


class _MinGRUBlock(nn.Module):
    """MinGRU block: x + linear(h * silu(gate)), h_t = (1 - z_t) h_{t-1} + z_t c_t, where z, c and gate are linear in
    norm(x)."""

    def __init__(self, settings: MinGRUSettings) -> None:
        super().__init__()
        width, inner = settings.d_model, settings.expand * settings.d_model
        self.norm = nn.LayerNorm(width)
        self.inputs = init.make_linear(width, 3 * inner, gain=1.0)
        self.output = init.make_linear(inner, width, gain=1.0)
        if init.is_outline():
            return
        with torch.no_grad():  # from units that forget within 2 tokens to units that remember for about a thousand
            horizon_W = torch.logspace(0.3, 3.5, inner)
            self.inputs.bias[:inner] = -torch.log(horizon_W - 1)

    def forward(self, x_BTD: Tensor, state_BW: Tensor, begins_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Apply the block -> the output, and the state after the last token; states are reset where `begins_BT`."""
        raw_BTW, new_BTW, gate_BTW = self.inputs(self.norm(x_BTD)).chunk(3, -1)
        take_BTW = raw_BTW.to(state_BW.dtype).sigmoid()
        keep_BTW = 1 - take_BTW
        if begins_BT is not None:
            keep_BTW = keep_BTW.masked_fill(begins_BT[..., None], 0.0)
        h_BTW = linear_scan(keep_BTW, take_BTW * new_BTW, state_BW)
        return x_BTD + self.output(h_BTW * nn.functional.silu(gate_BTW)), h_BTW[:, -1]


class MinGRU(SteppedEncoder):
    """Sequence encoder of minimal gated recurrent units, computed in parallel over time."""

    def __init__(self, input_size: int, settings: MinGRUSettings) -> None:
        super().__init__()
        self.settings, self.output_size = settings, settings.d_model
        self.embed = init.make_linear(input_size, settings.d_model, gain=1.0)
        self.blocks = nn.ModuleList(_MinGRUBlock(settings) for _ in range(settings.num_layers))
        self.norm = nn.LayerNorm(settings.d_model)

    def forward(self, x_BTD: Tensor, time_BT: Tensor, packing: Packing | None = None) -> Tensor:
        x_BTD = self.embed(x_BTD).to(self.embed.weight.dtype)
        begins_BT = None if packing is None else packing.begins_RW
        empty_LBW = self._states(len(x_BTD), x_BTD.device)
        for layer, block in enumerate(self.blocks):
            x_BTD, _ = self.run(block, x_BTD, empty_LBW[layer], begins_BT)
        return self.norm(x_BTD)

    def memory(
        self, *, num_actors: int, capacity: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> State:
        return State(self._states(num_actors, device))

    def step(self, x_ND: Tensor, time_N: Tensor, memory: State) -> Tensor:
        x_N1D = self.embed(x_ND[:, None]).to(self.embed.weight.dtype)
        (state_LNW,) = memory.tensors
        for layer, block in enumerate(self.blocks):
            x_N1D, state_LNW[layer] = block(x_N1D, state_LNW[layer])
        return self.norm(x_N1D)[:, 0]

    def _states(self, rows: int, device: torch.device | str) -> Tensor:
        settings = self.settings
        shape = (settings.num_layers, rows, settings.expand * settings.d_model)
        return torch.zeros(shape, device=device, dtype=self.embed.weight.dtype)
