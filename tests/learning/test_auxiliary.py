"""The built-in auxiliary losses."""

import copy

import pytest
import torch

from pipelines.lake.spaces import Box, Discrete
from pipelines.learning.auxiliary import NextStep
from tests.learning.factories import ACTIONS, agent, batch
from tests.learning.test_agent import generator, gradients, in_parts

NEXT = {"auxiliary_losses": [{"kind": "next-step", "weight": 0.5}]}
MIXED = {"obs": Box(shape=(2,)), "place": Discrete(n=3), "image": Box(shape=(16, 16, 3), dtype="uint8")}


@pytest.mark.system
def test_guessing_the_mean_costs_one_for_each_feature_that_varies():
    """Two numbers, a choice of three and the reward: six features; the image is not predicted."""
    owner = agent(observation=MIXED, **NEXT)
    loss = owner.auxiliary[0].module
    assert isinstance(loss, NextStep)
    torch.nn.init.zeros_(loss.net.last.weight)
    _, metrics = owner.loss(batch(owner, lengths=(9,) * 40), generator())
    assert metrics["auxiliary_loss_0"].item() == pytest.approx(6, rel=1e-3)


def test_targets_are_the_observation_and_the_reward_that_the_action_led_to():
    owner = agent(**NEXT)
    loss, data = owner.auxiliary[0].module, batch(owner, lengths=(3,), rows=3)
    torch.nn.init.zeros_(loss.net.last.weight)
    wanted = torch.cat((data.observation["obs"][0, 1:], data.reward[0, 1:, None]), 1)  # before the first update as is
    states = torch.zeros(1, 3, owner.sequence.output_size)
    torch.testing.assert_close(loss(states, data, data.mask)[0], wanted.square().sum(1))


@pytest.mark.parametrize("action", ACTIONS)
def test_it_trains_the_memory_for_every_kind_of_action(action):
    plain, owner = agent(action), agent(action, **NEXT)
    owner.loss(batch(owner), generator())[0].backward()
    plain.loss(batch(plain), generator())[0].backward()
    assert all(p.grad is not None and p.grad.any() for n, p in owner.auxiliary.named_parameters() if "bias" not in n)
    assert not torch.equal(owner.sequence.embed.weight.grad, plain.sequence.embed.weight.grad)
    for part in ("actor", "critic"):  # it does not change what the heads learn
        for ours, theirs in zip(
            getattr(owner.heads, part).parameters(), getattr(plain.heads, part).parameters(), strict=True
        ):
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_micro_batches_add_up_with_statistics_of_the_whole():
    owner = agent(**NEXT)
    parts = copy.deepcopy(owner)
    data = batch(owner)
    owner.loss(data, generator())[0].backward()
    for loss, _ in parts.losses(*in_parts(data, 3)):
        loss.backward()
    for name, gradient in gradients(owner).items():
        if gradient is not None:
            torch.testing.assert_close(gradients(parts)[name], gradient, rtol=1e-3, atol=1e-5, msg=name)
    assert parts.auxiliary[0].module.norm.updates == 1
