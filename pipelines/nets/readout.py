"""Last layers of a critic: a number for each discount, or a distribution over bins of value.

A readout maps last hidden activations to outputs (values or logits), decodes outputs into values, and backpropagates
the gradient of a loss with respect to the outputs. The losses themselves are in learning/objectives.py. Rows of a
member are laid out (G, n), discount by discount, or are a selection of these: then `discount_R` has the discount of
each row. R rows, W width, G discounts, O outputs, Z bins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipelines.config.model import CriticSettings
from pipelines.nets.norms import symexp, symlog
from pipelines.nets.passes import add_product

_Grads = tuple[Tensor, Tensor]


class Readout(nn.Module, ABC):
    """Last layer; `weight` (W, O) and `bias` (O,) are those of one member."""

    outputs: int  # O
    normalized: bool  # whether values are in PopArt's units; else in units of scaled rewards

    @abstractmethod
    def values(self, x_RW: Tensor, weight: Tensor, bias: Tensor, discount_R: Tensor) -> Tensor:
        """Return values (R,) in float32."""

    @abstractmethod
    def slopes(self, x_RW: Tensor, weight: Tensor, bias: Tensor, discount_R: Tensor) -> Tensor:
        """Return d value / d x (R, W)."""

    @abstractmethod
    def forward(self, x_GnW: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return outputs in float32: values (G, n), or logits (G n, Z)."""

    @abstractmethod
    def backward(self, slope: Tensor, x_GnW: Tensor, weight: Tensor, grads: _Grads) -> Tensor:
        """Return the gradient of x (G n, W), given that of the outputs; those of weight and bias are added to
        `grads`."""


class Scalar(Readout):
    """A number, with a row of weights for each discount, so that value normalisation can correct it. Computed in
    float32: learning depends on small differences of values, which bf16 does not resolve."""

    normalized = True

    def __init__(self, num_discounts: int) -> None:
        super().__init__()
        self.outputs = num_discounts

    def values(self, x_RW: Tensor, weight: Tensor, bias: Tensor, discount_R: Tensor) -> Tensor:
        return torch.linalg.vecdot(x_RW.float(), weight.t().float()[discount_R]) + bias[discount_R]

    def slopes(self, x_RW: Tensor, weight: Tensor, bias: Tensor, discount_R: Tensor) -> Tensor:
        return weight.t()[discount_R]

    def forward(self, x_GnW: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        columns = weight.t().float().contiguous()
        values = [torch.mv(x_nW.float(), column) for x_nW, column in zip(x_GnW, columns, strict=True)]
        return torch.stack(values) + bias[:, None]

    def backward(self, slope: Tensor, x_GnW: Tensor, weight: Tensor, grads: _Grads) -> Tensor:
        narrow_Gn = slope.to(x_GnW.dtype)
        grads[0].add_(torch.bmm(narrow_Gn[:, None], x_GnW)[:, 0].t())
        grads[1].add_(slope.sum(1))
        return torch.bmm(narrow_Gn[:, :, None], weight.t()[:, None]).flatten(0, 1)


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
        low, high = self._position(ends).tolist()
        self.low, self.step = low, (high - low) / (settings.bins - 1)
        self.register_buffer("bins_Z", torch.linspace(low, high, settings.bins), persistent=False)
        self.bins_Z: Tensor
        self.sigma = settings.label_sigma * self.step if settings.labels == "hl-gauss" else None

    def values(self, x_RW: Tensor, weight: Tensor, bias: Tensor, discount_R: Tensor) -> Tensor:
        return self.decode(self._logits(x_RW, weight, bias).softmax(-1))

    def slopes(self, x_RW: Tensor, weight: Tensor, bias: Tensor, discount_R: Tensor) -> Tensor:
        probs_RZ = self._logits(x_RW, weight, bias).softmax(-1)
        mean_R = probs_RZ @ self.bins_Z
        slope_RZ = probs_RZ * (self.bins_Z - mean_R[:, None])
        if self.symlog:
            slope_RZ *= mean_R.abs().exp()[:, None]
        return slope_RZ.to(weight.dtype) @ weight.t()

    def forward(self, x_GnW: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return self._logits(x_GnW.flatten(0, 1), weight, bias)

    def backward(self, slope: Tensor, x_GnW: Tensor, weight: Tensor, grads: _Grads) -> Tensor:
        narrow_RZ = slope.to(x_GnW.dtype)
        add_product(grads[0], x_GnW.flatten(0, 1).t(), narrow_RZ)
        grads[1].add_(slope.sum(0))
        return narrow_RZ @ weight.t()

    def decode(self, probs_RZ: Tensor) -> Tensor:
        """Return the value of each distribution (R,)."""
        mean_R = probs_RZ @ self.bins_Z
        return symexp(mean_R) if self.symlog else mean_R

    def labels(self, target_R: Tensor) -> Tensor:
        """Return the distribution that stands for each target (R, Z)."""
        if self.sigma is None:
            index_R2, share_R2 = self.neighbours(target_R)
            return share_R2.new_zeros(len(target_R), self.outputs).scatter_add_(1, index_R2, share_R2)
        inside_R1 = self._position(target_R).clamp(self.bins_Z[0], self.bins_Z[-1])[:, None]
        edges = torch.cat((self.bins_Z - self.step / 2, self.bins_Z[-1:] + self.step / 2))
        below = torch.special.ndtr((edges - inside_R1) / self.sigma)
        mass_RZ = below.diff(dim=-1)
        return mass_RZ / mass_RZ.sum(-1, keepdim=True)

    def neighbours(self, target_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two bins around each target, and their shares (R, 2)."""
        position_R = ((self._position(target_R) - self.low) / self.step).clamp(0, self.outputs - 1)
        below_R = position_R.nan_to_num().floor().clamp_max(self.outputs - 2)  # NaN only in shares, never in an index
        share_R = position_R - below_R
        return torch.stack((below_R, below_R + 1), 1).long(), torch.stack((1 - share_R, share_R), 1)

    def _position(self, value: Tensor) -> Tensor:
        """Return values in the bins' units."""
        return symlog(value) if self.symlog else value

    def _logits(self, x_RW: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x_RW, weight.t()).float() + bias
