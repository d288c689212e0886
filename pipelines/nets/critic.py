"""Ensembles of value heads, and their passes: forward and backward in one, chunk by chunk, so that no graph is kept.

All critics are computed by one batched product a layer. Values are in normalised units (see learning/popart.py) or in
units of scaled rewards, depending on the readout. Losses are functions that the caller passes (see
learning/objectives.py): of a chunk's outputs, they return the loss and its gradient with respect to these outputs.
C critics, N rows, n rows of a chunk, G discounts, A actions, D state width, W hidden width, F action features, K action
samples, S = G K, R = S n; P rows picked of each critic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipelines.config.model import CriticSettings
from pipelines.nets import init
from pipelines.nets.kept import Kept
from pipelines.nets.norms import symlog
from pipelines.nets.passes import (
    SLOPE,
    activations,
    add_product,
    add_products,
    attach,
    backward,
    chunks,
    may_wait,
    precision,
)
from pipelines.nets.readout import Readout, Scalar, TwoHot

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
        *inner, last_weight = [tensor.to(dtype) for tensor in inner]
        depth = len(inner) // 2
        return cls(inner[:depth], inner[depth:], last_weight, last_bias)


class Ensemble(nn.Module):
    """Hidden layers and a last layer of C independent members; the last layer has a part for each discount."""

    def __init__(self, input_size: int, num_discounts: int, num_outputs: int, settings: CriticSettings) -> None:
        super().__init__()
        members, widths = settings.ensemble, settings.hidden
        self.members, self.num_discounts, self.num_outputs = members, num_discounts, num_outputs
        sizes = list(zip((input_size, *widths), widths, strict=False))
        self.weights = nn.ParameterList(init.members_(torch.empty(members, i, o), 2**0.5) for i, o in sizes)
        self.biases = nn.ParameterList(torch.zeros(members, 1, o) for _, o in sizes)
        shape = (members, widths[-1], num_discounts * num_outputs)
        self.last_weight = nn.Parameter(init.members_(torch.empty(shape), init.VALUE_GAIN))
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
        """Return all parameters, in the order of `_Layers`' fields."""
        return [*self.weights, *self.biases, self.last_weight, self.last_bias]


class ActionValues(Ensemble):
    """Ensemble with a value for each discount and each of A actions: one pass serves data, policy and targets."""

    @torch.no_grad()
    def forward(self, h_ND: Tensor) -> Tensor:
        """Return values (C, N, G, A), without gradient."""
        layers, shape = self.layers(precision(h_ND.device)), (self.members, len(h_ND))
        out = torch.empty((*shape, self.last_bias.shape[-1]), device=h_ND.device)
        with torch.autocast(h_ND.device.type, enabled=False):
            for rows in chunks(len(h_ND), self.members, h_ND.device):
                out[:, rows] = _table(self._activations(h_ND[rows], layers)[-1], layers)
        return out.view(*shape, self.num_discounts, self.num_outputs)

    def fused_loss(self, h_ND: Tensor, loss: _TableLoss) -> tuple[Tensor, Tensor]:
        """Sum `loss` over chunks -> (loss, with gradient to critics and state; values (C, N, G, A), without)."""
        total, values, grads = self._fused_loss(h_ND.detach(), loss, torch.is_grad_enabled())
        return (total if grads is None else attach(total, (h_ND, *self.tensors()), grads)), values

    @torch.no_grad()
    def _fused_loss(self, h_ND: Tensor, loss: _TableLoss, learn: bool) -> tuple[Tensor, Tensor, list[Tensor] | None]:
        dtype, tensors = precision(h_ND.device), self.tensors()
        grad_h, *grads = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (h_ND, *tensors)]
        layers, grad = self.layers(dtype), _Layers.of(grads, torch.float32)
        out = torch.empty((self.members, len(h_ND), self.num_discounts, self.num_outputs), device=h_ND.device)
        total = out.new_zeros(())
        with torch.autocast(h_ND.device.type, enabled=False):
            for rows in chunks(len(h_ND), self.members, h_ND.device):
                acts = self._activations(h_ND[rows], layers)
                table_CnGA = _table(acts[-1], layers).unflatten(-1, out.shape[2:])
                out[:, rows] = table_CnGA
                part, slope_CnGA = loss(rows, table_CnGA)
                total += part
                if not learn:
                    continue
                slope_CnO = slope_CnGA.flatten(2)
                grad.last_bias.add_(slope_CnO.sum(1, keepdim=True))
                slope_CnO = slope_CnO.to(dtype)
                add_product(grad.last_weight, acts[-1].mT, slope_CnO)
                slope_CnW = backward(
                    torch.bmm(slope_CnO, layers.last_weight.mT),
                    acts[1:],
                    layers.weights[1:],
                    (grad.weights[1:], grad.biases[1:]),
                )
                # The input has no activation.
                add_product(grad.weights[0], acts[0].mT, slope_CnW)
                grad.biases[0].add_(slope_CnW.sum(1, keepdim=True))
                add_products(grad_h[rows], slope_CnW, layers.weights[0].mT)
        return total, out, [grad_h, *grads] if learn else None

    def _activations(self, h_nD: Tensor, layers: _Layers) -> list[Tensor]:
        """Return the input of every layer of all critics, the state (C, n, D) first."""
        x_CnD = h_nD.to(layers.last_weight.dtype).expand(self.members, -1, -1)
        return activations(x_CnD, layers.weights, layers.biases)


