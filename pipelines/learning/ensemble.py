"""Reduction of an ensemble to one value. C critics, M drawn ones; other dimensions are free."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Reduction = Literal["min", "mean"]


def draw(noise: Tensor, subset: int) -> Tensor:
    """`subset` of the C critics without replacement, for every place: uniforms (C, ...) -> indices (M, ...)."""
    return noise.topk(subset, dim=0).indices


def reduce(values: Tensor, drawn: Tensor, how: Reduction) -> Tensor:
    """Minimum or mean over the drawn critics: (C, ...), (M, ...) -> (...)."""
    chosen = values.gather(0, drawn)
    return chosen.amin(0) if how == "min" else chosen.mean(0)
