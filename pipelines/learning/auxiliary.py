"""Auxiliary losses, named under `[[agent.auxiliary_losses]]`: built in, or the user's own by `module:attr`.

A custom one is a function, or a class of module with parameters:

    def smooth(states, batch, mask):                              # kind = "mine:smooth"
        return (states[:, 1:] - states[:, :-1]).square().mean(-1)     # (B, T)

    class Forward(nn.Module):                                     # constructed with spaces, state width, options
        def __init__(self, spaces, state_size, *, hidden=64): ...
        def forward(self, states, batch, mask): ...
        def update_statistics(self, batches): ...                 # optional: called once before each update

`states` (B, T + 1, D) has gradient to the encoders; `batch` is a `TensorBatch`; `mask` (B, T) is true at the steps that
count in the losses. Of the result, (B, T) or (B, T, ...), only these steps count: their mean, times the loss's weight.
B batch, T time, D state width.
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
from pipelines.learning.batch import TensorBatch
from pipelines.nets.inputs import RunningNorm, is_finite, to_features
from pipelines.nets.linear import MLP
from pipelines.nets.timestep import choose_routes


class AuxiliaryLoss(nn.Module):
    """An auxiliary loss by its settings; UsageError for options that it does not take."""

    def __init__(self, settings: AuxiliaryLossSettings, spaces: Spaces, state_size: int) -> None:
        super().__init__()
        self.settings = settings
        target = LOSSES.get(settings.kind)
        self._options: dict[str, Any] = dict(settings.options)
        is_class = inspect.isclass(target)
        arguments = (spaces, state_size) if is_class else (None, None, None)
        try:
            inspect.signature(target).bind(*arguments, **settings.options)
        except TypeError as error:
            raise UsageError(f"loss '{settings.kind}': {error}", hint="see agent.auxiliary_losses") from error
        # Either, never both: a module under two names is two sets of tensors to a checkpoint.
        self.module: nn.Module | None = target(spaces, state_size, **settings.options) if is_class else None
        self._function: Callable[..., Tensor] | None = None if is_class else target

    @torch.no_grad()
    def update_statistics(self, batches: Sequence[TensorBatch]) -> None:
        """Call the module's own `update_statistics`, if it has one, with an update's micro-batches."""
        update = getattr(self.module, "update_statistics", None)
        if update is not None:
            update(batches)

    def forward(self, states_BTD: Tensor, batch: TensorBatch) -> Tensor:
        """Sum over the steps that count, each times its window's importance weight."""
        mask = batch.loss_mask
        if self.module is not None:
            loss = self.module(states_BTD, batch, mask)
        else:
            assert self._function is not None
            loss = self._function(states_BTD, batch, mask, **self._options)
        if loss.shape[:2] != mask.shape:
            raise UsageError(
                f"loss '{self.settings.kind}' has shape {tuple(loss.shape)}, not one value for each of "
                f"{tuple(mask.shape)} steps"
            )
        by_step = loss.flatten(2).mean(-1) if loss.dim() > 2 else loss
        if batch.importance is not None:
            by_step = by_step * batch.importance[:, None]
        return torch.where(mask, by_step, 0.0).sum()


class NextStep(nn.Module):
    """Predicts the next observation and the reward from the state and the action taken.

    To predict the effect of an action in this task, a state has to remember the effects of earlier ones: the same
    memory that values need, but learned from every step instead of from rare, noisy returns (self-predictive
    representations: Ni et al. 2024, arXiv 2401.08898; the targets here are the observations themselves, so nothing can
    collapse).

    Targets are standardized by running moments, so guessing the mean costs about the number of features, whatever
    their units. Images and sequences are not predicted.
    """

    def __init__(self, spaces: Spaces, state_size: int, *, hidden: int = 128, rate: float = 1e-3) -> None:
        super().__init__()
        if hidden < 1:
            raise UsageError(f"loss 'next-step': hidden {hidden} is less than 1")
        self.spaces = spaces
        way = choose_routes(spaces.observation, {})
        self.columns = {name: space for name, space in spaces.observation.items() if way[name] == "flat"}
        size = sum(space.flat_size for space in self.columns.values()) + 1
        self.norm = RunningNorm(size, rate, least_sigma=1e-3)
        self.net = MLP(state_size + spaces.action.flat_size, (hidden,), size, gain=0.1)

    @torch.no_grad()
    def update_statistics(self, batches: Sequence[TensorBatch]) -> None:
        """Add the targets of an update's micro-batches to the running moments."""
        rows_NF = torch.cat([batch.counted.take(self._targets(batch)) for batch in batches])
        self.norm.update(rows_NF, is_finite(rows_NF).all(-1))

    def forward(self, states_BTD: Tensor, batch: TensorBatch, mask_BT: Tensor) -> Tensor:
        """Return the squared error, summed over features (B, T)."""
        action_BTF = to_features(batch.action[:, 1:], self.spaces.action)
        predicted_BTF = self.net(torch.cat((states_BTD[:, :-1], action_BTF), -1))
        return (predicted_BTF.float() - self.norm(self._targets(batch))).square().sum(-1)

    def _targets(self, batch: TensorBatch) -> Tensor:
        columns = [to_features(batch.observation[name], space) for name, space in self.columns.items()]
        return torch.cat((*columns, batch.reward[..., None]), -1)[:, 1:]
