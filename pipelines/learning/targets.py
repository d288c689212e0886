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


def trace_targets(
    reward_BT: Tensor,
    terminated_BT: Tensor,
    next_value_BTG: Tensor,
    next_q_BTG: Tensor,
    trace_BTG: Tensor,
    gamma_G: Tensor,
    mask_BT: Tensor,
) -> Tensor:
    """y_t = r_t + gamma (V_{t+1} + c_{t+1} (y_{t+1} - Q_{t+1})), without the correction at the end of the window.

    `next_q_BTG[t]` is the value of the action taken after the step, `trace_BTG[t]` how much of what followed it counts:
    with Q = V and c = lambda Peng's Q(lambda) (Harutyunyan et al. 2016, arXiv 1602.04951), with c = lambda pi(a | s)
    tree backup (Precup et al. 2000). Other arguments and the result as for `n_step_targets`.
    """
    target = reward_BT[..., None] + gamma_G * (~terminated_BT)[..., None] * next_value_BTG
    continues_BT = torch.cat((mask_BT[:, 1:], torch.zeros_like(mask_BT[:, :1])), 1) & ~terminated_BT
    # y_t = (1-step target - gamma c Q) + gamma c y_{t+1}: a scan from the end of the window.
    weight_BTG = gamma_G * trace_BTG * continues_BT[..., None]
    base_BTG = target - weight_BTG * next_q_BTG
    targets = [target[:, -1]]
    for t in range(target.shape[1] - 2, -1, -1):
        targets.append(torch.addcmul(base_BTG[:, t], weight_BTG[:, t], targets[-1]))
    return torch.stack(targets[::-1], 1)
