"""Losses of critic outputs: their gradients, written by hand, against autograd's."""

import pytest
import torch
from torch.nn import functional as F

from pipelines.config.model import CriticSettings
from pipelines.learning.objectives import cross_entropy, squared_error
from pipelines.nets.critic import TwoHot


def test_the_gradient_of_the_squared_error_is_that_of_autograd():
    value, target, scale = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3), torch.rand(5, 1)
    loss, slope = squared_error(value, target, scale)
    torch.testing.assert_close(loss, (F.mse_loss(value, target, reduction="none") * scale).sum())
    torch.testing.assert_close(slope.detach(), *torch.autograd.grad(loss, value))


@pytest.mark.parametrize("labels", ["two-hot", "hl-gauss"])
@pytest.mark.parametrize("symlog", [True, False])
def test_the_gradient_of_the_cross_entropy_is_that_of_autograd(labels, symlog):
    readout = TwoHot(CriticSettings(kind="two-hot", bins=11, low=-20, high=20, labels=labels, symlog=symlog))
    logits, target = torch.randn(2, 7, 11, requires_grad=True), torch.tensor([0.0, 1.0, -3.3, 19.9, 50.0, -50.0, 7.0])
    scale = torch.rand(7, 1)
    loss, value, slope = cross_entropy(readout, logits.detach().clone(), target, scale)
    expected = -(scale * readout.labels(target) * logits.log_softmax(-1)).sum()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(value, readout.decode(logits.detach().softmax(-1)))
    torch.testing.assert_close(slope, *torch.autograd.grad(expected, logits))
