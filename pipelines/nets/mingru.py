"""Minimal gated recurrent units (Feng et al. 2024, arXiv 2410.01201): gates see the token, not the state, so that a
window is a scan. B batch, T time, N actors, D width, W state size, L layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipelines.config.model import MinGRUSettings
from pipelines.nets import init
from pipelines.nets.packing import Packing
from pipelines.nets.rnn import State, SteppedEncoder
from pipelines.nets.scan import linear_scan


class _MinGRUBlock(nn.Module):
    """MinGRU block: x + linear(h * silu(gate)), h_t = (1 - z_t) h_{t-1} + z_t c_t, where z, c and gate are linear in
    norm(x)."""

    def __init__(self, settings: MinGRUSettings) -> None:
        super().__init__()
        width, inner = settings.d_model, settings.expand * settings.d_model
        self.norm = nn.LayerNorm(width)
        self.inputs = init.linear(width, 3 * inner, gain=1.0)
        self.output = init.linear(inner, width, gain=1.0)
        if init.is_outline():
            return
        with torch.no_grad():  # from units that forget within 2 tokens to units that remember for about a thousand
            horizon_W = torch.logspace(0.3, 3.5, inner)
            self.inputs.bias[:inner] = -torch.log(horizon_W - 1)

    def forward(self, x_BTD: Tensor, state_BW: Tensor, begins_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the output, and the state after the last token; states are reset where `begins_BT`."""
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
        self.embed = init.linear(input_size, settings.d_model, gain=1.0)
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
