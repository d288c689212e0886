"""Mamba (Gu & Dao 2023, arXiv 2312.00752): selective state spaces behind a short convolution, with a gate.

Of the recurrence: states are S times as large as inputs and outputs, so they exist for one chunk of tokens at a time,
and are recomputed in the backward: memory grows with the states at chunk ends only. Channels are the last dimension,
where what states share is contiguous; powers of two are several times as fast as powers of e.

B batch, T time, N actors, D width (in the recurrence: channels), I channels (expand D), S states of a channel, K tokens
of the convolution, L layers, Z chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipelines.config.model import MambaSettings
from pipelines.nets import init
from pipelines.nets.cache import State
from pipelines.nets.compute import is_exporting, keep_constant
from pipelines.nets.linear import make_norm
from pipelines.nets.packing import Packing
from pipelines.nets.rnn import SteppedEncoder
from pipelines.nets.scan import recur, recur_back

_CPU_STATES, _CUDA_STATES = 1 << 18, 1 << 23  # numbers of a chunk: on a CPU they fit in the cache
_SHORTEST, LONGEST = 4, 64  # tokens of a chunk


def selective_scan(
    x_BTD: Tensor,
    delta_BTD: Tensor,
    rate_DS: Tensor,
    into_BTS: Tensor,
    out_BTS: Tensor,
    state_BDS: Tensor,
    begins_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute y_t = <out_t, h_t>, h_t = exp(delta_t rate) h_{t-1} + delta_t into_t x_t -> (y (B, T, D), last h). States
    are reset where `begins_BT`."""
    if is_exporting():  # one step of acting, in operators that any runtime has
        decay_BDS = (delta_BTD[:, 0, :, None] * rate_DS).exp()
        last_BDS = decay_BDS * state_BDS + (delta_BTD * x_BTD)[:, 0, :, None] * into_BTS
        return (last_BDS @ out_BTS.transpose(1, 2)).transpose(1, 2), last_BDS
    state_BSD = state_BDS.transpose(1, 2).contiguous()
    rate_SD = rate_DS.t().contiguous()
    y_BTD, last_BSD, _ = _scan_chunks(delta_BTD * x_BTD, delta_BTD, rate_SD, into_BTS, out_BTS, state_BSD, begins_BT)
    return y_BTD, last_BSD.transpose(1, 2)


