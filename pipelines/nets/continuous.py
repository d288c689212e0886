"""Policies over Box actions in [-1, 1], as pure functions of a network's outputs and of uniform noise.

The interface is `distributions.Distribution`; `legal` is ignored here. P outputs, F numbers of an action, M modes, Z
uniforms per sample; leading dimensions are free.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipelines.config.model import ActorSettings
from pipelines.lake.spaces import Box

_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


def normal(uniform: Tensor) -> Tensor:
    """Map uniforms to standard normal numbers by the inverse distribution function."""
    inside = (2 * uniform - 1).clamp(-1 + 1e-6, 1 - 1e-6)
    return math.sqrt(2) * (_erfinv(inside) if torch.compiler.is_exporting() else torch.erfinv(inside))


# Coefficients of Giles 2010, "Approximating the erfinv function", table 5 (single precision), highest power first.
_CENTRE = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087),
    *(-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
)
_TAILS = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773),
    *(-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)


def _erfinv(x: Tensor) -> Tensor:
    """Compute the inverse of the error function in operators that any runtime has, with an error of about 1e-6."""
    w = -torch.log((1 - x) * (1 + x))
    return x * torch.where(w < 5, _polynomial(_CENTRE, w - 2.5), _polynomial(_TAILS, w.clamp_min(5).sqrt() - 3))


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def _log_normal(inner: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    return -0.5 * ((inner - mean) * (-log_std).exp()).square() - log_std - _HALF_LOG_TAU


def _log_slope(inner: Tensor) -> Tensor:
    """Compute log(1 - tanh(inner)^2)."""
    return 2 * (math.log(2) - inner - F.softplus(-2 * inner))


class _BoxPolicy:
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


def _mean_log_slope(mean: Tensor, std: Tensor) -> Tensor:
    """Compute the mean of log(1 - tanh(x)^2) over x ~ N(mean, std^2) by quadrature: a gradient without the noise of a
    draw. Off by less than .01 up to a deviation of 1, by about .5 at 4."""
    weighted = zip(_NODES, _WEIGHTS, strict=True)
    return torch.stack([weight * _log_slope(mean + node * std) for node, weight in weighted]).sum(0)


class TanhGaussian(_BoxPolicy):
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
        return (_log_normal(inner, mean, log_std) - _log_slope(inner)).sum(-1)

    def sample(self, params: Tensor, noise: Tensor, legal: Tensor | None = None) -> Tensor:
        mean, log_std = self._split(params)
        return (mean + log_std.exp() * normal(noise)).tanh()

    def mode(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        return params.chunk(2, -1)[0].tanh()

    def entropy(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        return (self._split(params)[1] + 0.5 + _HALF_LOG_TAU).sum(-1)

    def action_entropy(self, params: Tensor) -> Tensor:
        """Compute the entropy (...,) of actions."""
        mean, log_std = self._split(params)
        return (log_std + 0.5 + _HALF_LOG_TAU + _mean_log_slope(mean, log_std.exp())).sum(-1)


class GaussianMixture(_BoxPolicy):
    """tanh of a mixture of diagonal Gaussians. The mode weights receive a sample's gradient straight through the choice
    of its mode. Both entropies are upper bounds: that of the choice plus the mean of the modes'."""

    def __init__(self, space: Box, settings: ActorSettings) -> None:
        super().__init__(space, settings)
        self.modes = settings.modes
        self.noise_size = space.flat_size + 1
        self.num_params = self.modes * (2 * space.flat_size + 1)

    def _split(self, params: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split into log-weights (..., M), means and log-deviations (..., M, F)."""
        logits, rest = params.split((self.modes, 2 * self.modes * self.size), -1)
        mean, raw = rest.unflatten(-1, (self.modes, 2 * self.size)).chunk(2, -1)
        return logits.log_softmax(-1), mean, self._log_std(raw)

    def log_prob(self, params: Tensor, action: Tensor, legal: Tensor | None = None) -> Tensor:
        log_weight, mean, log_std = self._split(params)
        inner = self._flat(action).atanh()
        by_mode = _log_normal(inner[..., None, :], mean, log_std).sum(-1)
        return (log_weight + by_mode).logsumexp(-1) - _log_slope(inner).sum(-1)

    def sample(self, params: Tensor, noise: Tensor, legal: Tensor | None = None) -> Tensor:
        log_weight, mean, log_std = self._split(params)
        weight = log_weight.exp()
        below = weight.detach().cumsum(-1) <= noise[..., :1]
        index = below.sum(-1, keepdim=True).clamp_max(self.modes - 1)
        hard = torch.zeros_like(weight.expand(below.shape)).scatter(-1, index, 1.0)
        share = hard + (weight - weight.detach())
        inner = mean + log_std.exp() * normal(noise[..., None, 1:])
        return (share[..., None] * inner).sum(-2).tanh()

    def mode(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        log_weight, mean, _ = self._split(params)
        index = log_weight.argmax(-1)[..., None, None].expand(*mean.shape[:-2], 1, self.size)
        return mean.gather(-2, index)[..., 0, :].tanh()

    def entropy(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        log_weight, _, log_std = self._split(params)
        inside = (log_std + 0.5 + _HALF_LOG_TAU).sum(-1)
        return (log_weight.exp() * (inside - log_weight)).sum(-1)

    def action_entropy(self, params: Tensor) -> Tensor:
        """Compute the upper bound (...,) of the entropy of actions."""
        log_weight, mean, log_std = self._split(params)
        inside = (log_std + 0.5 + _HALF_LOG_TAU + _mean_log_slope(mean, log_std.exp())).sum(-1)
        return (log_weight.exp() * (inside - log_weight)).sum(-1)


_EVEN = 1e-6  # far too small to change which action is more likely
_INSIDE = 1e-6, 1 - 1e-6  # what a draw is clamped to
_TRIES = 6  # each fails with probability below .05 for shapes above 1


class BetaPolicy(_BoxPolicy):
    """A Beta distribution on each axis, stretched to [-1, 1]; both shapes are above 1, so that it is unimodal (Chou et
    al. 2017). Samples are differentiable by implicit reparametrisation (arXiv 1805.08498)."""

    def __init__(self, space: Box, settings: ActorSettings) -> None:
        super().__init__(space, settings)
        self.num_params = 2 * space.flat_size
        self.noise_size = 2 * 2 * _TRIES * space.flat_size

    def _split(self, params: Tensor) -> Tensor:
        """Return both shapes (..., 2, F)."""
        return 1 + F.softplus(params.unflatten(-1, (2, self.size)))

    def log_prob(self, params: Tensor, action: Tensor, legal: Tensor | None = None) -> Tensor:
        a, b = self._split(params).unbind(-2)
        x = 0.5 * (self._flat(action) + 1)
        beta = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
        return ((a - 1) * x.log() + (b - 1) * (-x).log1p() - beta - math.log(2)).sum(-1)

    def sample(self, params: Tensor, noise: Tensor, legal: Tensor | None = None) -> Tensor:
        shapes = self._split(params)
        uniform = noise.unflatten(-1, (2, self.size, 2 * _TRIES))
        shapes = shapes.expand(uniform.shape[:-1])
        drawn = gamma(shapes.detach(), uniform)
        x = drawn[..., 0, :] / drawn.sum(-2)
        if torch.compiler.is_exporting():
            return 2 * x.clamp(*_INSIDE) - 1
        draw: Any = _BetaDraw.apply
        return 2 * draw(x, shapes[..., 0, :], shapes[..., 1, :]) - 1

    def mode(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        """Return the most probable action; the middle where the distribution is uniform (both shapes 1)."""
        a, b = (F.softplus(params.unflatten(-1, (2, self.size))) + _EVEN).unbind(-2)  # shapes less 1, not rounded to 0
        return 2 * a / (a + b) - 1

    def entropy(self, params: Tensor, legal: Tensor | None = None) -> Tensor:
        a, b = self._split(params).unbind(-2)
        beta = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
        inside = beta - (a - 1) * torch.digamma(a) - (b - 1) * torch.digamma(b) + (a + b - 2) * torch.digamma(a + b)
        return (inside + math.log(2)).sum(-1)


def gamma(shape: Tensor, uniform: Tensor) -> Tensor:
    """Draw gamma variates of shapes (...,) above 1 by rejection (Marsaglia & Tsang 2000), from (..., 2 tries) uniforms;
    the last try is always accepted."""
    tries = uniform.shape[-1] // 2
    d = shape[..., None] - 1 / 3
    x = normal(uniform[..., :tries])
    v = (1 + x / (9 * d).sqrt()).pow(3)
    u = uniform[..., tries:].clamp_min(1e-12)
    good = (v > 0) & (u.log() < 0.5 * x.square() + d - d * v + d * v.clamp_min(1e-12).log())
    index = torch.cat((good[..., :-1], torch.ones_like(good[..., :1])), -1).byte().argmax(-1, keepdim=True)
    return (d * v.clamp_min(1e-6)).gather(-1, index)[..., 0]


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
