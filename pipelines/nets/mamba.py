"""Mamba (Gu & Dao 2023, arXiv 2312.00752): selective state spaces behind a short convolution, with a gate.

B batch, T time, N actors, D width, I channels (expand D), S states of a channel, K tokens of the convolution, L layers.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipelines.config.model import MambaSettings
from pipelines.nets import init
from pipelines.nets.constant import constant
from pipelines.nets.packing import Packing
from pipelines.nets.rnn import State, SteppedEncoder
from pipelines.nets.selective import selective_scan

_FASTEST, _SLOWEST = 1e-3, 1e-1  # initial time steps, as in Mamba


@constant
def has_kernels() -> bool:
    """Return whether mamba-ssm is installed with its kernels, whose fused scan runs on CUDA."""
    return _has_kernels()


@functools.cache
def _has_kernels() -> bool:
    try:
        from mamba_ssm.ops import selective_scan_interface
    except ImportError:  # not installed, or built for another torch
        return False
    # Without its extension, 2.3 can be imported, and fails at the first call.
    return getattr(selective_scan_interface, "selective_scan_cuda", None) is not None


class _MambaBlock(nn.Module):
    """Mamba block: x + linear(scan(silu(convolution(i))) * silu(gate)), i and gate linear in norm(x)."""

    def __init__(self, settings: MambaSettings) -> None:
        super().__init__()
        width, inner, states = settings.d_model, settings.expand * settings.d_model, settings.state
        self.states, self.rank = states, math.ceil(width / 16)
        self.fused = settings.scan == "auto"
        self.norm = nn.RMSNorm(width)
        self.inputs = nn.Linear(width, 2 * inner, bias=False)
        self.taps_IK = nn.Parameter(torch.empty(inner, settings.conv))
        nn.init.uniform_(self.taps_IK, -1, 1)
        self.tap_bias_I = nn.Parameter(torch.zeros(inner))
        self.select = nn.Linear(inner, self.rank + 2 * states, bias=False)
        self.step_size = nn.Linear(self.rank, inner)
        self.log_rate_IS = nn.Parameter(torch.empty(inner, states))
        self.skip_I = nn.Parameter(torch.ones(inner))
        self.output = init.linear(inner, width, gain=1.0)
        if init.is_outline():
            return
        with torch.no_grad():
            self.taps_IK.div_(math.sqrt(settings.conv))
            self.log_rate_IS.copy_(torch.arange(1.0, states + 1).log())
            nn.init.uniform_(self.step_size.weight, -(self.rank**-0.5), self.rank**-0.5)
            step_I = torch.empty(inner).uniform_(math.log(_FASTEST), math.log(_SLOWEST)).exp()
            self.step_size.bias.copy_(step_I + torch.log(-torch.expm1(-step_I)))  # softplus gives step_I

    def forward(
        self, x_BTD: Tensor, past_BKI: Tensor, state_BIS: Tensor, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, and both memories after the last token: inputs of the convolution, states of the scan."""
        i_BTI, gate_BTI = self.inputs(self.norm(x_BTD)).chunk(2, -1)
        seen_BTI = torch.cat((past_BKI.to(i_BTI.dtype), i_BTI), 1)
        u_BTI = F.silu(self._convolve(seen_BTI, packing))
        raw_BTR, into_BTS, out_BTS = self.select(u_BTI).split((self.rank, self.states, self.states), -1)
        delta_BTI = F.softplus(self.step_size(raw_BTR).to(state_BIS.dtype))
        with torch.autocast(x_BTD.device.type, enabled=False):
            into_BTS, out_BTS = into_BTS.to(state_BIS.dtype), out_BTS.to(state_BIS.dtype)
            y_BTI, state_BIS = self._scan(u_BTI, delta_BTI, into_BTS, out_BTS, state_BIS, packing)
        out_BTD = x_BTD + self.output((y_BTI + self.skip_I * u_BTI) * F.silu(gate_BTI))
        return out_BTD, seen_BTI[:, seen_BTI.shape[1] - past_BKI.shape[1] :], state_BIS

    def _convolve(self, seen_BTI: Tensor, packing: Packing | None) -> Tensor:
        """Convolve each channel causally, within documents: sum_k taps_k x_{t-k}."""
        reach = self.taps_IK.shape[1] - 1
        length = seen_BTI.shape[1] - reach
        now_I, *earlier = self.taps_IK.unbind(1)
        out_BTI = torch.addcmul(self.tap_bias_I, now_I, seen_BTI[:, reach:])
        for k, tap_I in enumerate(earlier, 1):
            back_BTI = seen_BTI[:, reach - k : reach - k + length]
            if packing is not None:
                back_BTI = back_BTI * (packing.age_RW >= k)[..., None]
            out_BTI = torch.addcmul(out_BTI, tap_I, back_BTI)
        return out_BTI

    def _scan(
        self, u_BTI: Tensor, delta_BTI: Tensor, into_BTS: Tensor, out_BTS: Tensor, state_BIS: Tensor,
        packing: Packing | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        rate_IS = -self.log_rate_IS.exp()
        if self.fused and u_BTI.is_cuda and u_BTI.shape[1] > 1 and has_kernels():  # whole windows
            return _fused(u_BTI, delta_BTI, rate_IS, into_BTS, out_BTS, packing), state_BIS
        begins = None if packing is None else packing.begins_RW
        return selective_scan(u_BTI, delta_BTI, rate_IS, into_BTS, out_BTS, state_BIS, begins)


def _fused(
    u_BTI: Tensor, delta_BTI: Tensor, rate_IS: Tensor, into_BTS: Tensor, out_BTS: Tensor, packing: Packing | None
) -> Tensor:
    """Run the kernels of mamba-ssm, from empty states; they do not support documents, so packed rows are unpacked for
    them."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    parts = [u_BTI, delta_BTI, into_BTS, out_BTS]
    if packing is not None:
        parts = [packing.unpack(part) for part in parts]
    u_BIT, delta_BIT, into_BST, out_BST = (part.transpose(1, 2).contiguous() for part in parts)
    y_BTI: Tensor = selective_scan_fn(u_BIT, delta_BIT, rate_IS, into_BST, out_BST).transpose(1, 2)
    return y_BTI if packing is None else packing.pack(y_BTI)


class Mamba(SteppedEncoder):
    """Sequence encoder of selective state-space blocks."""

    def __init__(self, input_size: int, settings: MambaSettings) -> None:
        super().__init__()
        self.settings, self.output_size = settings, settings.d_model
        self.embed = init.linear(input_size, settings.d_model, gain=1.0)
        self.blocks = nn.ModuleList(_MambaBlock(settings) for _ in range(settings.num_layers))
        self.norm = nn.RMSNorm(settings.d_model)

    def forward(self, x_BTD: Tensor, time_BT: Tensor, packing: Packing | None = None) -> Tensor:
        x_BTD = self.embed(x_BTD).to(self.embed.weight.dtype)
        past, states = self._empty(len(x_BTD), x_BTD.device)
        for layer, block in enumerate(self.blocks):
            x_BTD, _, _ = self.run(block, x_BTD, past[layer], states[layer], packing)
        return self.norm(x_BTD)

    def memory(
        self, *, num_actors: int, capacity: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> State:
        return State(*self._empty(num_actors, device))

    def step(self, x_ND: Tensor, time_N: Tensor, memory: State) -> Tensor:
        x_N1D = self.embed(x_ND[:, None]).to(self.embed.weight.dtype)
        past, states = memory.tensors
        for layer, block in enumerate(self.blocks):
            x_N1D, past[layer], states[layer] = block(x_N1D, past[layer], states[layer])
        return self.norm(x_N1D)[:, 0]

    def _empty(self, rows: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        settings = self.settings
        inner = settings.expand * settings.d_model
        like = torch.zeros((), device=device, dtype=self.embed.weight.dtype)
        past = like.new_zeros(settings.num_layers, rows, settings.conv - 1, inner)
        return past, like.new_zeros(settings.num_layers, rows, inner, settings.state)
