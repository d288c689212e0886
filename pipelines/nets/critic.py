"""Ensembles of value heads, and their passes: forward and backward in one, chunk by chunk, so that no graph is kept.

All critics are computed by one batched product a layer. Values are in normalised units (see learning/popart.py) or in
units of scaled rewards, depending on the readout. Losses are functions that the caller passes (see
learning/objectives.py): of a chunk's outputs, they return the loss and its gradient with respect to these outputs.

The last layer is a readout: a number for each discount, or a distribution over bins of value. It maps last hidden
activations to outputs (values or logits), decodes outputs into values, and backpropagates the gradient of a loss with
respect to the outputs. Its rows of each critic are laid out (G, n), discount by discount, or are a selection of these:
then `discount_CR` has the discount of each row. Hidden layers have leaky ReLUs, which preserve the sign: an activation
determines its own slope, and everything can be done in place.

C critics, N rows, n rows of a chunk, G discounts, A actions, D state width, W hidden width, F action features, K action
samples, S = G K, R = S n; P rows picked of each critic; O outputs of a readout, Z bins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipelines.config.model import CriticSettings
from pipelines.nets import init
from pipelines.nets.compute import Kept, choose_dtype
from pipelines.nets.inputs import symexp, symlog

_Grads = tuple[Tensor, Tensor]


class Readout(nn.Module, ABC):
    """Last layer of all critics; `weight` is (C, W, O), `bias` (C, 1, O)."""

    outputs: int  # O
    normalized: bool  # whether values are in PopArt's units; else in units of scaled rewards

    @abstractmethod
    def values(self, x_CRW: Tensor, weight: Tensor, bias: Tensor, discount_CR: Tensor) -> Tensor:
        """Compute values (C, R) in float32."""

    @abstractmethod
    def input_gradients(self, x_CRW: Tensor, weight: Tensor, bias: Tensor, discount_CR: Tensor) -> Tensor:
        """Compute d value / d x (C, R, W)."""

    @abstractmethod
    def forward(self, x_CGnW: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Compute outputs in float32: values (C, G, n), or logits (C, G n, Z)."""

    @abstractmethod
    def backward(self, slope: Tensor, x_CGnW: Tensor, weight: Tensor, grads: _Grads) -> Tensor:
        """Compute the gradient of x (C, G n, W), given that of the outputs; those of weight and bias are added to
        `grads`."""


