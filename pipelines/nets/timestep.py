"""Timestep encoder: one token (observation, previous reward, previous action) becomes one vector.

Columns are routed by their space: images through convolutions, everything else, one-hot where it is a choice, into one
flat vector with the previous reward and action. Leading dimensions are free: (B, T) while learning, (N,) while acting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from pipelines.config.encoders import TIMESTEP_ENCODERS, TimestepSettings
from pipelines.lake.spaces import Box, Spaces
from pipelines.nets import init
from pipelines.nets.cnn import ImageEncoder
from pipelines.nets.features import features
from pipelines.nets.linear import MLP
from pipelines.nets.norms import RunningNorm, symlog


class Tokens(Protocol):
    """Tokens with leading shape (B, T), and which of them are real (bool)."""

    @property
    def observation(self) -> Mapping[str, Tensor]: ...
    @property
    def action(self) -> Tensor: ...
    @property
    def reward(self) -> Tensor: ...
    @property
    def time(self) -> Tensor: ...
    @property
    def real_rows(self) -> Tensor: ...


class TimestepEncoder(nn.Module):
    """Flat inputs: MLP and LayerNorm. With images: each image's features and a few of all the rest, merged by a
    linear and LayerNorm."""

    def __init__(self, spaces: Spaces, settings: TimestepSettings) -> None:
        super().__init__()
        self.spaces, self.settings, self.output_size = spaces, settings, settings.output
        columns = spaces.observation
        self.images = {n: s.shape for n, s in columns.items() if isinstance(s, Box) and s.is_image}
        self.flat = {name: space for name, space in columns.items() if name not in self.images}
        size = sum(space.flat_size for space in self.flat.values()) + 1 + spaces.action.flat_size
        self.norm = RunningNorm(size, settings.normalize_rate) if settings.normalize else None
        if self.images:
            self.image_encoders = nn.ModuleList(
                ImageEncoder((x, y, z), settings.image) for x, y, z in self.images.values()
            )
            self.extras = init.linear(size, settings.image.extras)
            width = settings.image.features * len(self.images) + settings.image.extras
            self.body: nn.Module = init.linear(width, settings.output, gain=1.0)
        else:
            self.body = MLP(size, settings.hidden, settings.output)
        self.out = nn.LayerNorm(settings.output)

    def forward(
        self, observation: Mapping[str, Tensor], prev_action: Tensor, prev_reward: Tensor, time: Tensor
    ) -> Tensor:
        """(..., output). `prev_action` is in stored form; at time 0 there is none and its features are zero."""
        flat = self.flat_inputs(observation, prev_action, prev_reward, time)
        if self.norm is not None:
            flat = self.norm(flat)
        if not self.images:
            return self.out(self.body(flat))
        parts = [encoder(observation[n]) for n, encoder in zip(self.images, self.image_encoders, strict=True)]
        merged = torch.cat((*parts, self.extras(flat)), -1)
        return self.out(self.body(nn.functional.leaky_relu(merged)))

    def flat_inputs(
        self, observation: Mapping[str, Tensor], prev_action: Tensor, prev_reward: Tensor, time: Tensor
    ) -> Tensor:
        """Everything that is not an image as one float32 vector, (..., F)."""
        action = features(prev_action, self.spaces.action) * (time > 0)[..., None]
        columns = [features(observation[name], space) for name, space in self.flat.items()]
        flat = torch.cat((*columns, prev_reward[..., None], action), -1)
        return symlog(flat) if self.settings.symlog else flat

    @torch.no_grad()
    def update_statistics(self, tokens: Sequence[Tokens]) -> None:
        """Take the real tokens of an update's micro-batches into the running statistics; once before the update."""
        if self.norm is not None:
            flat = [
                self.flat_inputs(part.observation, part.action, part.reward, part.time)[part.real_rows]
                for part in tokens
            ]
            self.norm.update(torch.cat(flat))


def timestep_encoder(spaces: Spaces, settings: TimestepSettings) -> TimestepEncoder:
    """The encoder that `settings.kind` names: a class called with (spaces, settings)."""
    return TIMESTEP_ENCODERS.get(settings.kind)(spaces, settings)
