"""Weights of the imitation term from advantages: f(advantage, mask, **options) -> weights.

`advantage` is (B, T, G) in reward units, without gradient; `mask` (B, T, 1) is true at real steps. Whatever a filter
returns at padding is ignored; one that looks across steps (a quantile, a batch mean) must look through the mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from pipelines.config.model import FILTERS, FilterSettings
from pipelines.errors import UsageError

Filter = Callable[[Tensor, Tensor], Tensor]


def binary(advantage: Tensor, mask: Tensor) -> Tensor:
    """1 where the action was better than the policy's own (Wang et al. 2020, arXiv 2006.15134)."""
    return (advantage > 0).to(advantage.dtype)


def exp(advantage: Tensor, mask: Tensor, *, beta: float = 1.0, low: float = 1e-6, high: float = 20.0) -> Tensor:
    """exp(beta advantage), clipped to [low, high]."""
    return torch.exp((beta * advantage).clamp_max(80.0)).clamp(low, high)


def leaky_ramp(
    advantage: Tensor, mask: Tensor, *, beta: float = 1.0, slope: float = 0.05, offset: float = 0.05, high: float = 1.0
) -> Tensor:
    """offset + leaky ReLU of beta advantage (`slope` below zero), clipped to [0, high]."""
    return (offset + F.leaky_relu(beta * advantage, slope)).clamp(0.0, high)


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
