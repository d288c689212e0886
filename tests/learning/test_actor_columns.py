"""Observation columns that the policy head sees directly, learning and acting."""

import numpy as np
import pytest
import torch

from pipelines.errors import UsageError
from pipelines.lake.spaces import Box, Discrete
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.batch import TensorBatch
from tests.learning.factories import agent, batch, windows

OBSERVATION = {"obs": Box(shape=(3,)), "obs.goal": Discrete(n=5), "obs.far": Box(shape=(2,))}
SHOWN = {"actor": {"hidden": [16], "columns": ["obs.goal", "obs.far"]}}
HIDDEN = {"timestep": {"hidden": [16], "output": 12, "columns": {"obs.goal": "hidden", "obs.far": "hidden"}}}


def owner_of(action="discrete", **changes):
    """Its states know nothing of the goal: the policy head alone does."""
    owner = agent(action, OBSERVATION, **(SHOWN | HIDDEN | changes))
    for parameter in owner.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    return owner.eval()


def test_the_policy_head_gets_the_state_and_the_columns_as_features():
    owner = owner_of()
    observation = {"obs.goal": torch.tensor([3]), "obs.far": torch.tensor([[-(np.e - 1), 0.0]])}
    seen = owner.policy_input(torch.full((1, 2), 7.0), observation)
    near = np.log(2)  # symlog of 1
    torch.testing.assert_close(seen, torch.tensor([[7, 7, 0, 0, 0, near, 0, -1, 0]], dtype=torch.float32))


@pytest.mark.parametrize("kind", ["actor-critic", "multi-task", "behaviour-cloning"])
@pytest.mark.parametrize("action", ["discrete", "box"])
def test_columns_reach_the_policy_and_not_the_critics(kind, action):
    owner = owner_of(action, kind=kind)
    data = batch(owner)
    owner.loss(data)[0].backward()
    last = owner.sequence.output_size
    first = next(iter(owner.heads.actor.parameters()))
    assert first.shape[1] == last + 7
    assert (first.grad[:, last:].abs().sum(0) > 0).all()
    others = {**data.observation, "obs.goal": (data.observation["obs.goal"] + 1) % 5}
    changed = TensorBatch(**(vars(data) | {"observation": others}))
    h, other_h = owner.encode(data), owner.encode(changed)
    assert torch.equal(h, other_h)
    assert not torch.allclose(owner.valid_steps(data, h).params_NGP, owner.valid_steps(changed, h).params_NGP)


def test_the_next_action_is_that_of_the_next_observation():
    """Of a window's last row only the goal changes: targets of its last step do, and no others."""
    owner = owner_of()
    owner.loss(batch(owner))
    data = batch(owner, lengths=(5, 5, 5), rows=5, terminated=0.0)
    goal = data.observation["obs.goal"].clone()
    goal[:, -1] = (goal[:, -1] + 1) % 5
    changed = TensorBatch(**(vars(data) | {"observation": {**data.observation, "obs.goal": goal}}))
    h = owner.encode(data)
    before, after = (owner.targets(each, h, torch.Generator().manual_seed(0)) for each in (data, changed))
    moved = (before != after).any(-1).view(3, 4)
    assert moved.tolist() == [[False, False, False, True]] * 3


@pytest.mark.parametrize("action", ["discrete", "multi_binary", "box"])
@torch.no_grad()
def test_acting_is_as_the_full_forward(action):
    owner = owner_of(action)
    source = windows(owner.spaces, lengths=(6, 6, 6), rows=6, terminated=0.0)
    source.start[:] = 0
    for name in ("action", "reward"):
        source.columns[name][:, 0] = 0
    data, policy = TensorBatch.from_numpy(source, owner.spaces), owner.heads.policy
    params = owner.heads.actor(owner.policy_input(owner.encode(data), data.observation))[..., -1, :]
    expected = policy.to_stored(policy.mode(params)).numpy()
    acting = AgentPolicy(owner, num_actors=3, capacity=6, greedy=True)
    for t in range(6):
        row = {name: column[:, t] for name, column in source.columns.items()}
        found = acting.act({n: row[n] for n in OBSERVATION}, row["action"], row["reward"], np.full(3, t))
        np.testing.assert_allclose(found, expected[:, t], atol=1e-5)


def test_a_column_that_is_not_observed_is_refused():
    with pytest.raises(UsageError, match=r"agent.actor.columns: no such observation: obs\.gaol"):
        agent(actor={"hidden": [8], "columns": ["obs.gaol"]})
