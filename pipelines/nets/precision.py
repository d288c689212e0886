"""In what numbers a network computes: float32, or bf16 where autocast finds it safe. Parameters stay float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """The context in which a network computes.

    Casts of parameters are not kept: those made without gradient would be used where there should be one.
    """
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, DTYPES[precision], cache_enabled=False)
