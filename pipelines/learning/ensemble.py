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


def reduce_both(values: Tensor, others: Tensor, drawn: Tensor, how: Reduction) -> tuple[Tensor, Tensor]:
    """`values` as `reduce` does it, and `others` (C, ...) of the same critics."""
    chosen, beside = values.gather(0, drawn), others.gather(0, drawn)
    if how == "mean":
        return chosen.mean(0), beside.mean(0)
    least, place = chosen.min(0)
    return least, beside.gather(0, place[None])[0]
