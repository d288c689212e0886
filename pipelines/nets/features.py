"""Stored values as float inputs of a network, by their space. All functions keep leading dimensions.

F features of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Ragged, Space


def features(value: Tensor, space: Space) -> Tensor:
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
