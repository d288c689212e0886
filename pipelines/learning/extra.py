"""Losses of the user's own, named by `module:attr`: a function, or a class of module with parameters of its own.

    def smooth(states, batch, mask):      # under agent.auxiliary_losses: kind = "mine:smooth"
        return (states[:, 1:] - states[:, :-1]).square().mean(-1)     # (B, T)

    class Forward(nn.Module):                                         # made with spaces, the states' width, options
        def __init__(self, spaces, state_size, *, hidden=64): ...
        def forward(self, states, batch, mask): ...
        def update_statistics(self, batches): ...                     # if it has any: once before each update

`states` (B, T + 1, D) has gradient to the encoders; `batch` is a `TensorBatch`; `mask` (B, T) is true at
the steps that count. What comes back, (B, T) or (B, T, ...), counts there only: its mean, times the loss's weight.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipelines.config.model import LOSSES, AuxiliaryLossSettings
from pipelines.errors import UsageError
from pipelines.lake.spaces import Spaces
from pipelines.learning.tensors import TensorBatch


class AuxiliaryLoss(nn.Module):
    """One such loss; UsageError for options that it does not take."""

    def __init__(self, settings: AuxiliaryLossSettings, spaces: Spaces, state_size: int) -> None:
        super().__init__()
        self.settings = settings
        target = LOSSES.get(settings.kind)
        self._options: dict[str, Any] = dict(settings.options)
        made = inspect.isclass(target)
        arguments = (spaces, state_size) if made else (None, None, None)
        try:
            inspect.signature(target).bind(*arguments, **settings.options)
        except TypeError as error:
            raise UsageError(f"loss '{settings.kind}': {error}", hint="see agent.auxiliary_losses") from error
        # Either, never both: a module under two names is two sets of tensors to a checkpoint.
        self.module: nn.Module | None = target(spaces, state_size, **settings.options) if made else None
        self._function: Callable[..., Tensor] | None = None if made else target

    @torch.no_grad()
    def update_statistics(self, batches: Sequence[TensorBatch]) -> None:
        """Let a module that has such a method take an update's micro-batches into its statistics, before the update."""
        update = getattr(self.module, "update_statistics", None)
        if update is not None:
            update(batches)

    def forward(self, states_BTD: Tensor, batch: TensorBatch) -> Tensor:
        """Sum over the steps that count, each times its window's importance."""
        mask = batch.loss_mask
        if self.module is not None:
            loss = self.module(states_BTD, batch, mask)
        else:
            assert self._function is not None
            loss = self._function(states_BTD, batch, mask, **self._options)
        if loss.shape[:2] != mask.shape:
            raise UsageError(
                f"loss '{self.settings.kind}' has shape {tuple(loss.shape)}, not one for each of "
                f"{tuple(mask.shape)} steps"
            )
        by_step = loss.flatten(2).mean(-1) if loss.dim() > 2 else loss
        if batch.importance is not None:
            by_step = by_step * batch.importance[:, None]
        return torch.where(mask, by_step, 0.0).sum()
