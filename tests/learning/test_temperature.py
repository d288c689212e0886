"""Tests of `Temperature`: single updates computed by hand, and the entropy of an agent that learns with it."""

import math

import pytest
import torch

from pipelines.errors import UsageError
from pipelines.learning.popart import Temperature
from tests.learning.factories import agent, batch
from tests.tiers import some


def generator():
    return torch.Generator().manual_seed(0)


def test_update_by_hand():
    weight = Temperature(2, action_size=2)
    # Two dimensions should have -2 nats. The means are -2.5, a quarter nat a dimension too little, and 4, clipped to 1.
    weight.update(torch.tensor([[-2.0, 5.0], [-3.0, 3.0]]))
    expected = [math.log(0.1) + 0.02 * 0.25, math.log(0.1) - 0.02]
    torch.testing.assert_close(weight.log_weight_G, torch.tensor(expected))


def test_weight_stays_within_bounds():
    weight = Temperature(1, action_size=1)
    for entropy, bound in ((-50.0, 20.0), (50.0, 1e-5)):
        for _ in range(1000):
            weight.update(torch.tensor([[entropy]]))
        assert weight.weight_G.item() == pytest.approx(bound, rel=1e-4)


@pytest.mark.parametrize("rows", [[[torch.nan]], [[-5.0], [torch.inf]], []])
def test_update_without_finite_entropies_changes_nothing(rows):
    weight = Temperature(1, action_size=1)
    weight.update(torch.tensor(rows).reshape(-1, 1))
    assert weight.weight_G.item() == pytest.approx(0.1)


def test_first_update_has_the_weight_it_starts_with():
    data = batch(agent("box"), lengths=(5, 3), rows=5)
    losses = [agent("box", entropy_weight=weight).loss(data, generator())[0] for weight in ("auto", Temperature.start)]
    torch.testing.assert_close(*losses)


def test_micro_batches_move_it_as_the_whole_batch_does():
    from tests.learning.test_agent import in_parts

    whole, parts = (agent("box", sequence="gru", entropy_weight="auto") for _ in range(2))
    data = batch(whole, lengths=(5, 3, 4), rows=5)
    for _ in range(2):
        whole.loss(data, generator())
        for loss, _ in parts.losses(*in_parts(data, 3, seed=0)):
            loss.backward()
    assert (whole.temperature.weight_G != Temperature.start).all()
    torch.testing.assert_close(whole.temperature.state_dict(), parts.temperature.state_dict())


@pytest.mark.system
@pytest.mark.parametrize("deviation", some([0.02, 0.9], 0))
def test_learning_brings_the_entropy_to_minus_one_nat_a_dimension(deviation):
    """From a policy that is almost deterministic, and from one that is almost uniform."""
    owner = agent("box", sequence="gru", entropy_weight="auto", bc_weight=0.0)
    policy = owner.heads.policy
    with torch.no_grad():
        raw = math.atanh(2 * (math.log(deviation) - policy.low) / (policy.high - policy.low) - 1)
        last = list(owner.heads.actor.parameters())[-1]
        last.view(len(owner.gammas), -1)[:, policy.size :] = raw
    optimizer = torch.optim.Adam(owner.trainable_parameters().values(), lr=3e-3)
    data = batch(owner, lengths=(5, 3, 4), rows=5)
    for _ in range(600):
        optimizer.zero_grad()
        loss, metrics = owner.loss(data, generator())
        loss.backward()
        optimizer.step()
    params = owner.valid_steps(data, owner.encode(data)).params_NGP[:, -1]
    assert policy.action_entropy(params).mean().item() / policy.size == pytest.approx(-1, abs=0.25)
    assert metrics["entropy_weight"].item() > 0


@pytest.mark.parametrize("action", ["discrete", "multi_binary"])
def test_other_actions_need_a_number(action):
    with pytest.raises(UsageError, match="needs a density over Box actions"):
        agent(action, entropy_weight="auto")
