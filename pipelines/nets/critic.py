"""Ensembles of value heads, and their passes: forward and backward in one, chunk by chunk, so that no graph is kept.

Values are in normalised units (see learning/popart.py) or in units of scaled rewards, depending on the readout. Losses
are functions that the caller passes (see learning/objectives.py): of a chunk's outputs, they return the loss and its
gradient with respect to these outputs.
C critics, N rows, n rows of a chunk, G discounts, A actions, D state width, W hidden width, F action features, K action
samples, S = G K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipelines.config.model import CriticSettings
from pipelines.nets import init
from pipelines.nets.norms import symlog
from pipelines.nets.passes import SLOPE, activations, add_product, attach, backward, chunks, precision
from pipelines.nets.readout import Readout, Scalar, TwoHot

# Of a chunk's rows and their table of values (n, G, A): loss, and its gradient with respect to the table.
_TableLoss = Callable[[slice, Tensor], tuple[Tensor, Tensor]]
# Of a chunk's rows and the readout's outputs: loss, values (G, n), and the loss's gradient with respect to the outputs.
_OutputLoss = Callable[[slice, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Member:
    """One critic's tensors, or their gradients: `weights[0]` (I, W), ..., `last_weight` (W, O)."""

    weights: list[Tensor]
    biases: list[Tensor]
    last_weight: Tensor
    last_bias: Tensor


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

    @torch.no_grad()
    def rescale(self, scale_G: Tensor, shift_G: Tensor) -> None:
        """Change the last layer so that each output x of discount g becomes scale_g x + shift_g."""
        scale = scale_G.repeat_interleave(self.num_outputs)
        self.last_weight.mul_(scale)
        self.last_bias.mul_(scale).add_(shift_G.repeat_interleave(self.num_outputs))

    def tensors(self) -> list[Tensor]:
        """Return all parameters, in the order of `Member`'s fields."""
        return [*self.weights, *self.biases, self.last_weight, self.last_bias]

    def split(self, tensors: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> list[Member]:
        """Return views (or lower-precision copies) of `tensors` by member; the last bias keeps its precision."""
        depth = len(self.weights)
        *inner, last_bias = tensors
        inner = [tensor.detach().to(dtype) for tensor in inner]
        return [
            Member(
                weights=[weight[c] for weight in inner[:depth]],
                biases=[bias[c, 0] for bias in inner[depth : 2 * depth]],
                last_weight=inner[-1][c],
                last_bias=last_bias.detach()[c, 0],
            )
            for c in range(self.members)
        ]


def _pairs(grads: Member, first: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(grads.weights[first:], grads.biases[first:], strict=True))


class ActionValues(Ensemble):
    """Ensemble with a value for each discount and each of A actions: one pass serves data, policy and targets."""

    @torch.no_grad()
    def forward(self, h_ND: Tensor) -> Tensor:
        """Return values (C, N, G, A), without gradient."""
        dtype = precision(h_ND.device)
        out = torch.empty((self.members, len(h_ND), self.last_bias.shape[-1]), device=h_ND.device)
        with torch.autocast(h_ND.device.type, enabled=False):
            h_ND, parts = h_ND.to(dtype), self.split(self.tensors(), dtype)
            for rows in chunks(len(h_ND), 1, h_ND.device):
                for c, member in enumerate(parts):
                    x_nW = activations(h_ND[rows], member.weights, member.biases)[-1]
                    out[c, rows] = _table(x_nW, member)
        return out.unflatten(-1, (self.num_discounts, self.num_outputs))

    def fused_loss(self, h_ND: Tensor, loss: _TableLoss) -> tuple[Tensor, Tensor]:
        """Sum `loss` over members and chunks -> (loss, with gradient to critics and state; values (C, N, G, A),
        without)."""
        total, values, grads = self._fused_loss(h_ND.detach(), loss, torch.is_grad_enabled())
        return (total if grads is None else attach(total, (h_ND, *self.tensors()), grads)), values

    @torch.no_grad()
    def _fused_loss(self, h_ND: Tensor, loss: _TableLoss, learn: bool) -> tuple[Tensor, Tensor, list[Tensor] | None]:
        dtype = precision(h_ND.device)
        grad_h, *grads = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (h_ND, *self.tensors())]
        out = torch.empty((self.members, len(h_ND), self.num_discounts, self.num_outputs), device=h_ND.device)
        total = out.new_zeros(())
        with torch.autocast(h_ND.device.type, enabled=False):
            narrow, members = h_ND.to(dtype), self.split(self.tensors(), dtype)
            for rows in chunks(len(h_ND), 1, h_ND.device):
                h_nD = narrow[rows]
                for c, (member, grad) in enumerate(zip(members, self.split(grads), strict=True)):
                    acts = activations(h_nD, member.weights, member.biases)
                    table_nGA = out[c, rows]
                    table_nGA.copy_(_table(acts[-1], member).view_as(table_nGA))
                    part, slope_nGA = loss(rows, table_nGA)
                    total += part
                    if not learn:
                        continue
                    slope_nO = slope_nGA.flatten(1)
                    grad.last_bias.add_(slope_nO.sum(0))
                    slope_nO = slope_nO.to(dtype)
                    add_product(grad.last_weight, acts[-1].t(), slope_nO)
                    slope_nW = slope_nO @ member.last_weight.t()
                    grad_h[rows] += _through(slope_nW, acts, member.weights, _pairs(grad, 0))
        return total, out, [grad_h, *grads] if learn else None


