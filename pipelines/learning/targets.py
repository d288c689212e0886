"""Bootstrapped value targets. B batch, T time (steps of the window), G discounts."""

from __future__ import annotations

import torch
from torch import Tensor


def n_step_targets(
    reward_BT: Tensor, terminated_BT: Tensor, next_value_BTG: Tensor, gamma_G: Tensor, mask_BT: Tensor, *, n: int = 1
) -> Tensor:
    """y_t = sum_{i<k} gamma^i r_{t+i} + gamma^k V_{t+k}, k the least of n, the first terminal and the window's end.

    `reward_BT[t]`, `terminated_BT[t]` and `next_value_BTG[t]` belong to the step from t to t+1; V is not used where
    that step terminated. `mask_BT`: real steps, padding on the right; targets of padding mean nothing (B, T, G).
    """
    reward_BT1 = reward_BT[..., None]
    discount_BTG = gamma_G * (~terminated_BT)[..., None]
    if n == 1:
        return reward_BT1 + discount_BTG * next_value_BTG
    goes_on_BT1 = torch.cat((mask_BT[:, 1:], torch.zeros_like(mask_BT[:, :1])), 1)[..., None]
    one_step = target = reward_BT1 + discount_BTG * next_value_BTG
    for _ in range(n - 1):
        following = torch.cat((target[:, 1:], torch.zeros_like(target[:, :1])), 1)
        target = torch.where(goes_on_BT1, reward_BT1 + discount_BTG * following, one_step)
    return target
