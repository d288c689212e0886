"""The scale of the actor's loss: averages by hand, units, rare rewards."""

import pytest
import torch

from pipelines.learning.popart import AdvantageScale
from tests.learning.factories import agent, batch


def generator():
    return torch.Generator().manual_seed(0)


def rows(*squares):
    return torch.tensor([[square] for square in squares])


def test_averages_by_hand():
    scale = AdvantageScale(1)
    unknown = torch.tensor([7.0])
    assert scale.scale(unknown).item() == 7
    scale.update(rows(1.0, 3.0), torch.tensor([0.0, 4.0, -2.0]))  # mean square 2; of rewards 10
    assert scale.scale(unknown).item() == pytest.approx(2**0.5)
    scale.update(rows(8.0), torch.tensor([0.0]))  # (2 + 8) / 2
    assert scale.scale(unknown).item() == pytest.approx(5**0.5)
    assert scale.reward_square.item() == pytest.approx(10)


def test_rewards_bound_the_scale_of_noise():
    scale = AdvantageScale(1)
    scale.update(rows(1e-8), torch.zeros(5))
    assert scale.scale(torch.ones(1)).item() == float("inf")
    scale.update(rows(1e-8), torch.tensor([0.0, 2.0]))
    assert scale.scale(torch.ones(1)).item() == pytest.approx(scale.floor * 2)


@pytest.mark.parametrize(
    ("squares", "rewards"), [((4.0, torch.inf), (1.0,)), ((4.0, torch.nan), (1.0,)), ((4.0,), (1.0, torch.nan))]
)
def test_update_with_a_number_that_is_not_finite_changes_nothing(squares, rewards):
    scale = AdvantageScale(1)
    scale.update(rows(1.0), torch.tensor([3.0]))
    before = {name: value.clone() for name, value in scale.state_dict().items()}
    scale.update(rows(*squares), torch.tensor(rewards))
    torch.testing.assert_close(scale.state_dict(), before, rtol=0, atol=0)


def test_before_the_first_reward_values_do_not_move_the_policy():
    owner = agent("discrete", sequence="gru", bc_weight=0.0)
    data = batch(owner, lengths=(5, 3), rows=5, reward=0.0)
    owner.loss(data, generator())
    loss, _ = owner.loss(data, generator())
    loss.backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in owner.heads.actor.parameters())


@pytest.mark.parametrize("unit", [1e-3, 1e3])
def test_gradients_of_the_policy_do_not_depend_on_the_unit_of_rewards(unit):
    found = []
    for factor in (1.0, unit):
        owner = agent("discrete", sequence="gru", reward_scale=factor, entropy_weight=0.1)
        data = batch(owner, lengths=(5, 3), rows=5)
        for _ in range(3):
            owner.zero_grad()
            owner.loss(data, generator())[0].backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in owner.heads.actor.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=2e-3, atol=1e-6)


def test_micro_batches_add_up_to_the_scale_of_the_batch():
    from tests.learning.test_agent import in_parts

    whole, parts = (agent("discrete", sequence="gru") for _ in range(2))
    data = batch(whole, lengths=(5, 3, 4), rows=5)
    for _ in range(2):
        whole.loss(data, generator())
        for loss, _ in parts.losses(*in_parts(data, 3, seed=0)):
            loss.backward()
    torch.testing.assert_close(whole.advantage_scale.state_dict(), parts.advantage_scale.state_dict())
