"""The policy's two losses, as sums over real steps: the caller divides by the number of steps of the whole update, so
that micro-batches add up to the batch. (The critics' is computed where they are: `nets.critic`.) N real steps, G
discounts; values in normalised units."""

from __future__ import annotations

from torch import Tensor


def maximization_loss(value_NG: Tensor, importance_N: Tensor | None = None) -> Tensor:
    """Minus the value of the policy's actions, mean over discounts, sum over steps, each times its importance."""
    if importance_N is not None:
        value_NG = value_NG * importance_N[:, None]
    return -value_NG.sum() / value_NG.shape[1]


def imitation_loss(log_prob_NG: Tensor, weight_NG: Tensor) -> Tensor:
    """Weighted negative log-likelihood of the actions taken, mean over discounts, sum over steps."""
    return -(weight_NG * log_prob_NG).sum() / log_prob_NG.shape[1]