class Scalar(Readout):
    """A number, with a row of weights for each discount, so that value normalisation can correct it. Computed in
    float32: learning depends on small differences of values, which bf16 does not resolve."""

    normalized = True

    def __init__(self, num_discounts: int) -> None:
        super().__init__()
        self.outputs = num_discounts

    def values(self, x_CRW: Tensor, weight: Tensor, bias: Tensor, discount_CR: Tensor) -> Tensor:
        return torch.baddbmm(bias, x_CRW.float(), weight.float()).gather(-1, discount_CR[..., None])[..., 0]

    def input_gradients(self, x_CRW: Tensor, weight: Tensor, bias: Tensor, discount_CR: Tensor) -> Tensor:
        critic_C1 = torch.arange(len(weight), device=weight.device)[:, None]
        return weight.mT.contiguous()[critic_C1, discount_CR]

    def forward(self, x_CGnW: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return (x_CGnW.float() @ weight.mT.float()[..., None])[..., 0] + bias.mT

    def backward(self, slope: Tensor, x_CGnW: Tensor, weight: Tensor, grads: _Grads) -> Tensor:
        narrow_CGn = slope.to(x_CGnW.dtype)
        grads[0].add_((narrow_CGn[:, :, None] @ x_CGnW)[:, :, 0].mT)
        grads[1].add_(slope.sum(2)[:, None])
        return (narrow_CGn[..., None] * weight.mT.contiguous()[:, :, None]).flatten(1, 2)


class TwoHot(Readout):
    """A distribution over bins that are even in symlog space; the value is symexp of the mean bin (Hafner et al. 2023,
    arXiv 2301.04104). Or over bins that are even in value, whose mean is the value. The label of a target is its two
    neighbouring bins, or a Gaussian's mass on each bin (HL-Gauss; Farebrother et al. 2024, arXiv 2403.03950)."""

    normalized = False

    def __init__(self, settings: CriticSettings) -> None:
        super().__init__()
        self.outputs = settings.bins
        self.symlog = settings.symlog
        ends = torch.tensor([settings.low, settings.high], dtype=torch.float64, device="cpu")
        low, high = self._find_position(ends).tolist()
        self.low, self.step = low, (high - low) / (settings.bins - 1)
        self.register_buffer("bins_Z", torch.linspace(low, high, settings.bins), persistent=False)
        self.bins_Z: Tensor
        self.sigma = settings.label_sigma * self.step if settings.labels == "hl-gauss" else None

    def values(self, x_CRW: Tensor, weight: Tensor, bias: Tensor, discount_CR: Tensor) -> Tensor:
        return self.decode(self._compute_logits(x_CRW, weight, bias).softmax(-1))

    def input_gradients(self, x_CRW: Tensor, weight: Tensor, bias: Tensor, discount_CR: Tensor) -> Tensor:
        probs_CRZ = self._compute_logits(x_CRW, weight, bias).softmax(-1)
        mean_CR = probs_CRZ @ self.bins_Z
        slope_CRZ = probs_CRZ * (self.bins_Z - mean_CR[..., None])
        if self.symlog:
            slope_CRZ *= mean_CR.abs().exp()[..., None]
        return torch.bmm(slope_CRZ.to(weight.dtype), weight.mT)

    def forward(self, x_CGnW: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return self._compute_logits(x_CGnW.flatten(1, 2), weight, bias)

    def backward(self, slope: Tensor, x_CGnW: Tensor, weight: Tensor, grads: _Grads) -> Tensor:
        narrow_CRZ = slope.to(x_CGnW.dtype)
        add_product(grads[0], x_CGnW.flatten(1, 2).mT, narrow_CRZ)
        grads[1].add_(slope.sum(1, keepdim=True))
        return torch.bmm(narrow_CRZ, weight.mT)

    def decode(self, probs: Tensor) -> Tensor:
        """Compute the value of each distribution (..., Z)."""
        mean = probs @ self.bins_Z
        return symexp(mean) if self.symlog else mean

    def labels(self, target_R: Tensor) -> Tensor:
        """Label each target with a distribution over bins (R, Z)."""
        if self.sigma is None:
            index_R2, share_R2 = self.neighbours(target_R)
            return share_R2.new_zeros(len(target_R), self.outputs).scatter_add_(1, index_R2, share_R2)
        inside_R1 = self._find_position(target_R).clamp(self.bins_Z[0], self.bins_Z[-1])[:, None]
        edges = torch.cat((self.bins_Z - self.step / 2, self.bins_Z[-1:] + self.step / 2))
        below = torch.special.ndtr((edges - inside_R1) / self.sigma)
        mass_RZ = below.diff(dim=-1)
        return mass_RZ / mass_RZ.sum(-1, keepdim=True)

    def neighbours(self, target_R: Tensor) -> tuple[Tensor, Tensor]:
        """Find the two bins around each target, and their shares (R, 2)."""
        position_R = ((self._find_position(target_R) - self.low) / self.step).clamp(0, self.outputs - 1)
        below_R = position_R.nan_to_num().floor().clamp_max(self.outputs - 2)  # NaN only in shares, never in an index
        share_R = position_R - below_R
        return torch.stack((below_R, below_R + 1), 1).long(), torch.stack((1 - share_R, share_R), 1)

    def _find_position(self, value: Tensor) -> Tensor:
        """Convert values to the bins' units."""
        return symlog(value) if self.symlog else value

    def _compute_logits(self, x_CRW: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.bmm(x_CRW, weight).float() + bias


SLOPE = 0.01
# Rows of all critics together that are computed at a time: on a CPU, a layer's output stays in the cache.
CPU_ROWS, _CUDA_ROWS = 3584, 1 << 19

_slope = torch.ops.aten.leaky_relu_backward.grad_input


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a b for each critic, or of all critics if `total` is a matrix, summed in `total`'s precision."""
    over_critics = total.dim() == 2
    if total.dtype == a.dtype:
        total.addbmm_(a, b) if over_critics else total.baddbmm_(a, b)
    else:
        total += torch.bmm(a, b).sum(0, dtype=total.dtype) if over_critics else torch.bmm(a, b)


def make_zeros(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Make zeros in float32 of the shapes of `tensors`, in one kernel."""
    zeros = torch.zeros(sum(tensor.numel() for tensor in tensors), device=tensors[0].device)
    parts = zeros.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def join_chunks(chunks: Sequence[Tensor], axis: int) -> Tensor:
    """Concatenate what chunks have computed; a single one, as small batches have, is not copied."""
    return chunks[0] if len(chunks) == 1 else torch.cat([*chunks], axis)


def sum_chunks(chunks: Sequence[Tensor]) -> Tensor:
    """Sum the numbers that chunks have computed."""
    return chunks[0] if len(chunks) == 1 else torch.stack([*chunks]).sum()


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        if grad.dim() == 0:
            return None, None, *torch._foreach_mul(list(ctx.saved_tensors), grad)
        return None, None, *(saved * grad[(...,) + (None,) * (saved.dim() - grad.dim())] for saved in ctx.saved_tensors)


def attach(value: Tensor, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Give `value` an edge in the autograd graph by which `inputs` receive the precomputed `gradients`.

    Either `value` is a scalar, or each of its elements depends only on the inputs at its own place: gradients
    (*value.shape, ...).
    """
    attached: Callable[..., Tensor] = _Attach.apply
    return attached(value, gradients, *inputs)


# Of a chunk's rows and their table of values (C, n, G, A): loss, and its gradient with respect to the table.
_TableLoss = Callable[[slice, Tensor], tuple[Tensor, Tensor]]
# Of a chunk's rows and the readout's outputs: loss, values (C, G, n), and the loss's gradient with respect to the
# outputs.
_OutputLoss = Callable[[slice, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class _Layers:
    """Tensors of all critics, or their gradients: `weights[0]` (C, I, W), `biases[0]` (C, 1, W), ..., `last_weight`
    (C, W, O), `last_bias` (C, 1, O)."""

    weights: Sequence[Tensor]
    biases: Sequence[Tensor]
    last_weight: Tensor
    last_bias: Tensor

    @classmethod
    def of(cls, tensors: Sequence[Tensor], dtype: torch.dtype) -> _Layers:
        """Name `tensors`, given in the order of the fields, in a precision; the last bias keeps its own."""
        *inner, last_bias = tensors
        if dtype != last_bias.dtype:  # in one kernel
            wide, inner = inner, [torch.empty_like(tensor, dtype=dtype) for tensor in inner]
            torch._foreach_copy_(inner, wide)
        *inner, last_weight = inner
        depth = len(inner) // 2
        return cls(inner[:depth], inner[depth:], last_weight, last_bias)

    def run_hidden(self, x_CRW: Tensor, first: int = 0) -> list[Tensor]:
        """Compute the outputs of hidden layers from number `first` on, given its input, `x_CRW`, which comes first in
        the list."""
        outputs = [x_CRW]
        for weight, bias in zip(self.weights[first:], self.biases[first:], strict=True):
            outputs.append(F.leaky_relu_(torch.baddbmm(bias, outputs[-1], weight), SLOPE))
        return outputs

    def backpropagate(self, grad_CRW: Tensor, outputs: Sequence[Tensor], grads: _Layers | None = None) -> Tensor:
        """Compute the gradient before the first hidden layer's activation, given the one after the last's.

        That one is overwritten, and so are the `outputs` of layers as wide as the one before, which saves allocations.
        Gradients of all layers but the first are added to `grads`, if given.
        """
        for place in range(len(self.weights) - 1, 0, -1):
            _slope(grad_CRW, outputs[place], SLOPE, True, grad_input=grad_CRW)
            if grads is not None:
                add_product(grads.weights[place], outputs[place - 1].mT, grad_CRW)
                grads.biases[place].add_(grad_CRW.sum(1, keepdim=True))
            weight = self.weights[place]
            reuse = outputs[place] if weight.shape[1] == weight.shape[2] else None
            grad_CRW = torch.bmm(grad_CRW, weight.mT, out=reuse)
        return _slope(grad_CRW, outputs[0], SLOPE, True, grad_input=grad_CRW)


class Ensemble(nn.Module):
    """Hidden layers and a last layer of C independent members; the last layer has a part for each discount."""

    def __init__(self, input_size: int, num_discounts: int, num_outputs: int, settings: CriticSettings) -> None:
        super().__init__()
        members, widths = settings.ensemble, settings.hidden
        self.members, self.num_discounts, self.num_outputs = members, num_discounts, num_outputs
        sizes = list(zip((input_size, *widths), widths, strict=False))
        self.weights = nn.ParameterList(init.fill_members(torch.empty(members, i, o), 2**0.5) for i, o in sizes)
        self.biases = nn.ParameterList(torch.zeros(members, 1, o) for _, o in sizes)
        shape = (members, widths[-1], num_discounts * num_outputs)
        self.last_weight = nn.Parameter(init.fill_members(torch.empty(shape), init.VALUE_GAIN))
        self.last_bias = nn.Parameter(torch.zeros(members, 1, num_discounts * num_outputs))
        self._casts = Kept[_Layers]()

    def layers(self, dtype: torch.dtype) -> _Layers:
        """Name all parameters, in a precision; casts are made once an update, which uses them several times."""
        tensors = self.tensors()
        if dtype == self.last_weight.dtype:
            return _Layers.of(tensors, dtype)
        return self._casts.get(tensors, lambda: _Layers.of(tensors, dtype))

    @torch.no_grad()
    def rescale(self, scale_G: Tensor, shift_G: Tensor) -> None:
        """Change the last layer so that each output x of discount g becomes scale_g x + shift_g."""
        scale_G1, shift_G1, parts = scale_G[:, None], shift_G[:, None], (len(scale_G), self.num_outputs)
        self.last_weight.unflatten(-1, parts).mul_(scale_G1)
        bias = self.last_bias.unflatten(-1, parts)
        torch.addcmul(shift_G1, bias, scale_G1, out=bias)

    def tensors(self) -> list[Tensor]:
        """List all parameters in the order of `_Layers`' fields."""
        # An update asks several times, and a ParameterList formats the name of each item to find it.
        lists = [each._parameters.values() for each in (self.weights, self.biases)]
        return [*lists[0], *lists[1], self.last_weight, self.last_bias]  # type: ignore[list-item]

    def split_chunks(self, h_ND: Tensor, copies: int = 1) -> Iterator[slice]:
        """Split the rows of `h_ND` into slices, where each row stands for `copies` rows of every critic."""
        most, rows = _CUDA_ROWS if h_ND.device.type == "cuda" else CPU_ROWS, len(h_ND)
        size = max(1, most // (self.members * copies))
        # Without rows there is one chunk, which is empty.
        return (slice(start, min(start + size, rows)) for start in range(0, max(rows, 1), size))


class ActionValues(Ensemble):
    """Ensemble with a value for each discount and each of A actions: one pass serves data, policy and targets."""

    @torch.no_grad()
    def forward(self, h_ND: Tensor) -> Tensor:
        """Compute values (C, N, G, A), without gradient."""
        layers = self.layers(choose_dtype(h_ND.device))
        with torch.autocast(h_ND.device.type, enabled=False):
            chunks = [
                self._compute_table(self._run_layers(h_ND[rows], layers)[-1], layers)
                for rows in self.split_chunks(h_ND)
            ]
        return join_chunks(chunks, 1).unflatten(-1, (self.num_discounts, self.num_outputs))

    def fused_loss(self, h_ND: Tensor, loss: _TableLoss) -> tuple[Tensor, Tensor]:
        """Sum `loss` over chunks -> (loss, with gradient to critics and state; values (C, N, G, A), without)."""
        total, values, grads = self._fused_loss(h_ND.detach(), loss, torch.is_grad_enabled())
        return (total if grads is None else attach(total, (h_ND, *self.tensors()), grads)), values

    @torch.no_grad()
    def _fused_loss(self, h_ND: Tensor, loss: _TableLoss, learn: bool) -> tuple[Tensor, Tensor, list[Tensor] | None]:
        # Forward and backward by hand, chunk by chunk: autograd would keep the outputs of all layers, for all rows and
        # critics, until the backward.
        dtype, tensors = choose_dtype(h_ND.device), self.tensors()
        grad_h, *grads = make_zeros([h_ND, *tensors])
        layers, grad = self.layers(dtype), _Layers.of(grads, torch.float32)
        losses, tables = [], []
        with torch.autocast(h_ND.device.type, enabled=False):
            for rows in self.split_chunks(h_ND):
                acts = self._run_layers(h_ND[rows], layers)
                table_CnO = self._compute_table(acts[-1], layers)
                tables.append(table_CnO.unflatten(-1, (self.num_discounts, self.num_outputs)))
                part, slope_CnGA = loss(rows, tables[-1])
                losses.append(part)
                if not learn:
                    continue
                slope_CnO = slope_CnGA.flatten(2)
                grad.last_bias.add_(slope_CnO.sum(1, keepdim=True))
                slope_CnO = slope_CnO.to(dtype)
                add_product(grad.last_weight, acts[-1].mT, slope_CnO)
                slope_CnW = layers.backpropagate(torch.bmm(slope_CnO, layers.last_weight.mT), acts[1:], grad)
                # The input has no activation.
                add_product(grad.weights[0], acts[0].mT, slope_CnW)
                grad.biases[0].add_(slope_CnW.sum(1, keepdim=True))
                add_product(grad_h[rows], slope_CnW, layers.weights[0].mT)
        return sum_chunks(losses), join_chunks(tables, 1), [grad_h, *grads] if learn else None

    def _run_layers(self, h_nD: Tensor, layers: _Layers) -> list[Tensor]:
        """List the inputs of all layers, the state (C, n, D) first."""
        x_CnD = h_nD.to(layers.last_weight.dtype).expand(self.members, -1, -1)
        return layers.run_hidden(x_CnD)

    @staticmethod
    def _compute_table(x_CnW: Tensor, layers: _Layers) -> Tensor:
        """Compute the last layer's output (C, n, O), in float32: learning depends on small differences of values, which
        bf16 does not resolve."""
        return torch.baddbmm(layers.last_bias, x_CnW.float(), layers.last_weight.float())


class ActionInput(Ensemble):
    """Value of (state, action, discount); the discount enters as symlog of its effective horizon 1 / (1 - gamma).

    The first layer is the sum of a state's, an action's and a discount's part: the state's is computed once for all
    discounts, samples and passes (`states`).
    """

    def __init__(self, input_size: int, action_size: int, gammas: Sequence[float], settings: CriticSettings) -> None:
        readout: Readout = TwoHot(settings) if settings.kind == "two-hot" else Scalar(len(gammas))
        own = len(gammas) if readout.normalized else 1
        super().__init__(input_size + action_size + 1, own, readout.outputs // own, settings)
        self.readout = readout
        self.parts = (input_size, action_size, 1)
        self.register_buffer("effective_horizon_G", symlog(1 / (1 - torch.tensor(gammas))), persistent=False)
        self.effective_horizon_G: Tensor

    @torch.no_grad()
    def states(self, h_ND: Tensor) -> Tensor:
        """Compute the state's part of the first layer (C, N, W), without gradient."""
        dtype = choose_dtype(h_ND.device)
        with torch.autocast(h_ND.device.type, enabled=False):
            h_CND = h_ND.to(dtype).expand(self.members, -1, -1)
            return torch.bmm(h_CND, self.layers(dtype).weights[0][:, : self.parts[0]])

    @torch.no_grad()
    def forward(self, state_CNW: Tensor, action_NGKF: Tensor, needed: Tensor | None = None) -> Tensor:
        """Compute values of the actions (C, N, G, K), without gradient; 0 where not `needed`, which is bool and
        broadcasts to that shape."""
        members, (count, discounts, samples, _) = self.members, action_NGKF.shape
        layers = self.layers(state_CNW.dtype)
        out = torch.zeros((members, discounts * samples, count), device=state_CNW.device)
        if needed is not None:
            needed = needed.expand(members, count, discounts, samples).permute(0, 2, 3, 1).flatten(1, 2)
        # Where the host need not wait long for their number, only the needed rows are computed.
        some = needed if self.may_wait(out.numel(), out.device) else None
        with torch.autocast(state_CNW.device.type, enabled=False):
            for rows in self.split_chunks(action_NGKF, discounts * samples):
                picked = None if some is None else _Picked.of(some[..., rows].flatten(1))
                _, value = self._compute_values(layers, state_CNW[:, rows], action_NGKF[rows], picked)
                if picked is not None:
                    value = value.new_zeros(members, discounts * samples * len(action_NGKF[rows])).index_put_(
                        (picked.critic_M, picked.row_M), value[picked.critic_M, picked.place_M]
                    )
                out[..., rows] = value.view(members, discounts * samples, -1)
        if needed is not None and some is None:
            out = torch.where(needed, out, 0.0)
        return out.view(members, discounts, samples, count).permute(0, 3, 1, 2)

    @staticmethod
    def may_wait(rows: int, device: torch.device) -> bool:
        """Check whether a pass over so many rows of the critics should first find out which of them are needed. For
        their number the host waits for a device, which in the meantime would have computed all rows of a small pass."""
        return device.type != "cuda" or rows > _CUDA_ROWS

    def min_q(self, state_CNW: Tensor, action_NGKF: Tensor, drawn_MNG: Tensor) -> tuple[Tensor, Tensor]:
        """Average each critic's values over the K actions -> (minimum over the drawn critics (N, G), with gradient to
        the actions through the critic that attains it; averages of all critics (C, N, G), without gradient)."""
        learn = torch.is_grad_enabled() and action_NGKF.requires_grad
        value, all_values, slope = self._min_q(state_CNW, action_NGKF.detach(), drawn_MNG, learn)
        return (value if slope is None else attach(value, (action_NGKF,), (slope,))), all_values

    @torch.no_grad()
    def _min_q(
        self, state_CNW: Tensor, action_NGKF: Tensor, drawn_MNG: Tensor, learn: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        members, (count, discounts, samples, features) = self.members, action_NGKF.shape
        layers = self.layers(state_CNW.dtype)
        out_CGN = torch.empty((members, discounts, count), device=state_CNW.device)
        least_GN = out_CGN.new_empty((discounts, count))
        slope = torch.zeros_like(action_NGKF, dtype=torch.float32) if learn else None
        drawn_MGN = drawn_MNG.transpose(1, 2)
        with torch.autocast(state_CNW.device.type, enabled=False):
            for rows in self.split_chunks(action_NGKF, discounts * samples):
                acts, value_CR = self._compute_values(layers, state_CNW[:, rows], action_NGKF[rows], None)
                value_CGn = value_CR.view(members, discounts, samples, -1).mean(2)
                out_CGN[..., rows] = value_CGn
                drawn_MGn = drawn_MGN[..., rows]
                least_GN[:, rows], place_Gn = value_CGn.gather(0, drawn_MGn).min(0)
                if slope is None:
                    continue
                critic_Gn = drawn_MGn.gather(0, place_Gn[None])[0]
                critic_R = critic_Gn[:, None].expand(-1, samples, -1).flatten()
                wanted_CR = critic_R == torch.arange(members, device=critic_R.device)[:, None]
                picked = _Picked.of(wanted_CR) if self.may_wait(out_CGN.numel() * samples, critic_R.device) else None
                outputs = acts if picked is None else [picked.rows_of(output) for output in acts]
                discount_R = self._list_discounts(critic_R.numel(), critic_R.device)
                discount_CP = discount_R.expand(members, -1) if picked is None else discount_R[picked.row_CP]
                slope_CPW = self.readout.input_gradients(outputs[-1], layers.last_weight, layers.last_bias, discount_CP)
                if picked is None:
                    slope_CPW = slope_CPW * wanted_CR[..., None]
                slope_CPW = layers.backpropagate(slope_CPW, outputs)
                slope_CPF = torch.bmm(slope_CPW, layers.weights[0][:, self.parts[0] : -1].mT)
                if picked is None:
                    slope_RF = slope_CPF.sum(0, dtype=slope.dtype) / samples
                else:
                    slope_RF = slope.new_empty((critic_R.numel(), features))
                    slope_RF[picked.row_M] = slope_CPF[picked.critic_M, picked.place_M].float() / samples
                slope[rows] = slope_RF.view(discounts, samples, -1, features).permute(2, 0, 1, 3)
        return least_GN.t(), out_CGN.transpose(1, 2), slope

    def fused_loss(
        self, h_ND: Tensor, state_CNW: Tensor, action_NF: Tensor, loss: _OutputLoss
    ) -> tuple[Tensor, Tensor]:
        """Sum `loss` over chunks, for the actions `action_NF` -> (loss, with gradient to critics and state; values
        (C, N, G), without)."""
        total, values, grads = self._fused_loss(h_ND.detach(), state_CNW, action_NF, loss, torch.is_grad_enabled())
        return (total if grads is None else attach(total, (h_ND, *self.tensors()), grads)), values

    @torch.no_grad()
    def _fused_loss(
        self, h_ND: Tensor, state_CNW: Tensor, action_NF: Tensor, loss: _OutputLoss, learn: bool
    ) -> tuple[Tensor, Tensor, list[Tensor] | None]:
        dtype, members, discounts, tensors = (
            state_CNW.dtype,
            self.members,
            len(self.effective_horizon_G),
            self.tensors(),
        )
        grad_h, *grads = make_zeros([h_ND, *tensors])
        layers, grad = self.layers(dtype), _Layers.of(grads, torch.float32)
        losses, values = [], []
        by_state, by_action = layers.weights[0][:, : self.parts[0]], layers.weights[0][:, self.parts[0] : -1]
        by_horizon_CG1W = self._compute_horizon_part(layers)
        with torch.autocast(h_ND.device.type, enabled=False):
            input_NI = torch.cat((h_ND.to(dtype), action_NF.to(dtype)), 1)
            for rows in self.split_chunks(h_ND, discounts):
                input_CnI = input_NI[rows].expand(members, -1, -1)
                first_CnW = torch.baddbmm(state_CNW[:, rows], input_CnI[..., self.parts[0] :], by_action)
                first_CGnW = F.leaky_relu_(first_CnW[:, None] + by_horizon_CG1W, SLOPE)
                acts = layers.run_hidden(first_CGnW.flatten(1, 2), 1)
                x_CGnW = acts[-1].unflatten(1, (discounts, -1))
                part, value_CGn, slope = loss(rows, self.readout(x_CGnW, layers.last_weight, layers.last_bias))
                losses.append(part)
                values.append(value_CGn)
                if not learn:
                    continue
                slope_CRW = self.readout.backward(slope, x_CGnW, layers.last_weight, (grad.last_weight, grad.last_bias))
                slope_CRW = layers.backpropagate(slope_CRW, acts, grad)
                slope_CGnW = slope_CRW.unflatten(1, (discounts, -1))
                slope_CnW, slope_CGW = slope_CGnW.sum(1), slope_CGnW.sum(2).float()
                add_product(grad.weights[0][:, :-1], input_CnI.mT, slope_CnW)
                grad.weights[0][:, -1] += self.effective_horizon_G @ slope_CGW
                grad.biases[0].add_(slope_CGW.sum(1, keepdim=True))
                add_product(grad_h[rows], slope_CnW, by_state.mT)
        value_CNG = join_chunks(values, 2).transpose(1, 2)
        return sum_chunks(losses), value_CNG, [grad_h, *grads] if learn else None

    def _compute_horizon_part(self, layers: _Layers) -> Tensor:
        """Compute the discounts' and the bias's part of the first layer (C, G, 1, W)."""
        horizon_G1 = self.effective_horizon_G[:, None].to(layers.last_weight.dtype)
        return torch.addcmul(layers.biases[0], horizon_G1, layers.weights[0][:, -1:])[:, :, None]

    def _list_discounts(self, rows: int, device: torch.device) -> Tensor:
        """List the discount of each of a chunk's R rows."""
        discounts = len(self.effective_horizon_G)
        return torch.arange(discounts, device=device).repeat_interleave(rows // discounts)

    def _compute_values(
        self, layers: _Layers, state_CnW: Tensor, action_nGKF: Tensor, picked: _Picked | None
    ) -> tuple[list[Tensor], Tensor]:
        """Compute the critics' activations, and their values (C, R), or (C, P) of the `picked` rows of the chunk."""
        members, (count, width), discounts = self.members, state_CnW.shape[1:], len(self.effective_horizon_G)
        action_SnF = action_nGKF.permute(1, 2, 0, 3).flatten(0, 1)
        action_RF, by_action = action_SnF.flatten(0, 1).to(state_CnW.dtype), layers.weights[0][:, self.parts[0] : -1]
        by_horizon_CG1W = self._compute_horizon_part(layers)
        discount = self._list_discounts(len(action_RF), action_RF.device)
        if picked is None:
            first_CGnW = state_CnW[:, None] + by_horizon_CG1W
            first_CGKnW = first_CGnW[:, :, None].expand(-1, -1, len(action_SnF) // discounts, -1, -1)
            action_CxF, first = action_RF.expand(members, -1, -1), first_CGKnW.reshape(members, -1, width)
            discount = discount.expand(members, -1)
        else:
            action_CxF, discount = action_RF[picked.row_CP], discount[picked.row_CP]
            first = state_CnW[picked.critic_C1, picked.row_CP % count]
            first += by_horizon_CG1W[picked.critic_C1, discount, 0]
        first.baddbmm_(action_CxF, by_action)
        acts = layers.run_hidden(F.leaky_relu_(first, SLOPE), 1)
        return acts, self.readout.values(acts[-1], layers.last_weight, layers.last_bias, discount)


@dataclass(frozen=True)
class _Picked:
    """Some of a chunk's R rows for each critic, P at most; critics with fewer repeat row 0, whose results are not used.
    M is the number of pairs of a critic and one of its rows; `place_M` is a pair's place among the critic's P."""

    row_CP: Tensor
    critic_C1: Tensor
    critic_M: Tensor
    row_M: Tensor
    place_M: Tensor

    @classmethod
    def of(cls, wanted_CR: Tensor) -> _Picked:
        """Pick the rows that a mask wants. The host waits for their number, once a chunk."""
        critic_M, row_M = wanted_CR.nonzero(as_tuple=True)
        place_M = (wanted_CR.cumsum(1) - 1)[critic_M, row_M]
        most = int(place_M.max()) + 1 if len(place_M) else 0
        row_CP = row_M.new_zeros(len(wanted_CR), most).index_put_((critic_M, place_M), row_M)
        critic_C1 = torch.arange(len(wanted_CR), device=row_M.device)[:, None]
        return cls(row_CP, critic_C1, critic_M, row_M, place_M)

    def rows_of(self, output_CRW: Tensor) -> Tensor:
        """Select the picked rows (C, P, W)."""
        return output_CRW[self.critic_C1, self.row_CP]
