"""Value normalisation that preserves outputs: PopArt (Hessel et al. 2019, arXiv 1809.04474). G discounts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipelines.config.model import PopArtSettings


class PopArt(nn.Module):
    """Running first and second moment of the targets of each discount.

    `update` returns what must be done to the last layer of every head in normalised units (x -> scale x + shift), so
    that de-normalised outputs stay as they were.
    """

    def __init__(self, num_discounts: int, settings: PopArtSettings) -> None:
        super().__init__()
        self.settings = settings
        self.register_buffer("mu_G", torch.zeros(num_discounts))
        self.register_buffer("nu_G", torch.full((num_discounts,), settings.initial_nu))
        self.mu_G: Tensor
        self.nu_G: Tensor

    @property
    def sigma_G(self) -> Tensor:
        variance = (self.nu_G - self.mu_G.square()).clamp_min(0)
        return variance.sqrt().clamp(self.settings.min_sigma, self.settings.max_sigma)

    def normalize(self, value: Tensor) -> Tensor:
        """(..., G) in reward units -> normalised."""
        return (value - self.mu_G) / self.sigma_G

    def denormalize(self, value: Tensor) -> Tensor:
        """(..., G) normalised -> in reward units."""
        return value * self.sigma_G + self.mu_G

    @torch.no_grad()
    def update(self, targets_NG: Tensor) -> tuple[Tensor, Tensor]:
        """Take real (unpadded) targets into the moments -> (scale_G, shift_G) for the last layers."""
        mu, sigma, beta = self.mu_G.clone(), self.sigma_G, self.settings.beta
        self.mu_G.lerp_(targets_NG.mean(0), beta)
        self.nu_G.lerp_(targets_NG.square().mean(0), beta)
        new_sigma = self.sigma_G
        return sigma / new_sigma, (mu - self.mu_G) / new_sigma
