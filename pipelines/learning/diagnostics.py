"""Diagnostics of an agent on windows: values, advantages and weights of every step, and figures about the encoders from
a forward pass on a few tokens of a batch. B batch, T time, W width."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipelines.errors import UsageError
from pipelines.learning.agent import Agent, rank_actions
from pipelines.learning.batch import TensorBatch
from pipelines.learning.heads import ExactHeads
from pipelines.nets.linear import ACTIVATIONS
from pipelines.nets.sequence import SequenceEncoder
from pipelines.nets.timestep import TimestepEncoder

_WINDOWS, _TOKENS = 4, 256  # maximum used
_DEAD = 0.025  # share of a layer's mean activation below which a unit is dead (Sokar et al. 2023, arXiv 2302.12902)


@torch.no_grad()
def inspect(agent: Agent, batch: TensorBatch, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Compute figures of every step of `batch`, without changing the agent; NaN at padding.

    (B, T, G), discounts as in `agent.gammas`, the acting one last; values in reward units: `q` of the dataset action
    (mean of the critics), `v` of the policy, `advantage` = q - v, `weight` of behaviour cloning, `disagreement`
    (maximum minus minimum of the critics' q), `target` y of an update, `log_prob` of the dataset action, `entropy` of
    the policy. Of critics with a value for each action also `action_gap` (mean q of the best action minus that of the
    second best) and `agreement` (1 where the best action is the policy's most probable one, else 0). `mask` (B, T)
    bool: valid steps. `seed` determines sampled actions and drawn critics. UsageError for an agent without critics.
    """
    if agent.target_heads is None:
        raise UsageError(f"a {agent.settings.kind} agent has no values")
    batch = replace(batch, counted=batch.valid)
    training = agent.training
    agent.eval()
    try:
        figures = _compute_figures(agent, batch, torch.Generator(batch.mask.device).manual_seed(seed))
    finally:
        agent.train(training)
    out = {}
    for name, value_NG in figures.items():
        out[name] = batch.valid.scatter(value_NG.float()).masked_fill(~batch.mask[..., None], torch.nan).cpu().numpy()
    return {**out, "mask": batch.mask.cpu().numpy()}


def _compute_figures(agent: Agent, batch: TensorBatch, generator: torch.Generator) -> dict[str, Tensor]:
    """Compute each figure at the valid steps (N, G)."""
    states_BTD = agent.encode(batch)
    target_NG = agent.targets(batch, states_BTD, generator)
    steps = agent.valid_steps(batch, states_BTD)
    critics = agent.evaluate(steps, target_NG, generator)
    q_CNG, v_CNG = agent.reward_units(critics.data.q_CNG), agent.reward_units(critics.policy.q_CNG)
    figures = {
        "q": q_CNG.mean(0),
        "v": v_CNG.mean(0),
        "advantage": critics.advantage_NG,
        "weight": critics.weight_NG,
        "disagreement": q_CNG.amax(0) - q_CNG.amin(0),
        "target": target_NG / agent.settings.reward_scale,
        "log_prob": agent.log_prob(steps),
        "entropy": agent.heads.policy.entropy(steps.params_NGP, steps.legal),
    }
    if isinstance(agent.heads, ExactHeads) and agent.heads.policy.num_params > 1:
        assert agent.popart is not None
        best_NG, gap_NG, _ = rank_actions(critics.data.shared, steps.legal)
        figures["action_gap"] = gap_NG * agent.popart.sigma_G / agent.settings.reward_scale
        policy_NG = agent.heads.policy.most_likely(steps.params_NGP, steps.legal)
        figures["agreement"] = policy_NG == best_NG
    return figures


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


@torch.no_grad()
def probe(
    timestep: nn.Module, sequence: SequenceEncoder, encode: Callable[[slice, slice], tuple[Tensor, Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Compute the share of dead units of both encoders, and the sequence encoder's own figures; 0-d tensors.

    `encode` returns tokens (B, T, W) of windows and places, their time (B, T), and which are valid.
    """
    with _collect_activations(timestep) as early, _collect_activations(sequence) as late:
        tokens_BTW, time_BT, real_BT = encode(slice(_WINDOWS), slice(_TOKENS))
        figures = sequence.inspect(tokens_BTW, time_BT)
    for name, found in (("timestep", early), ("sequence", late)):
        dead = [find_dead_units(x_BTW, real_BT) for x_BTW in found if x_BTW.dim() == 3]
        if dead:
            figures[f"dead_units_{name}"] = torch.cat(dead).float().mean()
    return figures


def find_dead_units(x_BTW: Tensor, real_BT: Tensor) -> Tensor:
    """Find which units of a layer are dead: (W,) bool."""
    mean_W = x_BTW[real_BT].float().abs().mean(0)
    return mean_W <= _DEAD * mean_W.mean()


@contextmanager
def _collect_activations(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the outputs of activations in `module` while the context lasts."""
    found: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Tensor) -> None:
        found.append(output)

    kinds = tuple(ACTIVATIONS.values())
    hooks = [part.register_forward_hook(keep) for part in module.modules() if isinstance(part, kinds)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
