"""Policies over choices and bits, as pure functions of a network's outputs and of uniform noise (Box: `continuous`).

An action has two forms: stored (as in the lake) and features (float32, the input of critics and encoders). `sample`
returns features with gradient to `params`: reparametrised for Box, straight-through (of the probabilities, or of
Gumbel-softmax) for choices and bits. `legal` (bool, one for each choice or bit, broadcastable to the probabilities): an
illegal choice, or a bit that must not be set, has probability exactly 0, whatever the floor; where nothing is legal,
everything is.

P outputs per distribution, F features, Z uniforms per sample; leading dimensions are free.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from pipelines.config.model import ActorSettings
from pipelines.errors import UsageError
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space, make_grid
from pipelines.nets.continuous import BetaPolicy, GaussianMixture, TanhGaussian
from pipelines.nets.features import features

_TINY = 1e-12


class Distribution(Protocol):
    """A family of action distributions, over parameters that a linear layer outputs."""

    num_params: int
    noise_size: int
    hard: bool
    """Whether samples are choices, of which some may be drawn twice."""

    def log_prob(self, params: Tensor, action: Tensor, legal: Tensor | None = None) -> Tensor:
        """Map (..., P) and a stored action to its log-probability (...,)."""

    def sample(self, params: Tensor, noise: Tensor, legal: Tensor | None = None) -> Tensor:
        """Map (..., P) and uniforms (..., Z) to features (..., F)."""

    def mode(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        """Return the most probable action's features (..., F)."""

    def entropy(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        """Return the entropy (...,) in nats; for Box see each distribution."""

    def to_stored(self, features: Tensor) -> Tensor:
        """Convert features to stored form."""


def softmax(logits: Tensor) -> Tensor:
    """Compute torch's softmax over the last dimension, but several times faster where that dimension is small."""
    weights = (logits - logits.detach().amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def mix_floor(probs: Tensor, floor: float, legal: Tensor | None = None) -> Tensor:
    """Return floor + (1 - n floor) p for each of the n legal choices (..., A); an illegal one keeps probability 0.

    Mixed, not clamped: a clamp has zero gradient, so a policy that is confident and wrong would stay so.
    """
    if legal is None:
        return floor + (1 - probs.shape[-1] * floor) * probs
    return (floor + (1 - legal.sum(-1, keepdim=True) * floor) * probs) * legal


def pick(probs: Tensor, uniform: Tensor) -> Tensor:
    """Draw an index by inverse transform sampling: (..., A), (...,) -> (...,) int64; never one of probability 0."""
    cumulated = probs.cumsum(-1)
    index = (cumulated <= uniform[..., None] * cumulated[..., -1:]).sum(-1)
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).byte().argmax(-1)  # guard against rounding
    return torch.minimum(index, last)


def gumbel(log_probs: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """Return soft choices (..., A) whose maximum is a sample (Jang et al. 2017, arXiv 1611.01144)."""
    noise = -(-uniform.clamp(_TINY, 1 - 1e-7).log()).log()
    return softmax((log_probs + noise) / temperature)


def _some(legal: Tensor) -> Tensor:
    return legal | ~legal.any(-1, keepdim=True)


class Categorical:
    """One choice of n, with a floor mixed into the probabilities, at most a tenth in total."""

    hard = True

    def __init__(self, space: Discrete, settings: ActorSettings) -> None:
        self.space, self.num_params = space, space.n
        self.temperature = settings.gumbel_temperature if settings.gumbel else None
        self.noise_size = space.n if settings.gumbel else 1
        self.floor = min(settings.probability_floor, 0.1 / space.n)

    def probs(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        """Return probabilities (..., n)."""
        if legal is not None:
            legal = _some(legal)
            params = params.masked_fill(~legal, -torch.inf)
        return mix_floor(softmax(params), self.floor, legal)

    def log_prob(self, params: Tensor, action: Tensor, legal: Tensor | None = None) -> Tensor:
        return chosen(self.probs(params, legal), action)

    def sample(self, params: Tensor, noise: Tensor, legal: Tensor | None = None) -> Tensor:
        probs = self.probs(params, legal)
        if self.temperature is None:
            soft, index = probs, pick(probs.detach(), noise[..., 0])
        else:
            log_probs = probs.clamp_min(_TINY).log().masked_fill(probs == 0, -torch.inf)
            soft = gumbel(log_probs, noise, self.temperature)
            index = soft.argmax(-1)
        hard = features(index, self.space)
        return hard + (soft - soft.detach()) if soft.requires_grad else hard

    def mode(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        return features(self.most_likely(params, legal), self.space)

    def entropy(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        return entropy(self.probs(params, legal))

    def max_entropy(self, legal: Tensor | None = None) -> Tensor | float:
        """Compute the entropy (...,) of a uniform choice among the legal ones; infinite where a single one is legal, so
        that an entropy's share of it is 0."""
        if legal is None:
            return math.log(self.space.n)
        count = _some(legal).sum(-1).float()
        return torch.where(count > 1, count.log(), torch.inf)

    def to_stored(self, features: Tensor) -> Tensor:
        return features.argmax(-1).int()

    def index(self, action: Tensor) -> Tensor:
        """Return the numbers (...,) int64 of the choices that stored actions are."""
        return action.long()

    def most_likely(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        """Return the number (...,) int64 of the most probable choice."""
        if legal is not None:
            params = params.masked_fill(~_some(legal), -torch.inf)
        return params.argmax(-1)


class GridChoice(Categorical):
    """A choice among the points of a grid over a Box. Its features and stored form are those of the Box; a stored
    action between points counts as the nearest one.

    Critics have a value of every choice: the gradient of the policy has no noise of sampled actions, and traces are cut
    by the probability of the action that was taken. Where a few values of each dimension are enough, as for most motors
    (Seyde et al. 2021, arXiv 2111.02552), this learns sooner than a density over the box.
    """

    def __init__(self, space: Box, settings: ActorSettings) -> None:
        grid = torch.from_numpy(make_grid(space, settings.grid_points))
        super().__init__(Discrete(n=len(grid)), settings)
        self.shape, self.points = space.shape, settings.grid_points
        self._grids = {torch.device("cpu"): grid.reshape(len(grid), -1)}  # by device: a copy at each use would wait

    def _points(self, chosen: Tensor) -> Tensor:
        """Return the features (..., F) of choices in one-hot form (..., A)."""
        if chosen.device not in self._grids:
            self._grids[chosen.device] = self._grids[torch.device("cpu")].to(chosen.device)
        return chosen @ self._grids[chosen.device].to(chosen.dtype)

    def index(self, action: Tensor) -> Tensor:
        flat = action.flatten(action.dim() - len(self.shape)) if self.shape else action[..., None]
        nearest = ((flat.clamp(-1, 1) + 1) * (0.5 * (self.points - 1))).round().long()
        number, *rest = nearest.unbind(-1)
        for digit in rest:
            number = number * self.points + digit
        return number

    def log_prob(self, params: Tensor, action: Tensor, legal: Tensor | None = None) -> Tensor:
        return super().log_prob(params, self.index(action), legal)

    def sample(self, params: Tensor, noise: Tensor, legal: Tensor | None = None) -> Tensor:
        return self._points(super().sample(params, noise, legal))

    def mode(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        return self._points(super().mode(params, legal))

    def to_stored(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, self.shape) if self.shape else features[..., 0]


def chosen(probs: Tensor, action: Tensor) -> Tensor:
    """Gather log-probabilities: (..., A), (...,) -> (...,). An impossible choice counts as improbable and has no
    gradient."""
    return probs.gather(-1, action.long()[..., None])[..., 0].clamp_min(_TINY).log()


def entropy(probs: Tensor) -> Tensor:
    """Compute the entropy of choices (..., A) -> (...,)."""
    return -(probs * probs.clamp_min(_TINY).log()).sum(-1)


class _Categoricals:
    """A choice at each of k places, independent given the state; log-probabilities add up."""

    hard = True

    def __init__(self, space: MultiDiscrete, settings: ActorSettings) -> None:
        self.sizes = list(space.nvec)
        self.parts = [Categorical(Discrete(n=n), settings) for n in space.nvec]
        self.num_params = sum(self.sizes)
        self._noise = [part.noise_size for part in self.parts]
        self.noise_size = sum(self._noise)

    def _legal(self, legal: Tensor | None) -> list[Tensor | None]:
        return [None] * len(self.parts) if legal is None else list(legal.split(self.sizes, -1))

    def log_prob(self, params: Tensor, action: Tensor, legal: Tensor | None = None) -> Tensor:
        places = zip(self.parts, params.split(self.sizes, -1), action.unbind(-1), self._legal(legal), strict=True)
        return torch.stack([part.log_prob(p, a, mask) for part, p, a, mask in places]).sum(0)

    def sample(self, params: Tensor, noise: Tensor, legal: Tensor | None = None) -> Tensor:
        split = params.split(self.sizes, -1), noise.split(self._noise, -1), self._legal(legal)
        return torch.cat([part.sample(p, u, mask) for part, p, u, mask in zip(self.parts, *split, strict=True)], -1)

    def mode(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        places = zip(self.parts, params.split(self.sizes, -1), self._legal(legal), strict=True)
        return torch.cat([part.mode(p, mask) for part, p, mask in places], -1)

    def entropy(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        places = zip(self.parts, params.split(self.sizes, -1), self._legal(legal), strict=True)
        return torch.stack([part.entropy(p, mask) for part, p, mask in places]).sum(0)

    def to_stored(self, features: Tensor) -> Tensor:
        return torch.stack([part.argmax(-1) for part in features.split(self.sizes, -1)], -1).int()


class Bits:
    """n independent bits; the log-probability is the mean over bits, so that its scale does not grow with n."""

    hard = True

    def __init__(self, space: MultiBinary, settings: ActorSettings) -> None:
        self.num_params = self.noise_size = space.n
        self.temperature = settings.gumbel_temperature if settings.gumbel else None
        self.floor = settings.bit_probability_floor

    def probs(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        """Return the probability that each bit is set."""
        probs = self.floor + (1 - 2 * self.floor) * params.sigmoid()
        return probs if legal is None else probs * legal

    def log_prob(self, params: Tensor, action: Tensor, legal: Tensor | None = None) -> Tensor:
        probs = self.probs(params, legal)
        return torch.where(action.bool(), probs, 1 - probs).clamp_min(_TINY).log().mean(-1)

    def sample(self, params: Tensor, noise: Tensor, legal: Tensor | None = None) -> Tensor:
        probs = self.probs(params, legal)
        hard = (noise < probs).float()
        if not probs.requires_grad:
            return hard
        soft = probs
        if self.temperature is not None:  # the binary case: a logistic threshold instead of two Gumbel draws
            odds = probs.clamp(_TINY, 1 - 1e-7).logit() - noise.clamp(_TINY, 1 - 1e-7).logit()
            soft = (odds / self.temperature).sigmoid()
        return hard + (soft - soft.detach())

    def mode(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        bits = params > 0
        return (bits if legal is None else bits & legal).float()

    def entropy(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        probs = self.probs(params, legal)
        return entropy(torch.stack((probs, 1 - probs), -1)).sum(-1)

    def to_stored(self, features: Tensor) -> Tensor:
        return (features > 0.5).to(torch.uint8)


_BoxPolicy = TanhGaussian | BetaPolicy | GaussianMixture
Policy = Categorical | _Categoricals | Bits | _BoxPolicy
_BOX: dict[str, Callable[[Box, ActorSettings], _BoxPolicy | GridChoice]] = {
    "tanh-gaussian": TanhGaussian,
    "beta": BetaPolicy,
    "gaussian-mixture": GaussianMixture,
    "grid": GridChoice,
}


def action_entropy(policy: Policy, params: Tensor, legal: Tensor | None = None) -> Tensor:
    """Compute the entropy (...,) of a policy's actions, which a bonus raises. For Gaussians it costs several times as
    much as `entropy`, which is the one before tanh."""
    if isinstance(policy, TanhGaussian | GaussianMixture):
        return policy.action_entropy(params)
    return policy.entropy(params, legal)


def distribution(space: Space, settings: ActorSettings) -> Policy:
    """Return the distribution for an action space; for Box, the one that the settings name."""
    match space:
        case Discrete():
            return Categorical(space, settings)
        case MultiDiscrete():
            return _Categoricals(space, settings)
        case MultiBinary():
            return Bits(space, settings)
    if not isinstance(space, Box):
        raise UsageError(f"{type(space).__name__} is not a supported action space")
    return _BOX[settings.distribution](space, settings)
