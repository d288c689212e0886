"""Stored values as float inputs of a network: features by their space, squashing and standardising. All functions keep
leading dimensions.

F features of a value, N rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Ragged, Space
from pipelines.nets import ranks


def to_features(value: Tensor, space: Space) -> Tensor:
    """Convert to float32 features (..., F), F = space.flat_size: numbers and bits unchanged, choices one-hot.

    A sequence becomes its numbers, scaled, padded with zeros: enough to distinguish a few, not to read them.
    """
    match space:
        case Discrete(n=n):
            return (value[..., None] == torch.arange(n, device=value.device)).float()
        case MultiDiscrete(nvec=nvec):
            offsets = torch.tensor([0, *nvec[:-1]], device=value.device).cumsum(0)
            out = torch.zeros((*value.shape[:-1], sum(nvec)), device=value.device)
            return out.scatter_(-1, value.long() + offsets, 1.0)
        case MultiBinary():
            return value.float()
        case Ragged(scale=scale):
            return value.float() / scale
        case Box(shape=shape):
            return value.float().flatten(value.dim() - len(shape)) if shape else value.float()[..., None]


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate rows; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def symlog(x: Tensor) -> Tensor:
    """Compute sign(x) log(1 + |x|) (Hafner et al. 2023, arXiv 2301.04104)."""
    return x.sign() * x.abs().log1p()


def is_finite(x: Tensor) -> Tensor:
    """Compute `x.isfinite()` in two operators; torch composes it of four."""
    return x.abs() < torch.inf


def start_corrected_step(updates: Tensor, rate: float) -> Tensor:
    """Compute the step rate / (1 - (1 - rate)^t) of an exponential average, t the number of updates, at least 1: the
    first sets it, early ones have equal weight, later ones enter at `rate`."""
    # By expm1, which is precise in float32: 1 - (1 - rate)^t itself would lose half the digits of a small rate.
    logarithm = math.log1p(-rate) if rate < 1 else -math.inf
    return -rate / torch.expm1(updates.clamp_min(1) * logarithm)


def symexp(x: Tensor) -> Tensor:
    """Compute the inverse of symlog."""
    return x.sign() * x.abs().expm1()


class RunningNorm(nn.Module):
    """Standardisation of features by running moments. Only `update` changes them: `forward` is a pure function.

    (x - mean) / max(sigma, `least_sigma`), clamped to +- `limit`. The moments are exponential averages of step `rate`,
    corrected for their start, so that the first update sets them to the first batch's; before it, inputs pass
    unchanged.

    AMAGO divides by sigma only where it exceeds .01 and clamps at 1e4: as sigma crosses .01 a feature grows by 100x
    from one update to the next, and an outlier can reach the network a thousand times as large as any other input.
    """

    def __init__(self, features: int, rate: float, *, least_sigma: float = 0.01, limit: float = 10.0) -> None:
        super().__init__()
        self.rate, self.least_sigma, self.limit = rate, least_sigma, limit
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("square", torch.ones(features))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.mean: Tensor
        self.square: Tensor
        self.updates: Tensor

    @torch.no_grad()
    def update(self, x_NF: Tensor, valid_N: Tensor | None = None) -> None:
        """Add rows of features to the moments, those of all ranks, or the `valid_N` (bool) of them; without any nothing
        changes. Rows are weighted, not selected, so that no host waits for their number."""
        mean, square, count = ranks.compute_moments(x_NF, valid_N)
        some = count > 0
        self.updates += some
        step = start_corrected_step(self.updates, self.rate)
        for average, new in ((self.mean, mean), (self.square, square)):
            average.lerp_(torch.where(some, new.to(average.dtype), average), step)

    def forward(self, x: Tensor) -> Tensor:
        sigma = (self.square - self.mean.square()).clamp_min(self.least_sigma**2).sqrt()
        return ((x - self.mean) / sigma).clamp(-self.limit, self.limit)
