"""Every kind of action learns one-step tasks: the best action is shown in the observation, and better ones pay more."""

import numpy as np
import pytest
import torch

from pipelines.learning.acting import AgentPolicy
from pipelines.learning.tensors import TensorBatch
from tests.learning.factories import agent, values, windows

EPISODES = 24


def pay(action, wanted):
    """(N, ...) each -> (N,): 1 for the wanted action; mean squared distance (Box) or share of wrong choices less."""
    miss = np.square(action - wanted) if action.dtype == np.float32 else action != wanted
    return 1 - miss.reshape(len(action), -1).mean(1)


@pytest.mark.parametrize("action", ["discrete", "multi_discrete", "multi_binary", "box"])
def test_the_policy_comes_to_match_what_it_sees(action):
    owner = agent(
        action,
        sequence="identity",
        gammas=[],
        acting_gamma=0.5,
        timestep={"hidden": [32], "output": 32},
        actor={"hidden": [32]},
        critic={"hidden": [64, 64]},
    )
    space, rng = owner.spaces.action, np.random.default_rng(0)
    optimizer = torch.optim.AdamW(owner.trainable_parameters(), lr=3e-3)
    noise = torch.Generator().manual_seed(0)
    policy = AgentPolicy(owner, num_actors=EPISODES, capacity=1, greedy=True)

    def episodes():
        source = windows(owner.spaces, lengths=(2,) * EPISODES, rows=2, seed=int(rng.integers(1 << 30)), terminated=1)
        source.start[:] = 0
        wanted = values(space, (EPISODES,), rng)
        shown = wanted.reshape(EPISODES, -1) / (1 if action in ("box", "multi_binary") else 2)
        source.columns["obs"][:, 0] = 0
        source.columns["obs"][:, 0, : shown.shape[1]] = shown
        return source, wanted

    for _ in range(400):
        source, wanted = episodes()
        source.columns["reward"][:, 1] = pay(source.columns["action"][:, 1], wanted)
        optimizer.zero_grad()
        owner.loss(TensorBatch.from_numpy(source, owner.spaces), noise)[0].backward()
        torch.nn.utils.clip_grad_norm_(owner.trainable_parameters(), 1.0)
        optimizer.step()
        owner.update_targets()
    source, wanted = episodes()
    zero = np.zeros(EPISODES)
    chosen = policy.act({"obs": source.columns["obs"][:, 0]}, source.columns["action"][:, 0], zero, zero)
    assert pay(chosen, wanted).mean() > 0.9
