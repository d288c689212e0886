"""Weights of the imitation term from advantages: f(advantage, mask, **options) -> weights.

`advantage` is (B, T, G) in reward units, without gradient; `mask` (B, T, 1) is true at real steps. Whatever a filter
returns at padding is ignored; one that looks across steps (a quantile, a batch mean) must look through the mask.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from pipelines.config.model import FILTERS, FilterSettings
from pipelines.errors import UsageError

Filter = Callable[[Tensor, Tensor], Tensor]


def binary(advantage: Tensor, mask: Tensor, *, threshold: float = 0.0) -> Tensor:
    """1 where the advantage is above `threshold` (Wang et al. 2020, arXiv 2006.15134)."""
    return (advantage > threshold).to(advantage.dtype)


def exp(
    advantage: Tensor, mask: Tensor, *, beta: float = 1.0, clip_adv_low: float = -math.inf,
    clip_adv_high: float = math.inf, clip_weights_low: float = 1e-7, clip_weights_high: float = math.inf,
) -> Tensor:  # fmt: skip
    """exp(beta advantage), the advantage and the weight clipped; AMAGO's `exp_filter`. The exponent stays below 80, so
    that weights are finite."""
    exponent = beta * advantage.clamp(clip_adv_low, clip_adv_high)
    return torch.exp(exponent.clamp_max(80.0)).clamp(clip_weights_low, clip_weights_high)


def leaky_relu(
    advantage: Tensor, mask: Tensor, *, beta: float = 2.0, tau: float = 1e-2, neg_slope: float = 0.05,
    target_f0: float = 1e-2, clip_weights_low: float = 1e-7, clip_weights_high: float = 10.0, add_binary: float = 1,
) -> Tensor:  # fmt: skip
    """A leaky ReLU of (advantage - tau) / beta whose value at 0 is `target_f0`, clipped, plus the binary filter if
    `add_binary`; AMAGO's `leaky_relu_filter`."""
    ramp = F.leaky_relu((advantage - tau) / beta, neg_slope) + target_f0 + neg_slope * tau / beta
    weight = ramp.clamp(clip_weights_low, clip_weights_high)
    return weight + binary(advantage, mask) if add_binary else weight


def advantage_filter(settings: FilterSettings) -> Filter:
    """The filter that `settings` names, its options bound. UsageError for options it does not take."""
    function = FILTERS.get(settings.kind)
    try:
        inspect.signature(function).bind(None, None, **settings.options)
    except TypeError as error:
        raise UsageError(f"filter '{settings.kind}': {error}", hint="see filter.options") from error

    def bound(advantage: Tensor, mask: Tensor) -> Tensor:
        return function(advantage, mask, **settings.options)

    return bound
