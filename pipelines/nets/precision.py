"""Precision of a network's computation: float32, or bf16 where autocast considers it safe. Parameters stay float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Return the context in which a network computes.

    Casts of parameters are not cached: those made without gradient would be reused where a gradient is needed.
    """
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, DTYPES[precision], cache_enabled=False)
