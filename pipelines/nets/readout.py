"""What a critic's last layer says: a number for each discount, or a distribution over bins of value.

A readout turns last hidden outputs into values, and a loss against targets into gradients. Rows of a member are laid
out (G, n), discount by discount, or are some of these: then `discount_R` tells each row's. R rows, W width,
G discounts, Z bins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipelines.config.model import CriticSettings
from pipelines.nets.norms import symexp, symlog
from pipelines.nets.passes import add_product

Grads = tuple[Tensor, Tensor]


class Readout(nn.Module, ABC):
    """`weight` (W, O) and `bias` (O,) are one member's last layer."""

    outputs: int  # O
    normalized: bool  # whether values are in PopArt's units; else in units of (multiplied) rewards

    @abstractmethod
    def values(self, x_RW: Tensor, weight: Tensor, bias: Tensor, discount_R: Tensor) -> Tensor:
        """(R,) float32."""

    @abstractmethod
    def slopes(self, x_RW: Tensor, weight: Tensor, bias: Tensor, discount_R: Tensor) -> Tensor:
        """d value / d x (R, W)."""

    @abstractmethod
    def loss(
        self, x_GnW: Tensor, weight: Tensor, bias: Tensor, target_Gn: Tensor, scale_n: Tensor, grads: Grads | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sum of losses, each times `scale_n` -> (loss, values (G, n), gradient of x (G n, W) if `grads` is given,
        to which those of weight and bias are added)."""


class Scalar(Readout):
    """A number, with a row of weights for each discount, so that value normalisation can correct it; squared error.
    Computed in float32: what is learned from are small differences of values, less than bf16 tells apart."""

    normalized = True

    def __init__(self, num_discounts: int) -> None:
        super().__init__()
        self.outputs = num_discounts

    def values(self, x_RW: Tensor, weight: Tensor, bias: Tensor, discount_R: Tensor) -> Tensor:
        return torch.linalg.vecdot(x_RW.float(), weight.t().float()[discount_R]) + bias[discount_R]

    def slopes(self, x_RW: Tensor, weight: Tensor, bias: Tensor, discount_R: Tensor) -> Tensor:
        return weight.t()[discount_R]

    def loss(
        self, x_GnW: Tensor, weight: Tensor, bias: Tensor, target_Gn: Tensor, scale_n: Tensor, grads: Grads | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        columns = weight.t().float().contiguous()
        values = [torch.mv(x_nW.float(), column) for x_nW, column in zip(x_GnW, columns, strict=True)]
        value_Gn = torch.stack(values) + bias[:, None]
        error_Gn = value_Gn - target_Gn
        loss = (error_Gn.square() * scale_n).sum()
        if grads is None:
            return loss, value_Gn, None
        slope_Gn = 2 * scale_n * error_Gn
        narrow_Gn = slope_Gn.to(x_GnW.dtype)
        grads[0].add_(torch.bmm(narrow_Gn[:, None], x_GnW)[:, 0].t())
        grads[1].add_(slope_Gn.sum(1))
        return loss, value_Gn, torch.bmm(narrow_Gn[:, :, None], weight.t()[:, None]).flatten(0, 1)


class TwoHot(Readout):
    """A distribution over bins that are even in symlog space; the value is symexp of the mean bin (Hafner et al. 2023,
    arXiv 2301.04104). Or over bins that are even in value, whose mean is the value. Cross-entropy with two neighbouring
    bins, or with a Gaussian's mass on each bin (HL-Gauss; Farebrother et al. 2024, arXiv 2403.03950)."""

    normalized = False

    def __init__(self, settings: CriticSettings) -> None:
        super().__init__()
        self.outputs = settings.bins
        self.symlog = settings.symlog
        low, high = self._place(torch.tensor([settings.low, settings.high], dtype=torch.float64)).tolist()
        self.low, self.step = low, (high - low) / (settings.bins - 1)
        self.register_buffer("bins_Z", torch.linspace(low, high, settings.bins), persistent=False)
        self.bins_Z: Tensor
        self.sigma = settings.label_sigma * self.step if settings.labels == "hl-gauss" else None

    def values(self, x_RW: Tensor, weight: Tensor, bias: Tensor, discount_R: Tensor) -> Tensor:
        return self._value(self._logits(x_RW, weight, bias).softmax(-1) @ self.bins_Z)

    def slopes(self, x_RW: Tensor, weight: Tensor, bias: Tensor, discount_R: Tensor) -> Tensor:
        probs_RZ = self._logits(x_RW, weight, bias).softmax(-1)
        mean_R = probs_RZ @ self.bins_Z
        slope_RZ = probs_RZ * (self.bins_Z - mean_R[:, None])
        if self.symlog:
            slope_RZ *= mean_R.abs().exp()[:, None]
        return slope_RZ.to(weight.dtype) @ weight.t()

    def loss(
        self, x_GnW: Tensor, weight: Tensor, bias: Tensor, target_Gn: Tensor, scale_n: Tensor, grads: Grads | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        x_RW, scale_R1 = x_GnW.flatten(0, 1), scale_n.expand_as(target_Gn).reshape(-1, 1)
        logits_RZ = self._logits(x_RW, weight, bias)
        if self.sigma is None:  # only two bins have a share: one pass of exponentials serves probabilities and loss
            index_R2, share_R2 = self._neighbours(target_Gn.flatten())
            share_R2 = share_R2 * scale_R1
            logits_RZ -= logits_RZ.amax(-1, keepdim=True)
            named_R2 = logits_RZ.gather(1, index_R2)
            probs_RZ = logits_RZ.exp_()
            total_R1 = probs_RZ.sum(-1, keepdim=True)
            probs_RZ /= total_R1
            loss = (share_R2 * (total_R1.log() - named_R2)).sum()
        else:
            label_RZ = self.labels(target_Gn.flatten()) * scale_R1
            log_RZ = logits_RZ.log_softmax(-1)
            loss, probs_RZ = -(label_RZ * log_RZ).sum(), log_RZ.exp()
        value_Gn = self._value(probs_RZ @ self.bins_Z).view_as(target_Gn)
        slope_RZ = probs_RZ.mul_(scale_R1)
        if self.sigma is None:
            slope_RZ.scatter_add_(1, index_R2, -share_R2)
        else:
            slope_RZ -= label_RZ
        if grads is None:
            return loss, value_Gn, None
        narrow_RZ = slope_RZ.to(x_RW.dtype)
        add_product(grads[0], x_RW.t(), narrow_RZ)
        grads[1].add_(slope_RZ.sum(0))
        return loss, value_Gn, narrow_RZ @ weight.t()

    def labels(self, target_R: Tensor) -> Tensor:
        """The distribution that stands for each target (R, Z)."""
        if self.sigma is None:
            index_R2, share_R2 = self._neighbours(target_R)
            return share_R2.new_zeros(len(target_R), self.outputs).scatter_add_(1, index_R2, share_R2)
        inside_R1 = self._place(target_R).clamp(self.bins_Z[0], self.bins_Z[-1])[:, None]
        edges = torch.cat((self.bins_Z - self.step / 2, self.bins_Z[-1:] + self.step / 2))
        below = torch.special.ndtr((edges - inside_R1) / self.sigma)
        mass_RZ = below.diff(dim=-1)
        return mass_RZ / mass_RZ.sum(-1, keepdim=True)

    def _place(self, value: Tensor) -> Tensor:
        """Where values lie among the bins, in the bins' units."""
        return symlog(value) if self.symlog else value

    def _value(self, place: Tensor) -> Tensor:
        """Inverse of `_place`."""
        return symexp(place) if self.symlog else place

    def _neighbours(self, target_R: Tensor) -> tuple[Tensor, Tensor]:
        """The two bins about each target, and their shares (R, 2)."""
        place_R = ((self._place(target_R) - self.low) / self.step).clamp(0, self.outputs - 1)
        below_R = place_R.nan_to_num().floor().clamp_max(self.outputs - 2)  # NaN in the shares alone: no index is NaN
        share_R = place_R - below_R
        return torch.stack((below_R, below_R + 1), 1).long(), torch.stack((1 - share_R, share_R), 1)

    def _logits(self, x_RW: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x_RW, weight.t()).float() + bias
