"""What makes updates faster, or smaller, without changing what they mean: compilation, TF32, computing again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from pipelines.config.encoders import TransformerSettings
from pipelines.config.settings import TrainSettings
from pipelines.nets.attention import Sight, choose
from pipelines.nets.precision import DTYPES


def prepare(encoders: list[nn.Module], settings: TrainSettings, device: torch.device) -> list[str]:
    """Apply the settings to the encoders; returns what could not be had, in words."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.tf32
    for encoder in encoders:
        encoder.recompute = settings.recompute  # type: ignore[assignment]
    if not settings.compile:
        return []
    reason = why_not_compiled(device)
    if reason is not None:
        return [f"train.compile: cannot compile here ({reason}); going on without"]
    for encoder in encoders:
        encoder.compile()
    return []


def why_not_compiled(device: torch.device) -> str | None:
    """The first line of what the compiler says when asked for something trivial; None if it works."""
    try:
        torch.compile(lambda x: x * 2 + 1, dynamic=False)(torch.ones(4, device=device))
    except Exception as error:  # whatever a toolchain may raise
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    finally:
        torch.compiler.reset()
    return None


def described(sequence: nn.Module, settings: TrainSettings, device: torch.device, *, compiled: bool) -> dict[str, Any]:
    """What a run computes with, for its record."""
    facts: dict[str, Any] = {"device": str(device), "precision": settings.precision, "compiled": compiled}
    sight = getattr(sequence, "sight", None)
    if isinstance(sight, Sight):
        dtype = DTYPES[settings.precision]
        if device.type == "cpu":
            dtype = torch.float32  # see attention.attend
        length, model = settings.window + 1, cast(TransformerSettings, sequence.settings)
        sight = replace(sight.within(length), dropout=model.dropout_attention)
        facts["attention"] = choose(model.attention, device, dtype, sight, length=length, packed=settings.packing)
    return facts
