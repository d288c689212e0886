"""The importance of windows: what their loss is multiplied by; and the TD errors that priorities follow."""

import copy

import numpy as np
import pytest
import torch

from tests.learning.factories import ACTIONS, agent, batch
from tests.learning.test_agent import generator, gradients


def losses(owner, importance):
    """Loss, metrics and gradients of one batch for windows of this importance, from the same state each time."""
    fresh = copy.deepcopy(owner)
    loss, metrics = fresh.loss(batch(fresh, importance=importance), generator())
    loss.backward()
    return loss.detach(), metrics, gradients(fresh)


@pytest.mark.parametrize("action", ACTIONS)
def test_the_loss_is_linear_in_importance_and_ones_change_nothing(action):
    owner = agent(action)
    plain, _, plain_gradients = losses(owner, None)
    whole, _, _ = losses(owner, np.ones(6))
    torch.testing.assert_close(whole, plain)
    weights = np.array([0.0, 1.0, 0.25, 0.5, 0.0, 1.0])
    singles = [losses(owner, row) for row in np.eye(6)]
    torch.testing.assert_close(sum(loss for loss, _, _ in singles), plain, rtol=1e-4, atol=1e-5)
    mixed, _, mixed_gradients = losses(owner, weights)
    expected = sum(w * loss for w, (loss, _, _) in zip(weights, singles, strict=True))
    torch.testing.assert_close(mixed.double(), torch.as_tensor(expected).double(), rtol=1e-4, atol=1e-5)
    for name, gradient in mixed_gradients.items():
        if gradient is None:
            assert plain_gradients[name] is None
            continue
        parts = [w * single[name] for w, (_, _, single) in zip(weights, singles, strict=True)]
        torch.testing.assert_close(gradient, sum(parts).float(), rtol=1e-3, atol=1e-5, msg=name)


def test_errors_of_windows_average_to_that_of_the_batch():
    owner = agent()
    data = batch(owner, importance=np.linspace(0.1, 1, 6))
    _, metrics = owner.loss(data, generator())
    assert metrics["td_errors"].shape == (6,)
    assert not metrics["td_errors"].requires_grad
    steps = data.mask.sum(1)
    torch.testing.assert_close((metrics["td_errors"] * steps).sum() / steps.sum(), metrics["td_error"])


def test_the_error_of_a_window_is_that_of_a_batch_of_it_alone():
    owner = agent(sequence="identity", gammas=[])
    lengths = (9, 4)
    data = batch(owner, lengths=lengths, importance=np.ones(2))
    _, metrics = copy.deepcopy(owner).loss(data, generator())
    whole = copy.deepcopy(owner)
    whole._update_statistics([data])
    h = whole.encode(data)
    target = whole.targets(data, h.detach(), generator())
    whole._update_popart(target)
    state, action = h[:, :-1][data.mask], data.action[:, 1:][data.mask]
    _, data = whole.heads.critic_loss(state, action, target, torch.ones(11))
    value = whole.reward_units(data.q_CNG)[..., -1]
    error = (value - target[:, -1] / owner.settings.reward_scale).abs().mean(0)
    torch.testing.assert_close(metrics["td_errors"], torch.stack([error[:8].mean(), error[8:].mean()]).detach())


def test_without_importance_nothing_is_computed_for_windows():
    owner = agent()
    assert "td_errors" not in owner.loss(batch(owner), generator())[1]