class _Chunks:
    """States of one chunk after the other, in the same memory."""

    def __init__(
        self, dx_BTD: Tensor, delta_BTD: Tensor, rate_SD: Tensor, into_BTS: Tensor, begins_BT: Tensor | None
    ) -> None:
        self.dx_BTD, self.delta_BTD, self.into_BTS, self.begins_BT = dx_BTD, delta_BTD, into_BTS, begins_BT
        self.log2_SD = rate_SD / math.log(2)
        (batch, self.length, channels), states = dx_BTD.shape, len(rate_SD)
        self.size = self.choose_size(dx_BTD, states)
        self.decay = dx_BTD.new_empty(batch, self.size, states, channels)
        self.h = dx_BTD.new_empty(batch, 1 + self.size, states, channels)

    @staticmethod
    def choose_size(dx_BTD: Tensor, states: int) -> int:
        """Choose the number of tokens of a chunk."""
        batch, length, channels = dx_BTD.shape
        numbers = _CPU_STATES if dx_BTD.device.type == "cpu" else _CUDA_STATES
        return min(length, max(_SHORTEST, min(LONGEST, numbers // (batch * states * channels))))

    def places(self) -> Iterator[slice]:
        return (slice(start, min(start + self.size, self.length)) for start in range(0, self.length, self.size))

    def run(self, at: slice, first_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Compute decays (B, t, S, D) at these places, and states (B, 1 + t, S, D), with `first_BSD` first."""
        delta_BTD, count = self.delta_BTD[:, at], at.stop - at.start
        decay, h = self.decay[:, :count], self.h[:, : count + 1]
        torch.mul(delta_BTD[:, :, None], self.log2_SD, out=decay).exp2_()
        if self.begins_BT is not None:
            decay.masked_fill_(self.begins_BT[:, at, None, None], 0.0)
        h[:, 0] = first_BSD
        torch.mul(self.into_BTS[:, at, :, None], self.dx_BTD[:, at, None], out=h[:, 1:])
        recur(decay, h[:, 1:], first_BSD)
        return decay, h


@torch.library.custom_op("amago::selective_scan", mutates_args=())
def _scan_chunks(
    dx_BTD: Tensor, delta_BTD: Tensor, rate_SD: Tensor, into_BTS: Tensor, out_BTS: Tensor, first_BSD: Tensor,
    begins_BT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute y, the last states, and those before each chunk (Z, B, S, D). Not under autocast, nor is the backward."""
    y_BTD, last_BSD, before = torch.empty_like(dx_BTD), first_BSD, []
    chunks = _Chunks(dx_BTD, delta_BTD, rate_SD, into_BTS, begins_BT)
    with torch.autocast(dx_BTD.device.type, enabled=False):
        for at in chunks.places():
            before.append(last_BSD)
            _, h = chunks.run(at, last_BSD)
            y_BTD[:, at] = (out_BTS[:, at, None] @ h[:, 1:])[:, :, 0]
            last_BSD = h[:, -1].clone()
    return y_BTD, last_BSD, torch.stack(before)


@torch.library.custom_op("amago::selective_scan_backward", mutates_args=())
def _scan_chunks_back(
    grad_BTD: Tensor, grad_last_BSD: Tensor, dx_BTD: Tensor, delta_BTD: Tensor, rate_SD: Tensor, into_BTS: Tensor,
    out_BTS: Tensor, before_ZBSD: Tensor, begins_BT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute gradients of dx, delta, rate, into, out and the first states. With g_t that of h_t, rows of rates get
    sum_t g_t h_{t-1} decay_t delta_t; sums over channels are sums of products, which are faster than matrix times
    vector for small matrices."""
    grad_dx, grad_delta, grad_into, grad_out = map(torch.empty_like, (dx_BTD, delta_BTD, into_BTS, out_BTS))
    grad_rate_SD, carry_BSD = torch.zeros_like(rate_SD), grad_last_BSD
    chunks = _Chunks(dx_BTD, delta_BTD, rate_SD, into_BTS, begins_BT)
    memory = torch.empty_like(chunks.decay)
    with torch.autocast(dx_BTD.device.type, enabled=False):
        for at, first_BSD in zip([*chunks.places()][::-1], before_ZBSD.unbind()[::-1], strict=True):
            decay, h = chunks.run(at, first_BSD)
            grad_BtD, g = grad_BTD[:, at, None], memory[:, : decay.shape[1]]
            grad_out[:, at] = torch.mul(h[:, 1:], grad_BtD, out=g).sum(-1)
            torch.mul(out_BTS[:, at, :, None], grad_BtD, out=g)
            g[:, -1] += carry_BSD
            recur_back(decay, g)
            carry_BSD = decay[:, 0] * g[:, 0]
            grad_dx[:, at] = (into_BTS[:, at, None] @ g)[:, :, 0]
            decay.mul_(h[:, :-1]).mul_(g)  # from here on, the gradient of delta times rate
            grad_into[:, at] = g.mul_(dx_BTD[:, at, None]).sum(-1)
            grad_delta[:, at] = torch.mul(decay, rate_SD, out=g).sum(2)
            grad_rate_SD += decay.mul_(delta_BTD[:, at, None]).sum((0, 1))
    return grad_dx, grad_delta, grad_rate_SD, grad_into, grad_out, carry_BSD


_scan_chunks.register_fake(
    lambda dx_BTD, delta_BTD, rate_SD, into_BTS, out_BTS, first_BSD, begins_BT: (
        torch.empty_like(dx_BTD),
        torch.empty_like(first_BSD),
        first_BSD.new_empty(
            -(-dx_BTD.shape[1] // _Chunks.choose_size(dx_BTD, len(rate_SD))),
            *first_BSD.shape,
        ),
    )
)
_scan_chunks_back.register_fake(
    lambda grad_BTD, grad_last_BSD, dx_BTD, delta_BTD, rate_SD, into_BTS, out_BTS, before_ZBSD, begins_BT: tuple(
        map(torch.empty_like, (dx_BTD, delta_BTD, rate_SD, into_BTS, out_BTS, grad_last_BSD))
    )
)
_scan_chunks.register_autograd(
    lambda ctx, grad_BTD, grad_last_BSD, _: (*_scan_chunks_back(grad_BTD, grad_last_BSD, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:5], output[2], inputs[6]),
)


_FASTEST, _SLOWEST = 1e-3, 1e-1  # initial time steps, as in Mamba


@keep_constant
def has_kernels() -> bool:
    """Check whether mamba-ssm is installed with its kernels, whose fused scan runs on CUDA."""
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
        self.norm = make_norm(settings.norm, width)
        self.inputs = nn.Linear(width, 2 * inner, bias=False)
        self.taps_IK = nn.Parameter(torch.empty(inner, settings.conv))
        nn.init.uniform_(self.taps_IK, -1, 1)
        self.tap_bias_I = nn.Parameter(torch.zeros(inner))
        self.select = nn.Linear(inner, self.rank + 2 * states, bias=False)
        self.step_size = nn.Linear(self.rank, inner)
        self.log_rate_IS = nn.Parameter(torch.empty(inner, states))
        self.skip_I = nn.Parameter(torch.ones(inner))
        self.output = init.make_linear(inner, width, gain=1.0)
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
        """Apply the block -> the output, and both memories after the last token: inputs of the convolution, states of
        the scan."""
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
            from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

            parts = [u_BTI, delta_BTI, into_BTS, out_BTS]
            if packing is not None:  # its kernels, which begin with empty states, do not support documents
                parts = [packing.unpack(part) for part in parts]
            u_BIT, delta_BIT, into_BST, out_BST = (part.transpose(1, 2).contiguous() for part in parts)
            y_BTI: Tensor = selective_scan_fn(u_BIT, delta_BIT, rate_IS, into_BST, out_BST).transpose(1, 2)
            return y_BTI if packing is None else packing.pack(y_BTI), state_BIS
        begins = None if packing is None else packing.begins_RW
        return selective_scan(u_BTI, delta_BTI, rate_IS, into_BTS, out_BTS, state_BIS, begins)


class Mamba(SteppedEncoder):
    """Sequence encoder of selective state-space blocks."""

    def __init__(self, input_size: int, settings: MambaSettings) -> None:
        super().__init__()
        self.settings, self.output_size = settings, settings.d_model
        self.embed = init.make_linear(input_size, settings.d_model, gain=1.0)
        self.blocks = nn.ModuleList(_MambaBlock(settings) for _ in range(settings.num_layers))
        self.norm = make_norm(settings.norm, settings.d_model)

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
