"""Scales of values (PopArt, Hessel et al. 2019, arXiv 1809.04474) and of advantages. G discounts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipelines.config.model import PopArtSettings
from pipelines.nets import ranks
from pipelines.nets.compute import Kept
from pipelines.nets.inputs import is_finite, start_corrected_step


class PopArt(nn.Module):
    """Running mean and variance of the targets of each discount.

    The averages use the start-corrected step beta / (1 - (1 - beta)^t): the first batch sets them, early ones have
    equal weight, later ones enter at `beta`. Before the first update the scale is unknown, so every denormalised value
    is the mean: what `reward_scale` times the settings' `reward_mean` sums to. Without one it is zero, and the first
    targets are rewards alone, whatever their unit.

    `update` returns the correction (x -> scale x + shift) for the last layer of every head in normalised units, which
    preserves denormalised outputs. The first update leaves the layers as they were initialised.
    """

    def __init__(self, gammas: Sequence[float], settings: PopArtSettings, *, reward_scale: float = 1.0) -> None:
        super().__init__()
        self.settings = settings
        start = settings.reward_mean * reward_scale if settings.enabled else 0.0
        # Variance about the mean, not a second moment: rewards of 1e3 that differ by 1 would cancel in float32.
        self.register_buffer("mu_G", torch.tensor([start / (1 - gamma) for gamma in gammas]))
        self.register_buffer("variance_G", torch.zeros(len(gammas)))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.mu_G: Tensor
        self.variance_G: Tensor
        self.updates: Tensor
        self._scales = Kept[tuple[Tensor, Tensor]]()

    @property
    def sigma_G(self) -> Tensor:
        """Scale (G,), within the settings' bounds; ones if normalisation is disabled."""
        return self._scales.get((self.variance_G, self.updates), self._compute_scales)[0]

    @torch.no_grad()
    def _compute_scales(self) -> tuple[Tensor, Tensor]:
        """Compute the scale, and the same before the first update: 0, as it is unknown. An update reads them often."""
        if not self.settings.enabled:
            return torch.ones_like(self.variance_G), torch.ones_like(self.variance_G)
        sigma_G = self.variance_G.sqrt().clamp(self.settings.min_sigma, self.settings.max_sigma)
        return sigma_G, sigma_G * (self.updates > 0)

    def normalize(self, value: Tensor) -> Tensor:
        """Normalise (..., G) in units of scaled rewards."""
        return (value - self.mu_G) / self.sigma_G

    def denormalize(self, value: Tensor) -> Tensor:
        """Denormalise (..., G) to units of scaled rewards."""
        if not self.settings.enabled:
            return value
        known_G = self._scales.get((self.variance_G, self.updates), self._compute_scales)[1]
        return torch.addcmul(self.mu_G, value, known_G)

    @torch.no_grad()
    def update(self, targets_NG: Tensor) -> tuple[Tensor, Tensor]:
        """Add valid (unpadded) targets, those of all ranks, to the moments -> (scale_G, shift_G) for the last layers.

        Targets of a discount that are not all finite leave its moments unchanged.
        """
        sigma = self.sigma_G
        if not self.settings.enabled:
            return sigma, self.mu_G.clone()
        if ranks.count_joined() > 1:
            mean64, square64, _ = ranks.compute_moments(targets_NG)
            mean, variance = mean64.to(sigma.dtype), (square64 - mean64.square()).clamp_min(0).to(sigma.dtype)
        else:
            variance, mean = torch.var_mean(targets_NG, 0, correction=0)
        usable = is_finite(variance)  # no variance is, where the mean is not
        first = self.updates == 0
        self.updates += usable.all()
        step = start_corrected_step(self.updates, self.settings.beta)
        distance = mean - self.mu_G
        moved = step * distance
        # Exponential average of the second moment, written about the means: (1 - step) (V + step distance^2) + step v.
        variance = torch.addcmul(self.variance_G, moved, distance).lerp_(variance, step)
        mu = torch.where(usable, self.mu_G + moved, self.mu_G)
        torch.where(usable, variance, self.variance_G, out=self.variance_G)
        new_sigma = self.sigma_G
        scale, shift = sigma / new_sigma, (self.mu_G - mu) / new_sigma
        self.mu_G.copy_(mu)
        return scale.masked_fill(first, 1.0), shift.masked_fill(first, 0.0)


