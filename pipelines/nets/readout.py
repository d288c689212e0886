"""Last layers of a critic: a number for each discount, or a distribution over bins of value.

A readout maps last hidden activations to outputs (values or logits), decodes outputs into values, and backpropagates
the gradient of a loss with respect to the outputs. The losses themselves are in learning/objectives.py. Rows of each
critic are laid out (G, n), discount by discount, or are a selection of these: then `discount_CR` has the discount of
each row. C critics, R rows, W width, G discounts, O outputs, Z bins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from pipelines.config.model import CriticSettings
from pipelines.nets.norms import symexp, symlog
from pipelines.nets.passes import add_product

_Grads = tuple[Tensor, Tensor]


class Readout(nn.Module, ABC):
    """Last layer of all critics; `weight` is (C, W, O), `bias` (C, 1, O)."""

    outputs: int  # O
    normalized: bool  # whether values are in PopArt's units; else in units of scaled rewards

    @abstractmethod
    def values(self, x_CRW: Tensor, weight: Tensor, bias: Tensor, discount_CR: Tensor) -> Tensor:
        """Return values (C, R) in float32."""

    @abstractmethod
    def slopes(self, x_CRW: Tensor, weight: Tensor, bias: Tensor, discount_CR: Tensor) -> Tensor:
        """Return d value / d x (C, R, W)."""

    @abstractmethod
    def forward(self, x_CGnW: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return outputs in float32: values (C, G, n), or logits (C, G n, Z)."""

    @abstractmethod
    def backward(self, slope: Tensor, x_CGnW: Tensor, weight: Tensor, grads: _Grads) -> Tensor:
        """Return the gradient of x (C, G n, W), given that of the outputs; those of weight and bias are added to
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

    def slopes(self, x_CRW: Tensor, weight: Tensor, bias: Tensor, discount_CR: Tensor) -> Tensor:
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
        low, high = self._position(ends).tolist()
        self.low, self.step = low, (high - low) / (settings.bins - 1)
        self.register_buffer("bins_Z", torch.linspace(low, high, settings.bins), persistent=False)
        self.bins_Z: Tensor
        self.sigma = settings.label_sigma * self.step if settings.labels == "hl-gauss" else None

    def values(self, x_CRW: Tensor, weight: Tensor, bias: Tensor, discount_CR: Tensor) -> Tensor:
        return self.decode(self._logits(x_CRW, weight, bias).softmax(-1))

    def slopes(self, x_CRW: Tensor, weight: Tensor, bias: Tensor, discount_CR: Tensor) -> Tensor:
        probs_CRZ = self._logits(x_CRW, weight, bias).softmax(-1)
        mean_CR = probs_CRZ @ self.bins_Z
        slope_CRZ = probs_CRZ * (self.bins_Z - mean_CR[..., None])
        if self.symlog:
            slope_CRZ *= mean_CR.abs().exp()[..., None]
        return torch.bmm(slope_CRZ.to(weight.dtype), weight.mT)

    def forward(self, x_CGnW: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return self._logits(x_CGnW.flatten(1, 2), weight, bias)

    def backward(self, slope: Tensor, x_CGnW: Tensor, weight: Tensor, grads: _Grads) -> Tensor:
        narrow_CRZ = slope.to(x_CGnW.dtype)
        add_product(grads[0], x_CGnW.flatten(1, 2).mT, narrow_CRZ)
        grads[1].add_(slope.sum(1, keepdim=True))
        return torch.bmm(narrow_CRZ, weight.mT)

    def decode(self, probs: Tensor) -> Tensor:
        """Return the value of each distribution (..., Z)."""
        mean = probs @ self.bins_Z
        return symexp(mean) if self.symlog else mean

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

    def _logits(self, x_CRW: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.bmm(x_CRW, weight).float() + bias
