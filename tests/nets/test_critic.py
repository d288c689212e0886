"""Batched ensembles against one member at a time."""

import torch
from torch.nn import functional as F

from pipelines.config.model import ActorSettings, CriticSettings
from pipelines.nets.actor import Actor
from pipelines.nets.critic import ActionInput, ActionValues
from pipelines.nets.norms import symlog

SETTINGS = CriticSettings(ensemble=3, hidden=(8, 7))
GAMMAS = (0.1, 0.9)


def member(critic, index, x):
    for weight, bias in zip(critic.weights, critic.biases, strict=True):
        x = F.leaky_relu(x @ weight[index] + bias[index])
    return x @ critic.last_weight[index] + critic.last_bias[index]


def shaken(critic):
    for parameter in critic.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return critic


def test_action_values_equal_members_one_by_one():
    critic, h = shaken(ActionValues(5, 2, 4, SETTINGS)), torch.randn(6, 5)
    out = critic(h)
    assert out.shape == (3, 6, 2, 4)
    for index in range(3):
        torch.testing.assert_close(out[index], member(critic, index, h).view(6, 2, 4))


def test_action_input_equals_the_concatenated_input():
    critic = shaken(ActionInput(5, 3, GAMMAS, SETTINGS))
    h, shared, own = torch.randn(6, 5), torch.randn(6, 3), torch.randn(6, 2, 3)
    for action in (shared, own):
        out = critic(h, action)
        assert out.shape == (3, 6, 2)
        for g, gamma in enumerate(GAMMAS):
            horizon = symlog(torch.tensor([[1 / (1 - gamma)]])).expand(6, 1)
            x = torch.cat((h, action if action.dim() == 2 else action[:, g], horizon), -1)
            for index in range(3):
                torch.testing.assert_close(out[index, :, g], member(critic, index, x)[:, g])


def test_frozen_critics_pass_gradients_and_take_none():
    critic = ActionInput(5, 3, GAMMAS, SETTINGS)
    h, action = torch.randn(6, 5, requires_grad=True), torch.randn(6, 2, 3, requires_grad=True)
    critic(h, action, frozen=True).sum().backward()
    assert all(parameter.grad is None for parameter in critic.parameters())
    assert action.grad.abs().sum() > 0
    torch.testing.assert_close(critic(h, action, frozen=True), critic(h, action))


def test_rescale_changes_outputs_per_discount():
    scale, shift = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 3.0])
    h, action = torch.randn(6, 5), torch.randn(6, 3)
    table, value = shaken(ActionValues(5, 2, 4, SETTINGS)), shaken(ActionInput(5, 3, GAMMAS, SETTINGS))
    before = table(h), value(h, action)
    table.rescale(scale, shift)
    value.rescale(scale, shift)
    torch.testing.assert_close(table(h), before[0] * scale[:, None] + shift[:, None], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(value(h, action), before[1] * scale + shift, atol=1e-5, rtol=1e-5)


def test_the_acting_head_is_the_last():
    actor, h = Actor(5, 3, 4, ActorSettings(hidden=(6,))), torch.randn(2, 5)
    torch.testing.assert_close(actor.acting(h), actor(h)[:, -1])