def _table(x_nW: Tensor, member: Member) -> Tensor:
    """Return the last layer's output (n, O), in float32: learning depends on small differences of values, which bf16
    does not resolve."""
    return torch.addmm(member.last_bias, x_nW.float(), member.last_weight.float())


def _through(grad_RW: Tensor, acts: list[Tensor], weights: list[Tensor], grads: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the gradient of the input `acts[0]`, to which no activation was applied."""
    grad_RW = backward(grad_RW, acts[1:], weights[1:], grads[1:])
    add_product(grads[0][0], acts[0].t(), grad_RW)
    grads[0][1].add_(grad_RW.sum(0))
    return grad_RW @ weights[0].t()


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
            return torch.bmm(h_CND, self.weights[0][:, : self.parts[0]].to(dtype))

    @torch.no_grad()
    def forward(self, state_CNW: Tensor, action_NGKF: Tensor, needed: Tensor | None = None) -> Tensor:
        """Return values of the actions (C, N, G, K), without gradient; 0 where not `needed`, which is bool and
        broadcasts to that shape."""
        _, count, discounts, samples, _ = (*state_CNW.shape[:2], *action_NGKF.shape[1:])
        out = torch.zeros((self.members, discounts * samples, count), device=state_CNW.device)
        shape = (self.members, count, discounts, samples)
        wanted = None if needed is None else needed.expand(shape).permute(0, 2, 3, 1).flatten(1, 2)
        with torch.autocast(state_CNW.device.type, enabled=False):
            members = self._members(state_CNW.dtype)
            for rows in chunks(count, discounts * samples, state_CNW.device):
                action_SnF = _by_discount(action_NGKF[rows]).to(state_CNW.dtype)
                for c, member in enumerate(members):
                    if wanted is None:
                        out[c, :, rows] = self._values(member, state_CNW[c, rows], action_SnF, None)[1]
                        continue
                    picked = wanted[c, :, rows].flatten().nonzero()[:, 0]
                    chunk = out.new_zeros(action_SnF.shape[:2])
                    chunk.view(-1)[picked] = self._values(member, state_CNW[c, rows], action_SnF, picked)[1]
                    out[c, :, rows] = chunk
        return out.unflatten(1, (discounts, samples)).permute(0, 3, 1, 2)

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
        _, count, discounts, samples, _ = (*state_CNW.shape[:2], *action_NGKF.shape[1:])
        out_CGN = torch.empty((self.members, discounts, count), device=state_CNW.device)
        least_GN = out_CGN.new_empty((discounts, count))
        slope = torch.zeros_like(action_NGKF, dtype=torch.float32) if learn else None
        drawn_MGN = drawn_MNG.transpose(1, 2)
        with torch.autocast(state_CNW.device.type, enabled=False):
            members = self._members(state_CNW.dtype)
            for rows in chunks(count, discounts * samples, state_CNW.device):
                action_SnF = _by_discount(action_NGKF[rows]).to(state_CNW.dtype)
                kept = []
                for c, member in enumerate(members):
                    acts, value_Sn = self._values(member, state_CNW[c, rows], action_SnF, None)
                    out_CGN[c, :, rows] = value_Sn.unflatten(0, (discounts, samples)).mean(1)
                    kept.append(acts if learn else [])
                value_MGn = out_CGN[:, :, rows].gather(0, drawn_MGN[..., rows])
                least_GN[:, rows], place_Gn = value_MGn.min(0)
                if slope is None:
                    continue
                critic_Gn = drawn_MGN[..., rows].gather(0, place_Gn[None])[0]
                critic_R = critic_Gn[:, None].expand(-1, samples, -1).flatten()
                slope_RF = slope.new_empty((critic_R.numel(), self.parts[1]))
                discount_R = self._discounts(action_SnF)
                for c, (member, acts) in enumerate(zip(members, kept, strict=True)):
                    picked = (critic_R == c).nonzero()[:, 0]
                    outputs = [output[picked] for output in acts]
                    slope_RW = self.readout.slopes(
                        outputs[-1], member.last_weight, member.last_bias, discount_R[picked]
                    )
                    slope_RW = backward(slope_RW, outputs, member.weights[1:])
                    by_action = member.weights[0][self.parts[0] : -1]
                    slope_RF[picked] = (slope_RW @ by_action.t()).float() / samples
                slope[rows] = slope_RF.view(discounts, samples, -1, self.parts[1]).permute(2, 0, 1, 3)
        return least_GN.t(), out_CGN.transpose(1, 2), slope

    def fused_loss(
        self, h_ND: Tensor, state_CNW: Tensor, action_NF: Tensor, loss: _OutputLoss
    ) -> tuple[Tensor, Tensor]:
        """Sum `loss` over members and chunks, for the actions `action_NF` -> (loss, with gradient to critics and state;
        values (C, N, G), without)."""
        total, values, grads = self._fused_loss(h_ND.detach(), state_CNW, action_NF, loss, torch.is_grad_enabled())
        return (total if grads is None else attach(total, (h_ND, *self.tensors()), grads)), values

    @torch.no_grad()
    def _fused_loss(
        self, h_ND: Tensor, state_CNW: Tensor, action_NF: Tensor, loss: _OutputLoss, learn: bool
    ) -> tuple[Tensor, Tensor, list[Tensor] | None]:
        dtype, discounts = state_CNW.dtype, len(self.effective_horizon_G)
        grad_h, *grads = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (h_ND, *self.tensors())]
        out_CGN = torch.empty((self.members, discounts, len(h_ND)), device=h_ND.device)
        total = out_CGN.new_zeros(())
        with torch.autocast(h_ND.device.type, enabled=False):
            members = self._members(dtype)
            narrow_h, narrow_a = h_ND.to(dtype), action_NF.to(dtype)
            for rows in chunks(len(h_ND), discounts, h_ND.device):
                input_nI = torch.cat((narrow_h[rows], narrow_a[rows]), 1)
                for c, (member, grad) in enumerate(zip(members, self.split(grads), strict=True)):
                    by_action = member.weights[0][self.parts[0] : -1]
                    first_nW = torch.addmm(state_CNW[c, rows], narrow_a[rows], by_action)
                    first_GnW = first_nW + self._by_horizon(member)[:, None]
                    x_RW = F.leaky_relu_(first_GnW.flatten(0, 1), SLOPE)
                    acts = activations(x_RW, member.weights[1:], member.biases[1:])
                    x_GnW, last_grads = acts[-1].unflatten(0, (discounts, -1)), (grad.last_weight, grad.last_bias)
                    part, out_CGN[c, :, rows], slope = loss(
                        rows, self.readout(x_GnW, member.last_weight, member.last_bias)
                    )
                    total += part
                    if not learn:
                        continue
                    slope_RW = self.readout.backward(slope, x_GnW, member.last_weight, last_grads)
                    slope_RW = backward(slope_RW, acts, member.weights[1:], _pairs(grad, 1))
                    slope_GnW = slope_RW.unflatten(0, (discounts, -1))
                    slope_nW, slope_GW = slope_GnW.sum(0), slope_GnW.sum(1).float()
                    add_product(grad.weights[0][:-1], input_nI.t(), slope_nW)
                    grad.weights[0][-1] += self.effective_horizon_G @ slope_GW
                    grad.biases[0].add_(slope_GW.sum(0))
                    add_product(grad_h[rows], slope_nW, member.weights[0][: self.parts[0]].t())
        return total, out_CGN.transpose(1, 2), [grad_h, *grads] if learn else None

    def _members(self, dtype: torch.dtype) -> list[Member]:
        return self.split(self.tensors(), dtype)

    def _by_horizon(self, member: Member) -> Tensor:
        """Return the discounts' and the bias's part of the first layer (G, W)."""
        return torch.addcmul(
            member.biases[0], self.effective_horizon_G[:, None].to(member.biases[0].dtype), member.weights[0][-1]
        )

    def _discounts(self, action_SnF: Tensor) -> Tensor:
        """Return the discount of each of a chunk's S n rows."""
        discounts = len(self.effective_horizon_G)
        index_G = torch.arange(discounts, device=action_SnF.device)
        return index_G.repeat_interleave(action_SnF.shape[:2].numel() // discounts)

    def _values(
        self, member: Member, state_nW: Tensor, action_SnF: Tensor, picked: Tensor | None
    ) -> tuple[list[Tensor], Tensor]:
        """Return one critic's activations, and its values (S, n), or (R,) of the `picked` rows of the chunk."""
        by_action, discounts = member.weights[0][self.parts[0] : -1], len(self.effective_horizon_G)
        discount_R, by_horizon_GW = self._discounts(action_SnF), self._by_horizon(member)
        if picked is None:
            first_SnW = (action_SnF.flatten(0, 1) @ by_action).view(*action_SnF.shape[:2], -1)
            first_SnW += state_nW
            first_SnW.unflatten(0, (discounts, -1)).add_(by_horizon_GW[:, None, None])
            first_RW, shape = first_SnW.flatten(0, 1), action_SnF.shape[:2]
        else:
            discount_R, shape = discount_R[picked], picked.shape
            first_RW = action_SnF.flatten(0, 1)[picked] @ by_action
            first_RW += state_nW[picked % action_SnF.shape[1]]
            first_RW += by_horizon_GW[discount_R]
        acts = activations(F.leaky_relu_(first_RW, SLOPE), member.weights[1:], member.biases[1:])
        values_R = self.readout.values(acts[-1], member.last_weight, member.last_bias, discount_R)
        return acts, values_R.view(shape)


def _by_discount(action_nGKF: Tensor) -> Tensor:
    """(n, G, K, F) -> (S, n, F)."""
    return action_nGKF.permute(1, 2, 0, 3).flatten(0, 1)
