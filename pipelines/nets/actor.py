"""Policies: the head that outputs parameters of one action distribution per discount, and these distributions, as pure
functions of parameters and of uniform noise.

An action has two forms: stored (as in the lake) and features (float32, the input of critics and encoders). `sample`
returns features with gradient to `params`: reparametrised for Box, straight-through (of the probabilities, or of
Gumbel-softmax) for choices and bits. `legal` (bool, one for each choice or bit, broadcastable to the probabilities; Box
ignores it): an illegal choice, or a bit that must not be set, has probability exactly 0, whatever the floor; where
nothing is legal, everything is. Box actions are in [-1, 1].

G discounts, D width, P outputs per distribution, F features, M modes, Z uniforms per sample; leading dimensions are
free.
"""

from __future__ import annotations

import contextlib
import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipelines.config.model import Activation, ActorSettings
from pipelines.errors import UsageError
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space, make_grid
from pipelines.nets import init
from pipelines.nets.compute import Kept, is_exporting
from pipelines.nets.inputs import to_features
from pipelines.nets.linear import MLP, make_activation


class _ResidualLayer(nn.Module):
    """Residual layer: x + norm(linear(act(norm(linear(x))))) (BRO; Nauman et al. 2024, arXiv 2405.16158)."""

    def __init__(self, width: int, inner: int, activation: Activation) -> None:
        super().__init__()
        self.expand, self.inner_norm = init.make_linear(width, inner), nn.LayerNorm(inner)
        self.activation = make_activation(activation)
        self.contract, self.norm = init.make_linear(inner, width, gain=1.0), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.contract(self.activation(self.inner_norm(self.expand(x)))))


class Actor(nn.Module):
    """MLP, optionally of residual layers, whose last layer has one head per discount, the acting one last. Its output
    is at least float32, whatever the precision."""

    def __init__(self, input_size: int, num_discounts: int, num_params: int, settings: ActorSettings) -> None:
        super().__init__()
        self.num_discounts, self.num_params = num_discounts, num_params
        outputs = num_discounts * num_params
        if not settings.residual:
            self.net = MLP(input_size, settings.hidden, outputs, gain=init.POLICY_GAIN, activation=settings.activation)
            return
        width, *inner = settings.hidden
        self.net = MLP(width, (), outputs, gain=init.POLICY_GAIN)
        blocks = (_ResidualLayer(width, size, settings.activation) for size in inner)
        first = MLP(input_size, (width,), width, gain=1.0, activation=settings.activation)
        self.net.hidden = nn.Sequential(first, *blocks)

    def forward(self, h: Tensor) -> Tensor:
        """Map (..., D) to (..., G, P)."""
        out = self.net(h)
        out = out.to(torch.promote_types(out.dtype, torch.float32))
        return out.unflatten(-1, (self.num_discounts, self.num_params))

    def acting(self, h: Tensor) -> Tensor:
        """Map (..., D) to (..., P) with the acting discount's head alone."""
        # Rows of the last layer, not of its output: acting, one token at a time, would pay for all discounts.
        last, first = self.net.last, (self.num_discounts - 1) * self.num_params
        out = F.linear(self.net.hidden(h), last.weight[first:], last.bias[first:])
        return out.to(torch.promote_types(out.dtype, torch.float32))


