"""Policies over each action space, as pure functions of a network's outputs and of uniform noise.

An action has two forms: stored (as the lake keeps it) and features (float32; what critics and encoders take).
`sample` returns features through which gradients flow to `params`: reparametrised for Box, straight-through for
choices and bits. P outputs per distribution, F features, Z uniforms a sample; leading dimensions are free.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from pipelines.config.model import ActorSettings
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Ragged, Space
from pipelines.nets.features import features

_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


class Distribution(Protocol):
    num_params: int
    noise_size: int

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """(..., P), stored action -> (...,)."""

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """(..., P), uniforms (..., Z) -> features (..., F)."""

    def mode(self, params: Tensor) -> Tensor:
        """The most probable action's features (..., F)."""

    def entropy(self, params: Tensor) -> Tensor:
        """(...,) nats; for Box that of the Gaussian before tanh."""

    def stored(self, features: Tensor) -> Tensor:
        """Features -> stored form."""


def softmax(logits: Tensor) -> Tensor:
    """As torch's over the last dimension, which is several times slower where that dimension is small."""
    weights = (logits - logits.detach().amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def bounded(probs: Tensor, floor: float, ceiling: float, legal: Tensor | None = None) -> Tensor:
    """Probabilities (..., A) kept within [floor, ceiling] and summing to one; illegal actions have none at all."""
    probs = probs.clamp(floor, ceiling)
    if legal is not None:
        probs = probs * legal
    return probs / probs.sum(-1, keepdim=True)


def pick(probs: Tensor, uniform: Tensor) -> Tensor:
    """Index drawn by inverse distribution function: (..., A), (...,) -> (...,) int64."""
    cumulated = probs.cumsum(-1)
    return (cumulated <= uniform[..., None] * cumulated[..., -1:]).sum(-1).clamp_max(probs.shape[-1] - 1)


class Categorical:
    """One of n; probabilities kept within a floor and a ceiling. The floor never takes more than a tenth in all."""

    noise_size = 1

    def __init__(self, space: Discrete, settings: ActorSettings) -> None:
        self.space = space
        self.num_params = space.n
        self.floor = min(settings.probability_floor, 0.1 / space.n)
        self.ceiling = settings.probability_ceiling

    def probs(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        """(..., n). `legal` (bool, broadcastable): the other actions get probability 0 exactly."""
        if legal is not None:
            params = params.masked_fill(~legal, -torch.inf)
        return bounded(softmax(params), self.floor, self.ceiling, legal)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        return self.probs(params).gather(-1, action.long()[..., None])[..., 0].log()

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        probs = self.probs(params)
        hard = features(pick(probs.detach(), noise[..., 0]), self.space)
        return hard + probs - probs.detach()

    def mode(self, params: Tensor) -> Tensor:
        return features(params.argmax(-1), self.space)

    def entropy(self, params: Tensor) -> Tensor:
        probs = self.probs(params)
        return -(probs * probs.clamp_min(1e-12).log()).sum(-1)

    def stored(self, features: Tensor) -> Tensor:
        return features.argmax(-1).int()


class Categoricals:
    """A choice at each of k places, independent given the state; log-probabilities add up."""

    def __init__(self, space: MultiDiscrete, settings: ActorSettings) -> None:
        self.sizes = list(space.nvec)
        self.parts = [Categorical(Discrete(n=n), settings) for n in space.nvec]
        self.num_params, self.noise_size = sum(self.sizes), len(self.sizes)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        places = zip(self.parts, params.split(self.sizes, -1), action.unbind(-1), strict=True)
        return torch.stack([part.log_prob(p, a) for part, p, a in places]).sum(0)

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        places = zip(self.parts, params.split(self.sizes, -1), noise.split(1, -1), strict=True)
        return torch.cat([part.sample(p, u) for part, p, u in places], -1)

    def mode(self, params: Tensor) -> Tensor:
        places = zip(self.parts, params.split(self.sizes, -1), strict=True)
        return torch.cat([part.mode(p) for part, p in places], -1)

    def entropy(self, params: Tensor) -> Tensor:
        places = zip(self.parts, params.split(self.sizes, -1), strict=True)
        return torch.stack([part.entropy(p) for part, p in places]).sum(0)

    def stored(self, features: Tensor) -> Tensor:
        return torch.stack([part.argmax(-1) for part in features.split(self.sizes, -1)], -1).int()


class Bits:
    """n independent bits; the log-probability is the mean over bits, so that its size does not grow with n."""

    def __init__(self, space: MultiBinary, settings: ActorSettings) -> None:
        self.num_params = self.noise_size = space.n
        self.floor = max(settings.probability_floor, 1 - settings.probability_ceiling)

    def probs(self, params: Tensor) -> Tensor:
        """Probability of each bit being set."""
        return params.sigmoid().clamp(self.floor, 1 - self.floor)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        probs = self.probs(params)
        return torch.where(action.bool(), probs, 1 - probs).log().mean(-1)

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        probs = self.probs(params)
        return (noise < probs).float() + probs - probs.detach()

    def mode(self, params: Tensor) -> Tensor:
        return (params > 0).float()

    def entropy(self, params: Tensor) -> Tensor:
        probs = self.probs(params)
        return -(probs * probs.log() + (1 - probs) * (1 - probs).log()).sum(-1)

    def stored(self, features: Tensor) -> Tensor:
        return (features > 0.5).to(torch.uint8)


class TanhGaussian:
    """tanh of a Gaussian with a bounded deviation; actions in [-1, 1]."""

    def __init__(self, space: Box, settings: ActorSettings) -> None:
        self.shape = space.shape
        self.noise_size = space.flat_size
        self.num_params = 2 * space.flat_size
        self.low, self.high = settings.min_log_std, settings.max_log_std
        self.clip = settings.action_clip

    def _split(self, params: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = params.chunk(2, -1)
        return mean, self.low + 0.5 * (self.high - self.low) * (raw.tanh() + 1)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        mean, log_std = self._split(params)
        flat = action.flatten(action.dim() - len(self.shape)) if self.shape else action[..., None]
        inner = flat.clamp(-self.clip, self.clip).atanh()
        gaussian = -0.5 * ((inner - mean) * (-log_std).exp()).square() - log_std - _HALF_LOG_TAU
        log_slope = 2 * (math.log(2) - inner - F.softplus(-2 * inner))  # log(1 - tanh(inner)^2)
        return (gaussian - log_slope).sum(-1)

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = self._split(params)
        normal = math.sqrt(2) * torch.erfinv((2 * noise - 1).clamp(-1 + 1e-6, 1 - 1e-6))
        return (mean + log_std.exp() * normal).tanh()

    def mode(self, params: Tensor) -> Tensor:
        return params.chunk(2, -1)[0].tanh()

    def entropy(self, params: Tensor) -> Tensor:
        return (self._split(params)[1] + 0.5 + _HALF_LOG_TAU).sum(-1)

    def stored(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, self.shape) if self.shape else features[..., 0]


def distribution(space: Space, settings: ActorSettings) -> Categorical | Categoricals | Bits | TanhGaussian:
    """The distribution that fits the action space."""
    match space:
        case Discrete():
            return Categorical(space, settings)
        case MultiDiscrete():
            return Categoricals(space, settings)
        case MultiBinary():
            return Bits(space, settings)
        case Box():
            return TanhGaussian(space, settings)
        case Ragged():
            raise ValueError("a sequence can be observed, not acted")
