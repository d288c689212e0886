"""The matrix products that an update cannot do without, in FLOP.

Weights used forward, for the weights' gradient and for the inputs' gradient: three products. Of critics: the data
pass needs all three; the target pass the drawn critics forward; the policy pass all critics forward (for the
advantage) and, where a value is maximised, the one with the least value back to the action. The state's part of the
first layer is counted once for the online critics, once for the target's.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from pipelines.lake.spaces import Discrete
from pipelines.learning.agent import Agent
from pipelines.nets.critic import ActionValues, Scalar
from tests.learning import factories


def floor(agent: Agent, batch: int, length: int) -> float:
    """FLOP of an update on `batch` full windows of `length` steps."""
    steps = batch * length
    return 3 * _encoder(agent, batch, length) + _actor(agent, steps) + _critics(agent, steps)


def _encoder(agent: Agent, batch: int, length: int) -> float:
    """Counted on one window: windows know nothing of each other."""
    data = factories.batch(agent, lengths=(length + 1,), rows=length + 1)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        agent.encode(data)
    return batch * counter.get_total_flops()


def _actor(agent: Agent, steps: int) -> float:
    weights = sum(p.numel() for p in agent.heads.actor.parameters() if p.dim() > 1)
    return 2 * steps * weights * (4 if agent.target_heads is not None else 3)


def _critics(agent: Agent, steps: int) -> float:
    critic, kind, discounts = agent.heads.critic, agent.agent_type, len(agent.gammas)
    if critic is None:
        return 0
    first, *deeper = (weight[0].numel() for weight in critic.weights)
    last, rows = critic.last_weight[0].numel(), 2 * steps * critic.members
    if isinstance(critic, ActionValues):  # one row a step, which serves data and policy alike
        return rows * (first + sum(deeper) + last) * (3 + 1)
    state, action, _ = (part * critic.weights[0].shape[-1] for part in critic.parts)
    per_value = sum(deeper) + (last // discounts if isinstance(critic.readout, Scalar) else last)
    samples: float = kind.actor_samples
    space = agent.spaces.action
    if kind.actor_weight == 0 and isinstance(space, Discrete):  # distinct ones beside the one taken, of uniform draws
        samples = (space.n - 1) * (1 - (1 - 1 / space.n) ** samples)
    back = 1 / critic.members if kind.actor_weight > 0 else 0
    drawn = agent.settings.critic.subset / critic.members * kind.critic_samples
    values = discounts * per_value * (3 + samples * (1 + back) + drawn)
    return rows * (values + state * (3 + 1) + action * (2 + discounts * (samples + drawn)))
