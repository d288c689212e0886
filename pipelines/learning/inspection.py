"""What an agent thinks of windows: values, advantages, weights, and how far its critics agree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pipelines.errors import UsageError
from pipelines.learning.agent import Agent
from pipelines.learning.tensors import TensorBatch


@torch.no_grad()
def inspect(agent: Agent, batch: TensorBatch, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Figures of every step of `batch`, none of which changes the agent; NaN at padding.

    (B, T, G), discounts as `agent.gammas`, the last one acts; values in reward units:
    `q` of the action taken (mean of the critics), `v` of the policy, `advantage` = q - v, `weight` the filter's,
    `disagreement` between the highest and the lowest critic's q, `target` y as an update would have it, `log_prob` of
    the action taken, `entropy` of the policy. `mask` (B, T) bool: real steps. `seed` decides the drawn actions and
    critics. UsageError for an agent without critics.
    """
    if agent.target_heads is None:
        raise UsageError(f"a {agent.settings.kind} agent has no values")
    batch = replace(batch, loss_mask=batch.mask)
    training = agent.training
    agent.eval()
    try:
        steps = _steps(agent, batch, torch.Generator(batch.mask.device).manual_seed(seed))
    finally:
        agent.train(training)
    out = {}
    for name, value_NG in steps.items():
        value_BTG = value_NG.new_full((*batch.mask.shape, value_NG.shape[-1]), torch.nan, dtype=torch.float32)
        value_BTG[batch.mask] = value_NG.float()
        out[name] = value_BTG.cpu().numpy()
    return {**out, "mask": batch.mask.cpu().numpy()}


def _steps(agent: Agent, batch: TensorBatch, generator: torch.Generator) -> dict[str, Tensor]:
    """Each figure at the real steps (N, G)."""
    states_BTD = agent.encode(batch)
    target_NG = agent.targets(batch, states_BTD, generator)
    at = agent.steps(batch, states_BTD)
    verdict = agent.judge(at, target_NG, generator)
    q_CNG, v_CNG = agent.reward_units(verdict.judged.data_CNG), agent.reward_units(verdict.own.all_CNG)
    return {
        "q": q_CNG.mean(0),
        "v": v_CNG.mean(0),
        "advantage": verdict.advantage_NG,
        "weight": verdict.weight_NG,
        "disagreement": q_CNG.amax(0) - q_CNG.amin(0),
        "target": target_NG / agent.settings.reward_scale,
        "log_prob": agent.log_prob(at),
        "entropy": agent.heads.policy.entropy(at.params_NGP, at.legal),
    }