def _table(x_CnW: Tensor, layers: _Layers) -> Tensor:
    """Return the last layer's output (C, n, O), in float32: learning depends on small differences of values, which bf16
    does not resolve."""
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
        """Return the state's part of the first layer (C, N, W), without gradient."""
        dtype = precision(h_ND.device)
        with torch.autocast(h_ND.device.type, enabled=False):
            h_CND = h_ND.to(dtype).expand(self.members, -1, -1)
            return torch.bmm(h_CND, self.layers(dtype).weights[0][:, : self.parts[0]])

    @torch.no_grad()
    def forward(self, state_CNW: Tensor, action_NGKF: Tensor, needed: Tensor | None = None) -> Tensor:
        """Return values of the actions (C, N, G, K), without gradient; 0 where not `needed`, which is bool and
        broadcasts to that shape."""
        members, (count, discounts, samples, _) = self.members, action_NGKF.shape
        layers = self.layers(state_CNW.dtype)
        out = torch.zeros((members, discounts * samples, count), device=state_CNW.device)
        if needed is not None:
            needed = needed.expand(members, count, discounts, samples).permute(0, 2, 3, 1).flatten(1, 2)
        some = needed if may_wait(out.numel(), out.device) else None
        with torch.autocast(state_CNW.device.type, enabled=False):
            for rows in chunks(count, members * discounts * samples, state_CNW.device):
                picked = None if some is None else _Picked.of(some[..., rows].flatten(1))
                _, value = self._values(layers, state_CNW[:, rows], _by_discount(action_NGKF[rows]), picked)
                if picked is not None:
                    value = value.new_zeros(members, discounts * samples * len(action_NGKF[rows])).index_put_(
                        (picked.critic_M, picked.row_M), value[picked.critic_M, picked.place_M]
                    )
                out[..., rows] = value.view(members, discounts * samples, -1)
        if needed is not None and some is None:
            out = torch.where(needed, out, 0.0)
        return out.view(members, discounts, samples, count).permute(0, 3, 1, 2)

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
            for rows in chunks(count, members * discounts * samples, state_CNW.device):
                acts, value_CR = self._values(layers, state_CNW[:, rows], _by_discount(action_NGKF[rows]), None)
                value_CGn = value_CR.view(members, discounts, samples, -1).mean(2)
                out_CGN[..., rows] = value_CGn
                drawn_MGn = drawn_MGN[..., rows]
                least_GN[:, rows], place_Gn = value_CGn.gather(0, drawn_MGn).min(0)
                if slope is None:
                    continue
                critic_Gn = drawn_MGn.gather(0, place_Gn[None])[0]
                critic_R = critic_Gn[:, None].expand(-1, samples, -1).flatten()
                wanted_CR = critic_R == torch.arange(members, device=critic_R.device)[:, None]
                picked = _Picked.of(wanted_CR) if may_wait(out_CGN.numel() * samples, critic_R.device) else None
                outputs = acts if picked is None else [picked.rows_of(output) for output in acts]
                discount_R = self._discounts(critic_R.numel(), critic_R.device)
                discount_CP = discount_R.expand(members, -1) if picked is None else discount_R[picked.row_CP]
                slope_CPW = self.readout.slopes(outputs[-1], layers.last_weight, layers.last_bias, discount_CP)
                if picked is None:
                    slope_CPW = slope_CPW * wanted_CR[..., None]
                slope_CPW = backward(slope_CPW, outputs, layers.weights[1:])
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
        grad_h, *grads = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (h_ND, *tensors)]
        layers, grad = self.layers(dtype), _Layers.of(grads, torch.float32)
        out_CGN = torch.empty((members, discounts, len(h_ND)), device=h_ND.device)
        total = out_CGN.new_zeros(())
        by_state, by_action = layers.weights[0][:, : self.parts[0]], layers.weights[0][:, self.parts[0] : -1]
        by_horizon_CG1W = self._by_horizon(layers)
        with torch.autocast(h_ND.device.type, enabled=False):
            input_NI = torch.cat((h_ND.to(dtype), action_NF.to(dtype)), 1)
            for rows in chunks(len(h_ND), members * discounts, h_ND.device):
                input_CnI = input_NI[rows].expand(members, -1, -1)
                first_CnW = torch.baddbmm(state_CNW[:, rows], input_CnI[..., self.parts[0] :], by_action)
                first_CGnW = F.leaky_relu_(first_CnW[:, None] + by_horizon_CG1W, SLOPE)
                acts = activations(first_CGnW.flatten(1, 2), layers.weights[1:], layers.biases[1:])
                x_CGnW = acts[-1].unflatten(1, (discounts, -1))
                part, out_CGN[..., rows], slope = loss(rows, self.readout(x_CGnW, layers.last_weight, layers.last_bias))
                total += part
                if not learn:
                    continue
                slope_CRW = self.readout.backward(slope, x_CGnW, layers.last_weight, (grad.last_weight, grad.last_bias))
                slope_CRW = backward(slope_CRW, acts, layers.weights[1:], (grad.weights[1:], grad.biases[1:]))
                slope_CGnW = slope_CRW.unflatten(1, (discounts, -1))
                slope_CnW, slope_CGW = slope_CGnW.sum(1), slope_CGnW.sum(2).float()
                add_product(grad.weights[0][:, :-1], input_CnI.mT, slope_CnW)
                grad.weights[0][:, -1] += self.effective_horizon_G @ slope_CGW
                grad.biases[0].add_(slope_CGW.sum(1, keepdim=True))
                add_products(grad_h[rows], slope_CnW, by_state.mT)
        return total, out_CGN.transpose(1, 2), [grad_h, *grads] if learn else None

    def _by_horizon(self, layers: _Layers) -> Tensor:
        """Return the discounts' and the bias's part of the first layer (C, G, 1, W)."""
        horizon_G1 = self.effective_horizon_G[:, None].to(layers.last_weight.dtype)
        return torch.addcmul(layers.biases[0], horizon_G1, layers.weights[0][:, -1:])[:, :, None]

    def _discounts(self, rows: int, device: torch.device) -> Tensor:
        """Return the discount of each of a chunk's R rows."""
        discounts = len(self.effective_horizon_G)
        return torch.arange(discounts, device=device).repeat_interleave(rows // discounts)

    def _values(
        self, layers: _Layers, state_CnW: Tensor, action_SnF: Tensor, picked: _Picked | None
    ) -> tuple[list[Tensor], Tensor]:
        """Return the critics' activations, and their values (C, R), or (C, P) of the `picked` rows of the chunk."""
        members, (count, width), discounts = self.members, state_CnW.shape[1:], len(self.effective_horizon_G)
        action_RF, by_action = action_SnF.flatten(0, 1).to(state_CnW.dtype), layers.weights[0][:, self.parts[0] : -1]
        by_horizon_CG1W = self._by_horizon(layers)
        discount = self._discounts(len(action_RF), action_RF.device)
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
        acts = activations(F.leaky_relu_(first, SLOPE), layers.weights[1:], layers.biases[1:])
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


def _by_discount(action_nGKF: Tensor) -> Tensor:
    """(n, G, K, F) -> (S, n, F)."""
    return action_nGKF.permute(1, 2, 0, 3).flatten(0, 1)
