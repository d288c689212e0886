"""Stored values as float inputs of a network, by their space. All functions keep leading dimensions.

F features of a value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Ragged, Space


def one_hot(index: Tensor, n: int) -> Tensor:
    """Convert integers (...,) to (..., n) float32."""
    return (index[..., None] == torch.arange(n, device=index.device)).float()


def _one_hots(index: Tensor, sizes: Sequence[int]) -> Tensor:
    """Convert integers (..., k) to (..., sum(sizes)) float32, one block per place."""
    offsets = torch.tensor([0, *sizes[:-1]], device=index.device).cumsum(0)
    out = torch.zeros((*index.shape[:-1], sum(sizes)), device=index.device)
    return out.scatter_(-1, index.long() + offsets, 1.0)


def features(value: Tensor, space: Space) -> Tensor:
    """Convert to float32 features (..., F), F = space.flat_size: numbers and bits unchanged, choices one-hot.

    A sequence becomes its numbers, scaled, padded with zeros: enough to distinguish a few, not to read them.
    """
    match space:
        case Discrete(n=n):
            return one_hot(value, n)
        case MultiDiscrete(nvec=nvec):
            return _one_hots(value, nvec)
        case MultiBinary():
            return value.float()
        case Ragged(scale=scale):
            return value.float() / scale
        case Box(shape=shape):
            return value.float().flatten(value.dim() - len(shape)) if shape else value.float()[..., None]