class AdvantageScale(nn.Module):
    """Root mean square of the advantages of all actions, for each discount, in units of scaled rewards.

    The actor loss is divided by it. In PopArt's units, which are deviations between states, the values of actions may
    differ by a thousandth (Acrobot) or by a half: fixed weights of entropy and cloning would rule the policy in the
    one task and vanish in the other.

    Where rewards are rare, advantages are noise until some are met. Then `floor` times the root mean square of the
    rewards that are not 0 bounds the scale from below, and before the first reward it is infinite: noise divided by
    its own size would make the policy deterministic.

    Averages over updates have step max(1 / t, rate). An update is divided by the scale of those before it, so that
    its micro-batches need no statistics of each other.
    """

    rate, floor = 0.01, 0.02

    def __init__(self, num_discounts: int) -> None:
        super().__init__()
        self.register_buffer("square_G", torch.zeros(num_discounts))
        self.register_buffer("reward_square", torch.zeros(()))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.register_buffer("reward_updates", torch.zeros((), dtype=torch.int64))
        self.square_G: Tensor
        self.reward_square: Tensor
        self.updates: Tensor
        self.reward_updates: Tensor

    @torch.no_grad()
    def update(self, square_NG: Tensor, reward_N: Tensor) -> None:
        """Add squared advantages and rewards of an update's steps, those of all ranks. An update with a number that is
        not finite changes nothing."""
        own = (
            square_NG.sum(0, dtype=torch.float64),
            reward_N.square().sum(0, keepdim=True, dtype=torch.float64),
            (reward_N != 0).sum(0, keepdim=True),
            reward_N.new_full((1,), len(square_NG)),
        )
        sums = ranks.sum_tensor(torch.cat(own))
        means = (sums[:-1] / sums[-1]).to(self.square_G.dtype)  # NaN without steps
        is_usable = is_finite(means).all()
        reward_square, rewards = means[-2:].unbind()
        self._average(self.square_G, self.updates, means[:-2], is_usable)
        self._average(self.reward_square, self.reward_updates, reward_square / rewards, is_usable & (rewards > 0))

    def _average(self, average: Tensor, updates: Tensor, mean: Tensor, is_usable: Tensor) -> None:
        updates += is_usable
        step = updates.clamp_min(1).reciprocal().clamp_min(self.rate)
        average.lerp_(torch.where(is_usable, mean, average), step)

    def scale(self, otherwise: Tensor) -> Tensor:
        """Compute the scale (G,): `otherwise` before the first update, infinite before the first reward."""
        square_G = torch.maximum(self.square_G, self.floor**2 * self.reward_square)
        scale_G = square_G.sqrt().clamp_min(1e-8).masked_fill(self.reward_updates == 0, torch.inf)
        return torch.where(self.updates > 0, scale_G, otherwise)


class Temperature(nn.Module):
    """Weight of the entropy bonus, for each discount, adjusted so that the mean entropy of Box actions stays at minus
    one nat a dimension (Haarnoja et al. 2018, arXiv 1812.05905, section 5).

    A fixed weight is too small where the values of actions differ much, and the policy stops exploring; where they
    differ little, it is too large, and the policy stays random. The logarithm of the weight moves by `rate` an update
    for each nat a dimension of the difference, at most by `rate`: from `start` to a thousandth of it in 350 updates.
    """

    rate, start = 0.02, 0.1
    bounds = math.log(1e-5), math.log(20.0)  # of the logarithm of the weight

    def __init__(self, num_discounts: int, action_size: int) -> None:
        super().__init__()
        self.action_size = action_size
        self.register_buffer("log_weight_G", torch.full((num_discounts,), math.log(self.start)))
        self.log_weight_G: Tensor

    @property
    def weight_G(self) -> Tensor:
        """The weights (G,)."""
        return self.log_weight_G.exp()

    @torch.no_grad()
    def update(self, entropy_NG: Tensor) -> None:
        """Move the weights by the mean entropy of an update's steps, those of all ranks. An update with a number that
        is not finite, or without steps, changes nothing."""
        sums = ranks.sum_tensor(
            torch.cat((entropy_NG.sum(0, dtype=torch.float64), entropy_NG.new_full((1,), len(entropy_NG))))
        )
        excess_G = (sums[:-1] / sums[-1] / self.action_size + 1.0).clamp(-1.0, 1.0)
        moved_G = (self.log_weight_G - self.rate * excess_G.to(self.log_weight_G.dtype)).clamp(*self.bounds)
        self.log_weight_G.copy_(torch.where(is_finite(sums).all() & (sums[-1] > 0), moved_G, self.log_weight_G))
