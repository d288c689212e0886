"""Positions of tokens in the Transformer, by their absolute time index. B batch, T time, D width, Dh head size."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pipelines.nets import init


def angles(time: Tensor, size: int) -> Tensor:
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
        phase = angles(time, self.width)
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
        self.weight = nn.Parameter(init.positions_(torch.empty(rows, width)))

    def forward(self, time_BT: Tensor) -> Tensor:
        return self.weight[time_BT.clamp_max(len(self.weight) - 1)]


def rotate(x_BHTD: Tensor, time_BT: Tensor) -> Tensor:
    """Apply rotary positions (Su et al. 2021, arXiv 2104.09864): rotate (x_i, x_{i + Dh/2}) by the time's angles."""
    phase = angles(time_BT, x_BHTD.shape[-1])[:, None]
    cos, sin = phase.cos(), phase.sin()
    first, second = x_BHTD.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)
