"""Diagnostics of an agent on windows: values, advantages and weights of every step, and the encoders' activations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pipelines.errors import UsageError
from pipelines.learning.agent import Agent
from pipelines.learning.batch import TensorBatch
from pipelines.nets.probe import probe
from pipelines.nets.sequence import SequenceEncoder
from pipelines.nets.timestep import TimestepEncoder


@torch.no_grad()
def inspect(agent: Agent, batch: TensorBatch, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Compute figures of every step of `batch`, without changing the agent; NaN at padding.

    (B, T, G), discounts as in `agent.gammas`, the acting one last; values in reward units: `q` of the dataset action
    (mean of the critics), `v` of the policy, `advantage` = q - v, `weight` of behaviour cloning, `disagreement`
    (maximum minus minimum of the critics' q), `target` y of an update, `log_prob` of the dataset action, `entropy` of
    the policy. `mask` (B, T) bool: valid steps. `seed` determines sampled actions and drawn critics. UsageError for an
    agent without critics.
    """
    if agent.target_heads is None:
        raise UsageError(f"a {agent.settings.kind} agent has no values")
    batch = replace(batch, loss_mask=batch.mask)
    training = agent.training
    agent.eval()
    try:
        figures = _figures(agent, batch, torch.Generator(batch.mask.device).manual_seed(seed))
    finally:
        agent.train(training)
    out = {}
    for name, value_NG in figures.items():
        value_BTG = value_NG.new_full((*batch.mask.shape, value_NG.shape[-1]), torch.nan, dtype=torch.float32)
        value_BTG[batch.mask] = value_NG.float()
        out[name] = value_BTG.cpu().numpy()
    return {**out, "mask": batch.mask.cpu().numpy()}


def _figures(agent: Agent, batch: TensorBatch, generator: torch.Generator) -> dict[str, Tensor]:
    """Compute each figure at the valid steps (N, G)."""
    states_BTD = agent.encode(batch)
    target_NG = agent.targets(batch, states_BTD, generator)
    steps = agent.valid_steps(batch, states_BTD)
    critics = agent.evaluate(steps, target_NG, generator)
    q_CNG, v_CNG = agent.reward_units(critics.data.q_CNG), agent.reward_units(critics.policy.q_CNG)
    return {
        "q": q_CNG.mean(0),
        "v": v_CNG.mean(0),
        "advantage": critics.advantage_NG,
        "weight": critics.weight_NG,
        "disagreement": q_CNG.amax(0) - q_CNG.amin(0),
        "target": target_NG / agent.settings.reward_scale,
        "log_prob": agent.log_prob(steps),
        "entropy": agent.heads.policy.entropy(steps.params_NGP, steps.legal),
    }


def inspect_encoders(timestep: TimestepEncoder, sequence: SequenceEncoder, batch: TensorBatch) -> dict[str, Tensor]:
    """Compute figures of both encoders on a small part of `batch`, as 0-d tensors, without changing anything.

    Compiled encoders are called uncompiled: hooks in compiled code do not fire.
    """
    training = timestep.training, sequence.training
    timestep.eval()
    sequence.eval()

    def tokens(windows: slice, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        part = (windows, rows)
        observation = {name: column[part] for name, column in batch.observation.items()}
        time = batch.time[part]
        return timestep.forward(observation, batch.action[part], batch.reward[part], time), time, batch.valid_rows[part]

    try:
        return probe(timestep, sequence, tokens)
    finally:
        timestep.train(training[0])
        sequence.train(training[1])
