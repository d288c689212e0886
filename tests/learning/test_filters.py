import math

import numpy as np
import pytest
import torch

from pipelines.config.model import FilterSettings
from pipelines.errors import UsageError
from pipelines.learning.diagnostics import inspect
from pipelines.learning.objectives import advantage_filter
from tests.learning.factories import agent, batch

MASK = torch.ones(1, 3, 1, dtype=torch.bool)
ADVANTAGE = torch.tensor([[[-2.0], [0.0], [0.5]]])


def weights(kind, **options):
    return advantage_filter(FilterSettings(kind=kind, options=options))(ADVANTAGE, MASK).flatten().tolist()


def test_binary():
    assert weights("binary") == [0, 0, 1]
    assert weights("binary", threshold=0.5) == [0, 0, 0]
    assert weights("binary", threshold=-1.0) == [0, 1, 1]


def test_exp():
    assert weights("exp", beta=2.0) == pytest.approx([math.exp(-4), 1, math.e])
    assert weights("exp", clip_weights_low=0.5, clip_weights_high=1.5) == [0.5, 1, 1.5]
    assert weights("exp", clip_adv_low=-1.0, clip_adv_high=0.25) == pytest.approx([math.exp(-1), 1, math.exp(0.25)])
    assert math.isfinite(advantage_filter(FilterSettings(kind="exp"))(torch.full((1, 1, 1), 1e9), MASK).item())


def test_leaky_relu_by_hand():
    """bias = .01 + .05 * .01 / 2 = .01025; below tau a twentieth of the slope 1 / 2; better than nothing adds 1."""
    clipped, at_zero = 1e-7, 0.01
    above = 0.01025 + (0.5 - 0.01) / 2
    assert weights("leaky-relu", add_binary=0) == pytest.approx([clipped, at_zero, above])
    assert weights("leaky-relu") == pytest.approx([clipped, at_zero, 1 + above])
    below = 0.01025 + 0.05 * (-2 - 0.01) / 2
    free = weights("leaky-relu", clip_weights_low=-1.0, clip_weights_high=0.2, add_binary=0)
    assert free == pytest.approx([below, at_zero, 0.2])


@pytest.mark.parametrize("changes", [{}, {"kind": "multi-task"}], ids=["scalar", "two-hot"])
def test_filters_see_the_advantages_that_inspection_reports(changes):
    """In the environment's reward units, whatever critics compute in."""
    owner = agent(filter={"kind": "exp", "options": {"beta": 0.5}}, reward_scale=4.0, **changes)
    data = batch(owner)
    owner.loss(data)
    figures = inspect(owner, data)
    assert np.nanmax(np.abs(figures["advantage"])) > 1e-4
    np.testing.assert_allclose(figures["weight"], np.exp(0.5 * figures["advantage"]), rtol=1e-5)


def test_small_advantages_of_large_values_keep_their_sign_in_inspection():
    owner = agent()
    data = batch(owner)
    owner.loss(data)
    owner.popart.mu_G += 1e6  # float32 has no more than .06 to tell values apart there
    figures = inspect(owner, data)
    real = figures["mask"]
    assert 0 < figures["weight"][real].mean() < 1
    np.testing.assert_array_equal(figures["weight"][real], figures["advantage"][real] > 0)


def seen_only(advantage, mask, *, factor=1.0):
    return factor * mask.expand_as(advantage).float()


def test_a_users_filter_is_given_the_mask():
    chosen = advantage_filter(FilterSettings(kind=f"{__name__}:seen_only", options={"factor": 3}))
    mask = torch.tensor([[[True], [False], [True]]])
    assert chosen(ADVANTAGE, mask).flatten().tolist() == [3, 0, 3]


def test_an_option_that_a_filter_does_not_take_is_the_users_error():
    with pytest.raises(UsageError, match="unexpected keyword argument 'beat'"):
        advantage_filter(FilterSettings(kind="exp", options={"beat": 1.0}))
