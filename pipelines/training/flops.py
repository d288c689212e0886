"""The matrix products that an update cannot do without, in FLOP.

Weights used forward, for the weights' gradient and for the inputs' gradient: three products. Of critics: the data
pass needs all three; the target pass the drawn critics forward; the policy pass all critics forward (for the
advantage) and, where a value is maximised, the one with the least value back to the action. The state's part of the
first layer is counted once for the online critics, once for the target's.
"""

from __future__ import annotations

import numpy as np
import torch

from pipelines.config.model import TransformerSettings
from pipelines.data.batch import Batch
from pipelines.lake.schema import ACTION, REWARD, TERMINATED
from pipelines.lake.spaces import Discrete
from pipelines.learning.agent import Agent
from pipelines.learning.batch import TensorBatch, encode
from pipelines.learning.heads import CriticHeads
from pipelines.nets.critic import ActionValues, Scalar
from pipelines.nets.sequence import make_sequence_encoder
from pipelines.nets.timestep import make_timestep_encoder


def count_update_flop(agent: Agent, batch: int, length: int) -> float:
    """Count the FLOP of an update on `batch` full windows of `length` steps."""
    steps, actor = batch * length, agent.heads.actor
    weights = sum(p.numel() for p in actor.parameters() if p.dim() > 1)
    of_actor = 2 * steps * weights * (4 if agent.target_heads is not None else 3)
    return 3 * batch * _count_encoders(agent, length) + of_actor + _count_critics(agent, steps)


def _count_encoders(agent: Agent, length: int) -> float:
    """Count the FLOP of one window, since windows know nothing of each other. Copies of the encoders on the CPU encode
    it: kernels of a device's attention may not be counted."""
    from torch.utils.flop_counter import FlopCounterMode  # takes long to import

    spaces, settings = agent.spaces, agent.settings.sequence
    if isinstance(settings, TransformerSettings):
        settings = settings.model_copy(update={"attention": "auto"})
    leading = 1, length + 1
    columns = {
        name: np.zeros((*leading, *space.shape), space.dtype)
        for name, space in {**spaces.observation, ACTION: spaces.action}.items()
    }
    columns |= {REWARD: np.zeros(leading, np.float32), TERMINATED: np.zeros(leading, np.uint8)}
    window = TensorBatch.from_numpy(Batch(columns, np.array([length + 1]), np.array([0])), spaces)
    with torch.random.fork_rng(devices=()), torch.no_grad():
        timestep = make_timestep_encoder(spaces, agent.settings.timestep).eval()
        sequence = make_sequence_encoder(timestep.output_size, settings).eval()
        with FlopCounterMode(display=False) as counter:
            encode(timestep, sequence, window, packed=False)
    return counter.get_total_flops()


def _count_critics(agent: Agent, steps: int) -> float:
    if not isinstance(agent.heads, CriticHeads):
        return 0
    critic, kind, discounts = agent.heads.critic, agent.agent_type, len(agent.gammas)
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
