"""Ensembles of value heads as batched matrix products. Outputs are in normalised units (see learning/popart.py).

C critics, N rows, G discounts, A actions, D state width, W hidden width, F action features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipelines.config.model import CriticSettings
from pipelines.nets import init
from pipelines.nets.norms import symlog

CHUNK_ROWS = 256


class Ensemble(nn.Module):
    """Hidden layers and a last layer of C independent members; the last layer has a part for each discount."""

    def __init__(self, input_size: int, num_discounts: int, num_outputs: int, settings: CriticSettings) -> None:
        super().__init__()
        members, widths = settings.ensemble, settings.hidden
        self.num_discounts, self.num_outputs = num_discounts, num_outputs
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

    def _deeper(self, x_CRW: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        for weight, bias in zip(weights, biases, strict=True):
            x_CRW = F.leaky_relu(torch.bmm(x_CRW, weight).add_(bias), inplace=True)
        return x_CRW


class ActionValues(Ensemble):
    """A value for each discount and each of A actions: one pass serves data, policy and target alike."""

    def forward(self, h_ND: Tensor) -> Tensor:
        """-> (C, N, G, A)."""
        x_CND = h_ND.expand(len(self.last_weight), -1, -1)
        x_CNW = self._deeper(x_CND, list(self.weights), list(self.biases))
        out = torch.bmm(x_CNW, self.last_weight) + self.last_bias
        return out.unflatten(-1, (self.num_discounts, self.num_outputs))


class ActionInput(Ensemble):
    """Value of (state, action, discount). The state's part of the first layer is computed once for all discounts.

    The discount enters as symlog(1 / (1 - gamma)); the last layer has its own row for each discount, so that value
    normalisation can correct it.
    """

    def __init__(self, input_size: int, action_size: int, gammas: Sequence[float], settings: CriticSettings) -> None:
        super().__init__(input_size + action_size + 1, len(gammas), 1, settings)
        self.split = (input_size, action_size, 1)
        self.register_buffer("horizon_G", symlog(1 / (1 - torch.tensor(gammas))), persistent=False)
        self.horizon_G: Tensor

    def forward(self, h_ND: Tensor, action: Tensor, *, frozen: bool = False) -> Tensor:
        """`action`: features (N, F), or (N, G, F) if they differ by discount -> (C, N, G).

        `frozen`: gradients flow to `h_ND` and `action` but not to the critics. Rows go through in chunks that stay
        in the processor's cache between layers.
        """
        tensors = [*self.weights, *self.biases, self.last_weight, self.last_bias]
        if frozen:
            tensors = [tensor.detach() for tensor in tensors]
        rows = CHUNK_ROWS if h_ND.device.type == "cpu" else max(1, len(h_ND))
        chunks = zip(h_ND.split(rows), action.split(rows), strict=True)
        return torch.cat([self._values(h, a, tensors) for h, a in chunks], 1)

    def _values(self, h_ND: Tensor, action: Tensor, tensors: list[Tensor]) -> Tensor:
        depth, rows, discounts = len(self.weights), len(h_ND), self.num_discounts
        weights, biases, (last_weight, last_bias) = tensors[:depth], tensors[depth : 2 * depth], tensors[-2:]
        by_state, by_action, by_horizon = weights[0].split(self.split, 1)
        members = len(last_weight)
        state_CN1W = torch.bmm(h_ND.expand(members, -1, -1), by_state)[:, :, None]
        flat_action = action.reshape(-1, action.shape[-1]).expand(members, -1, -1)
        first_CNGW = torch.bmm(flat_action, by_action).unflatten(1, (rows, -1)) + state_CN1W
        first_CNGW = first_CNGW + (biases[0] + self.horizon_G[:, None] * by_horizon)[:, None]
        x_CRW = self._deeper(F.leaky_relu(first_CNGW, inplace=True).flatten(1, 2), weights[1:], biases[1:])
        # every discount's last row for every discount, of which the diagonal counts: a plain product is cheapest
        return (
            torch.bmm(x_CRW, last_weight).view(members, rows, discounts, discounts).diagonal(dim1=2, dim2=3) + last_bias
        )