class Distribution(ABC):
    """A family of action distributions, over parameters that a linear layer outputs."""

    num_params: int
    noise_size: int
    hard: bool
    """Whether samples are choices, of which some may be drawn twice."""
    exponent = 1.0
    """Power to which the probabilities of choices are raised before they are normalised."""

    @abstractmethod
    def log_prob(self, params: Tensor, action: Tensor, legal: Tensor | None = None) -> Tensor:
        """Map (..., P) and a stored action to its log-probability (...,)."""

    @abstractmethod
    def sample(self, params: Tensor, noise: Tensor, legal: Tensor | None = None) -> Tensor:
        """Map (..., P) and uniforms (..., Z) to features (..., F)."""

    @abstractmethod
    def mode(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        """Compute the most probable action's features (..., F)."""

    @abstractmethod
    def entropy(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        """Compute the entropy (...,) in nats; for Box see each distribution."""

    def action_entropy(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        """Compute the entropy (...,) of actions, which a bonus raises. For Gaussians it costs several times as much as
        `entropy`, which is the one before tanh."""
        return self.entropy(params, legal)

    def share_probs(self) -> contextlib.AbstractContextManager[None]:
        """Make a context in which the terms of one loss may share what they compute of the same parameters."""
        return contextlib.nullcontext()

    def divergence(self, params: Tensor, other: Distribution, others: Tensor, legal: Tensor | None = None) -> Tensor:
        """Compute the Kullback-Leibler divergence (...,) in nats of this distribution from `other`, of the same family,
        with the parameters `others`. Only where `is_comparable`."""
        raise NotImplementedError

    def is_comparable(self, other: Distribution) -> bool:
        """Check whether the divergence from `other` has a closed form."""
        return type(self) is type(other) and type(self).divergence is not Distribution.divergence

    def for_play(self, temperature: float = 1.0) -> Self:
        """Return the distribution that plays what was learned. UsageError if a density is given a temperature.

        Choices have their probabilities to the power 1 / `temperature`, normalised, and without the floor that
        learning mixes in: a chance of .001 is a mistake in every other episode of 1,000 steps that each must be right.
        """
        if not self.hard and temperature != 1:
            raise UsageError(
                "a temperature needs probabilities of choices, and these actions have a density",
                hint="leave agent.actor.temperature and evaluate.temperature at 1",
            )
        made = copy.copy(self)
        made.exponent = 1 / temperature
        return made

    def _sharpen(self, weights: Tensor) -> Tensor:
        """Raise weights (..., n), of which one is positive, to the exponent and normalise them."""
        # A share of the largest cannot underflow to zero everywhere, whatever the exponent.
        powers = (weights / weights.amax(-1, keepdim=True)).pow(self.exponent)
        return powers / powers.sum(-1, keepdim=True)

    @abstractmethod
    def to_stored(self, features: Tensor) -> Tensor:
        """Convert features to stored form."""


_TINY = 1e-12
_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


def to_normal(uniform: Tensor) -> Tensor:
    """Map uniforms to standard normal numbers by the inverse distribution function."""
    inside = (2 * uniform - 1).clamp(-1 + 1e-6, 1 - 1e-6)
    return math.sqrt(2) * (invert_erf(inside) if is_exporting() else torch.erfinv(inside))


# Coefficients of Giles 2010, "Approximating the erfinv function", table 5 (single precision), highest power first.
_CENTRE = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087),
    *(-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
)
_TAILS = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773),
    *(-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)


def invert_erf(x: Tensor) -> Tensor:
    """Compute the inverse of the error function in operators that any runtime has, with an error of about 1e-6."""

    def evaluate(coefficients: tuple[float, ...], at: Tensor) -> Tensor:
        value = torch.full_like(at, coefficients[0])
        for coefficient in coefficients[1:]:
            value = value * at + coefficient
        return value

    w = -torch.log((1 - x) * (1 + x))
    return x * torch.where(w < 5, evaluate(_CENTRE, w - 2.5), evaluate(_TAILS, w.clamp_min(5).sqrt() - 3))


class _BoxPolicy(Distribution):
    hard = False

    def __init__(self, space: Box, settings: ActorSettings) -> None:
        self.shape, self.size = space.shape, space.flat_size
        self.clip = settings.action_clip
        self.low, self.high = settings.min_log_std, settings.max_log_std

    def _flat(self, action: Tensor) -> Tensor:
        flat = action.flatten(action.dim() - len(self.shape)) if self.shape else action[..., None]
        return flat.clamp(-self.clip, self.clip)

    def _log_std(self, raw: Tensor) -> Tensor:
        return self.low + 0.5 * (self.high - self.low) * (raw.tanh() + 1)

    def to_stored(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, self.shape) if self.shape else features[..., 0]


# Gauss-Hermite quadrature of five nodes for an expectation over standard normal numbers: nodes and weights.
_NODES = (0.0, 1.3556261799742659, -1.3556261799742659, 2.8569700138728056, -2.8569700138728056)
_WEIGHTS = (0.5333333333333333, 0.2220759220056126, 0.2220759220056126, 0.0112574113277207, 0.0112574113277207)


class _TanhPolicy(_BoxPolicy):
    """tanh of a random vector with normal components."""

    @staticmethod
    def _log_normal(inner: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        return -0.5 * ((inner - mean) * (-log_std).exp()).square() - log_std - _HALF_LOG_TAU

    @staticmethod
    def _log_slope(inner: Tensor) -> Tensor:
        """Compute log(1 - tanh(inner)^2)."""
        return 2 * (math.log(2) - inner - F.softplus(-2 * inner))

    def _mean_log_slope(self, mean: Tensor, std: Tensor) -> Tensor:
        """Compute the mean of log(1 - tanh(x)^2) over x ~ N(mean, std^2) by quadrature: a gradient without the noise of
        a draw. Off by less than .01 up to a deviation of 1, by about .5 at 4."""
        weighted = zip(_NODES, _WEIGHTS, strict=True)
        return torch.stack([weight * self._log_slope(mean + node * std) for node, weight in weighted]).sum(0)


class TanhGaussian(_TanhPolicy):
    """tanh of a Gaussian with a bounded deviation. `entropy` is the one before tanh, `action_entropy` the one after:
    before tanh, a policy that always takes a bound of the range could have any entropy."""

    def __init__(self, space: Box, settings: ActorSettings) -> None:
        super().__init__(space, settings)
        self.noise_size = space.flat_size
        self.num_params = 2 * space.flat_size

    def _split(self, params: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = params.chunk(2, -1)
        return mean, self._log_std(raw)

    def log_prob(self, params: Tensor, action: Tensor, legal: Tensor | None = None) -> Tensor:
        mean, log_std = self._split(params)
        inner = self._flat(action).atanh()
        return (self._log_normal(inner, mean, log_std) - self._log_slope(inner)).sum(-1)

    def sample(self, params: Tensor, noise: Tensor, legal: Tensor | None = None) -> Tensor:
        mean, log_std = self._split(params)
        return (mean + log_std.exp() * to_normal(noise)).tanh()

    def mode(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        return params.chunk(2, -1)[0].tanh()

    def entropy(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        return (self._split(params)[1] + 0.5 + _HALF_LOG_TAU).sum(-1)

    def action_entropy(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        mean, log_std = self._split(params)
        return (log_std + 0.5 + _HALF_LOG_TAU + self._mean_log_slope(mean, log_std.exp())).sum(-1)

    def divergence(self, params: Tensor, other: Distribution, others: Tensor, legal: Tensor | None = None) -> Tensor:
        # That of the Gaussians: tanh is one-to-one.
        assert isinstance(other, TanhGaussian)
        (mean, log_std), (mean2, log_std2) = self._split(params), other._split(others)
        squared = (2 * (log_std - log_std2)).exp() + ((mean - mean2) * (-log_std2).exp()).square()
        return (log_std2 - log_std + 0.5 * squared - 0.5).sum(-1)


class GaussianMixture(_TanhPolicy):
    """tanh of a mixture of diagonal Gaussians, whose deviations are softplus of an output. The mode weights receive a
    sample's gradient straight through the choice of its mode. Both entropies are upper bounds: that of the choice plus
    the mean of the modes'."""

    def __init__(self, space: Box, settings: ActorSettings) -> None:
        super().__init__(space, settings)
        self.modes = settings.modes
        self.noise_size = space.flat_size + 1
        self.num_params = self.modes * (2 * space.flat_size + 1)

    def _split(self, params: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split into log-weights (..., M), means and log-deviations (..., M, F)."""
        logits, rest = params.split((self.modes, 2 * self.modes * self.size), -1)
        mean, raw = rest.unflatten(-1, (self.modes, 2 * self.size)).chunk(2, -1)
        log_std = (F.softplus(raw) + math.exp(self.low)).log().clamp_max(self.high)
        return logits.log_softmax(-1), mean, log_std

    def log_prob(self, params: Tensor, action: Tensor, legal: Tensor | None = None) -> Tensor:
        log_weight, mean, log_std = self._split(params)
        inner = self._flat(action).atanh()
        by_mode = self._log_normal(inner[..., None, :], mean, log_std).sum(-1)
        return (log_weight + by_mode).logsumexp(-1) - self._log_slope(inner).sum(-1)

    def sample(self, params: Tensor, noise: Tensor, legal: Tensor | None = None) -> Tensor:
        log_weight, mean, log_std = self._split(params)
        weight = log_weight.exp()
        below = weight.detach().cumsum(-1) <= noise[..., :1]
        index = below.sum(-1, keepdim=True).clamp_max(self.modes - 1)
        hard = torch.zeros_like(weight.expand(below.shape)).scatter(-1, index, 1.0)
        share = hard + (weight - weight.detach())
        inner = mean + log_std.exp() * to_normal(noise[..., None, 1:])
        return (share[..., None] * inner).sum(-2).tanh()

    def mode(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        log_weight, mean, _ = self._split(params)
        index = log_weight.argmax(-1)[..., None, None].expand(*mean.shape[:-2], 1, self.size)
        return mean.gather(-2, index)[..., 0, :].tanh()

    def entropy(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        log_weight, _, log_std = self._split(params)
        inside = (log_std + 0.5 + _HALF_LOG_TAU).sum(-1)
        return (log_weight.exp() * (inside - log_weight)).sum(-1)

    def action_entropy(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        log_weight, mean, log_std = self._split(params)
        inside = (log_std + 0.5 + _HALF_LOG_TAU + self._mean_log_slope(mean, log_std.exp())).sum(-1)
        return (log_weight.exp() * (inside - log_weight)).sum(-1)


_ABOVE = 1e-4  # by how much a shape is above 1 at least, so that there is one most likely action
_INSIDE = 1e-6, 1 - 1e-6  # what a draw is clamped to
_TRIES = 6  # each fails with probability below .05 for shapes above 1


class BetaPolicy(_BoxPolicy):
    """A Beta distribution on each axis, stretched to [-1, 1]; both shapes are above 1, so that it is unimodal (Chou et
    al. 2017). Samples are differentiable by implicit reparametrisation (arXiv 1805.08498)."""

    def __init__(self, space: Box, settings: ActorSettings) -> None:
        super().__init__(space, settings)
        self.num_params = 2 * space.flat_size
        # Two gamma variates for each axis, with a normal number and a uniform for each try: a fixed number of uniforms,
        # so that a draw has no loop and the same noise gives the same action in every runtime.
        self.noise_size = 2 * 2 * _TRIES * space.flat_size

    def _split(self, params: Tensor) -> Tensor:
        """Compute both shapes (..., 2, F)."""
        return 1 + self._split_above(params)

    def _split_above(self, params: Tensor) -> Tensor:
        """Compute by how much both shapes are above 1, not rounded to 0."""
        return _ABOVE + F.softplus(params.unflatten(-1, (2, self.size)))

    def log_prob(self, params: Tensor, action: Tensor, legal: Tensor | None = None) -> Tensor:
        a, b = self._split(params).unbind(-2)
        x = 0.5 * (self._flat(action) + 1)
        beta = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
        return ((a - 1) * x.log() + (b - 1) * (-x).log1p() - beta - math.log(2)).sum(-1)

    def sample(self, params: Tensor, noise: Tensor, legal: Tensor | None = None) -> Tensor:
        shapes = self._split(params)
        uniform = noise.unflatten(-1, (2, self.size, 2 * _TRIES))
        shapes = shapes.expand(uniform.shape[:-1])
        drawn = self._draw_gamma(shapes.detach(), uniform)
        x = drawn[..., 0, :] / drawn.sum(-2)
        if is_exporting():
            return 2 * x.clamp(*_INSIDE) - 1
        draw: Any = _BetaDraw.apply
        return 2 * draw(x, shapes[..., 0, :], shapes[..., 1, :]) - 1

    @staticmethod
    def _draw_gamma(shape: Tensor, uniform: Tensor) -> Tensor:
        """Draw gamma variates of shapes (...,) above 1 by rejection (Marsaglia & Tsang 2000), from uniforms (..., 2
        tries); the last try is always accepted."""
        tries = uniform.shape[-1] // 2
        d = shape[..., None] - 1 / 3
        x = to_normal(uniform[..., :tries])
        v = (1 + x / (9 * d).sqrt()).pow(3)
        u = uniform[..., tries:].clamp_min(1e-12)
        good = (v > 0) & (u.log() < 0.5 * x.square() + d - d * v + d * v.clamp_min(1e-12).log())
        index = torch.cat((good[..., :-1], torch.ones_like(good[..., :1])), -1).byte().argmax(-1, keepdim=True)
        return (d * v.clamp_min(1e-6)).gather(-1, index)[..., 0]

    def mode(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        a, b = self._split_above(params).unbind(-2)
        return 2 * a / (a + b) - 1

    def entropy(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        a, b = self._split(params).unbind(-2)
        beta = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
        inside = beta - (a - 1) * torch.digamma(a) - (b - 1) * torch.digamma(b) + (a + b - 2) * torch.digamma(a + b)
        return (inside + math.log(2)).sum(-1)

    def divergence(self, params: Tensor, other: Distribution, others: Tensor, legal: Tensor | None = None) -> Tensor:
        assert isinstance(other, BetaPolicy)
        (a, b), (a2, b2) = self._split(params).unbind(-2), other._split(others).unbind(-2)
        beta, beta2 = (torch.lgamma(x) + torch.lgamma(y) - torch.lgamma(x + y) for x, y in ((a, b), (a2, b2)))
        slope = (a - a2) * torch.digamma(a) + (b - b2) * torch.digamma(b) + (a2 - a + b2 - b) * torch.digamma(a + b)
        return (beta2 - beta + slope).sum(-1)


class _BetaDraw(torch.autograd.Function):
    """Draw x ~ Beta(a, b), with dx/da and dx/db."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        x = x.clamp(*_INSIDE)
        ctx.save_for_backward(x, a, b)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, a, b = ctx.saved_tensors
        total = a + b
        by_a = torch._dirichlet_grad(x, a, total) * (1 - x)
        by_b = -torch._dirichlet_grad(1 - x, b, total) * x
        return None, grads[0] * by_a, grads[0] * by_b


class Categorical(Distribution):
    """One choice of n, with a floor mixed into the probabilities, at most a tenth in total; or, with a ceiling, with
    probabilities clamped between floor and ceiling."""

    hard = True

    def __init__(self, space: Discrete, settings: ActorSettings) -> None:
        self.space, self.num_params = space, space.n
        self.temperature = settings.gumbel_temperature if settings.gumbel else None
        self.noise_size = space.n if settings.gumbel else 1
        self.ceiling = settings.probability_ceiling
        self._probs: Kept[Tensor] | None = None
        self.floor = min(settings.probability_floor, 0.1 / space.n if self.ceiling is None else 1.0)

    def for_play(self, temperature: float = 1.0) -> Self:
        made = super().for_play(temperature)
        made.floor = 0.0 if self.ceiling is None else self.floor  # clamped as in AMAGO, which plays so
        return made

    def probs(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        """Compute probabilities (..., n)."""
        if self._probs is None:
            return self._compute_probs(params, legal)
        given = [params] if legal is None else [params, legal]
        found = self._probs.find(given)
        if found is None:
            found = self._compute_probs(params, legal)
            if found.requires_grad:
                self._probs.set(given, found)
        return found

    @contextlib.contextmanager
    def share_probs(self) -> Iterator[None]:
        self._probs = Kept()
        try:
            yield
        finally:
            self._probs = None

    def _compute_probs(self, params: Tensor, legal: Tensor | None) -> Tensor:
        if legal is not None:
            legal = self._allow_some(legal)
            params = params.masked_fill(~legal, -torch.inf)
        if self.ceiling is None:
            probs = self.mix_floor(self._softmax(params), self.floor, legal)
        else:
            clamped = self._softmax(params).clamp(self.floor, self.ceiling)
            clamped = clamped if legal is None else clamped * legal
            probs = clamped / clamped.sum(-1, keepdim=True)
        return probs if self.exponent == 1 else self._sharpen(probs)

    def log_prob(self, params: Tensor, action: Tensor, legal: Tensor | None = None) -> Tensor:
        # An impossible choice counts as improbable and has no gradient.
        return self.probs(params, legal).gather(-1, action.long()[..., None])[..., 0].clamp_min(_TINY).log()

    def sample(self, params: Tensor, noise: Tensor, legal: Tensor | None = None) -> Tensor:
        probs = self.probs(params, legal)
        if self.temperature is None:
            soft, index = probs, self.pick(probs.detach(), noise[..., 0])
        else:
            log_probs = probs.clamp_min(_TINY).log().masked_fill(probs == 0, -torch.inf)
            gumbel = -(-noise.clamp(_TINY, 1 - 1e-7).log()).log()  # Jang et al. 2017, arXiv 1611.01144
            soft = self._softmax((log_probs + gumbel) / self.temperature)
            index = soft.argmax(-1)
        hard = to_features(index, self.space)
        return hard + (soft - soft.detach()) if soft.requires_grad else hard

    def mode(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        return to_features(self.most_likely(params, legal), self.space)

    def entropy(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        probs = self.probs(params, legal)
        return -(probs * probs.clamp_min(_TINY).log()).sum(-1)

    def divergence(self, params: Tensor, other: Distribution, others: Tensor, legal: Tensor | None = None) -> Tensor:
        assert isinstance(other, Categorical)
        probs, theirs = self.probs(params, legal), other.probs(others, legal)
        return (probs * (probs.clamp_min(_TINY).log() - theirs.clamp_min(_TINY).log())).sum(-1)

    def is_comparable(self, other: Distribution) -> bool:
        return super().is_comparable(other) and self.num_params == other.num_params

    def max_entropy(self, legal: Tensor | None = None) -> Tensor | float:
        """Compute the entropy (...,) of a uniform choice among the legal ones; infinite where a single one is legal, so
        that an entropy's share of it is 0."""
        if legal is None:
            return math.log(self.space.n)
        count = self._allow_some(legal).sum(-1).float()
        return torch.where(count > 1, count.log(), torch.inf)

    def to_stored(self, features: Tensor) -> Tensor:
        return features.argmax(-1).int()

    @staticmethod
    def _softmax(logits: Tensor) -> Tensor:
        """Compute a softmax over the last dimension: on a CPU several times faster than torch's where that dimension is
        small, on devices in its one kernel."""
        if logits.device.type != "cpu":
            return logits.softmax(-1)
        weights = (logits - logits.detach().amax(-1, keepdim=True)).exp()
        return weights / weights.sum(-1, keepdim=True)

    @staticmethod
    def mix_floor(probs: Tensor, floor: float, legal: Tensor | None = None) -> Tensor:
        """Compute floor + (1 - n floor) p for each of the n legal choices (..., A); an illegal one keeps probability 0.

        Mixed, not clamped: a clamp has zero gradient, so a policy that is confident and wrong would stay so.
        """
        if legal is None:
            return floor + (1 - probs.shape[-1] * floor) * probs
        return (floor + (1 - legal.sum(-1, keepdim=True) * floor) * probs) * legal

    @staticmethod
    def pick(probs: Tensor, uniform: Tensor) -> Tensor:
        """Draw an index by inverse transform sampling: (..., A), (...,) -> (...,) int64; never one of probability 0."""
        cumulated = probs.cumsum(-1)
        index = (cumulated <= uniform[..., None] * cumulated[..., -1:]).sum(-1)
        last = probs.shape[-1] - 1 - (probs > 0).flip(-1).byte().argmax(-1)  # guard against rounding
        return torch.minimum(index, last)

    @staticmethod
    def _allow_some(legal: Tensor) -> Tensor:
        """Make everything legal where nothing is."""
        return legal | ~legal.any(-1, keepdim=True)

    def index(self, action: Tensor) -> Tensor:
        """Convert stored actions to the numbers (...,) int64 of choices."""
        return action.long()

    def most_likely(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        """Find the number (...,) int64 of the most probable choice."""
        if legal is not None:
            params = params.masked_fill(~self._allow_some(legal), -torch.inf)
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

    def _read_points(self, chosen: Tensor) -> Tensor:
        """Look up the features (..., F) of choices in one-hot form (..., A)."""
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
        return self._read_points(super().sample(params, noise, legal))

    def mode(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        return self._read_points(super().mode(params, legal))

    def to_stored(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, self.shape) if self.shape else features[..., 0]


class _Categoricals(Distribution):
    """A choice at each of k places, independent given the state; log-probabilities add up."""

    hard = True

    def __init__(self, space: MultiDiscrete, settings: ActorSettings) -> None:
        self.sizes = list(space.nvec)
        self.parts = [Categorical(Discrete(n=n), settings) for n in space.nvec]
        self.num_params = sum(self.sizes)
        self._noise = [part.noise_size for part in self.parts]
        self.noise_size = sum(self._noise)

    def for_play(self, temperature: float = 1.0) -> Self:
        made = copy.copy(self)
        made.parts = [part.for_play(temperature) for part in self.parts]
        return made

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

    def divergence(self, params: Tensor, other: Distribution, others: Tensor, legal: Tensor | None = None) -> Tensor:
        assert isinstance(other, _Categoricals)
        split = (each.split(self.sizes, -1) for each in (params, others))
        places = zip(self.parts, other.parts, *split, self._legal(legal), strict=True)
        return torch.stack([part.divergence(p, theirs, q, mask) for part, theirs, p, q, mask in places]).sum(0)

    def to_stored(self, features: Tensor) -> Tensor:
        return torch.stack([part.argmax(-1) for part in features.split(self.sizes, -1)], -1).int()


class Bernoulli(Distribution):
    """n independent bits; the log-probability is the mean over bits, so that its scale does not grow with n."""

    hard = True

    def __init__(self, space: MultiBinary, settings: ActorSettings) -> None:
        self.num_params = self.noise_size = space.n
        self.temperature = settings.gumbel_temperature if settings.gumbel else None
        self.floor = settings.bit_probability_floor

    def for_play(self, temperature: float = 1.0) -> Self:
        made = super().for_play(temperature)
        made.floor = 0.0
        return made

    def probs(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        """Compute the probability that each bit is set."""
        probs = self.floor + (1 - 2 * self.floor) * params.sigmoid()
        probs = probs if legal is None else probs * legal
        return probs if self.exponent == 1 else self._sharpen(torch.stack((1 - probs, probs), -1))[..., 1]

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
        either = torch.stack((probs, 1 - probs), -1)
        return -(either * either.clamp_min(_TINY).log()).sum(-1).sum(-1)

    def divergence(self, params: Tensor, other: Distribution, others: Tensor, legal: Tensor | None = None) -> Tensor:
        assert isinstance(other, Bernoulli)
        either, theirs = (torch.stack((p, 1 - p), -1) for p in (self.probs(params, legal), other.probs(others, legal)))
        return (either * (either.clamp_min(_TINY).log() - theirs.clamp_min(_TINY).log())).sum(-1).sum(-1)

    def to_stored(self, features: Tensor) -> Tensor:
        return (features > 0.5).to(torch.uint8)


_BOX: dict[str, Callable[[Box, ActorSettings], Distribution]] = {
    "tanh-gaussian": TanhGaussian,
    "beta": BetaPolicy,
    "gaussian-mixture": GaussianMixture,
    "grid": GridChoice,
}
_FIXED: dict[type, Callable[[Any, ActorSettings], Distribution]] = {
    Discrete: Categorical,
    MultiDiscrete: _Categoricals,
    MultiBinary: Bernoulli,
}


def make_distribution(space: Space, settings: ActorSettings) -> Distribution:
    """Make the distribution for an action space; for Box, the one that the settings name. UsageError if they name one
    where there is no choice."""
    if isinstance(space, Box):
        return _BOX[settings.distribution](space, settings)
    kind = type(space).__name__
    if type(space) not in _FIXED:
        raise UsageError(f"{kind} is not a supported action space")
    if settings.distribution != ActorSettings().distribution:
        raise UsageError(
            f"agent.actor.distribution = '{settings.distribution}' is one of Box actions, and these are {kind}",
            hint="leave it out",
        )
    return _FIXED[type(space)](space, settings)
