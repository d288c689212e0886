"""AdamW over the trainable parameters, with the global norm of their gradients clipped."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pipelines.config.settings import TrainSettings


def make_optimizer(parameters: Iterable[torch.nn.Parameter], settings: TrainSettings) -> torch.optim.AdamW:
    """Fused AdamW (Loshchilov & Hutter, 2019) at the settings' rate; the schedule scales it."""
    return torch.optim.AdamW(
        list(parameters), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
    )


def learning_rate(update: int, settings: TrainSettings) -> float:
    """Rate of the `update`-th update (0-based): linear warm-up, then constant or linear decay to a tenth."""
    scale = 1.0
    if update < settings.warmup_steps:
        scale = (update + 1) / settings.warmup_steps
    elif settings.decay_steps > settings.warmup_steps:
        progress = (update - settings.warmup_steps) / (settings.decay_steps - settings.warmup_steps)
        scale = 1.0 - 0.9 * min(progress, 1.0)
    return settings.learning_rate * scale
