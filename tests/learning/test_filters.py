import math

import pytest
import torch

from pipelines.config.model import FilterSettings
from pipelines.errors import UsageError
from pipelines.learning.filters import advantage_filter

MASK = torch.ones(1, 3, 1, dtype=torch.bool)
ADVANTAGE = torch.tensor([[[-2.0], [0.0], [0.5]]])


def weights(kind, **options):
    return advantage_filter(FilterSettings(kind=kind, options=options))(ADVANTAGE, MASK).flatten().tolist()


def test_binary():
    assert weights("binary") == [0, 0, 1]


def test_exp():
    assert weights("exp", beta=2.0) == pytest.approx([math.exp(-4), 1, math.e])
    assert weights("exp", beta=2.0, low=0.5, high=2.0) == [0.5, 1, 2]
    assert advantage_filter(FilterSettings(kind="exp"))(torch.full((1, 1, 1), 1e9), MASK).item() == 20


def test_leaky_ramp():
    assert weights("leaky-ramp", offset=0.2, slope=0.05) == pytest.approx([0.1, 0.2, 0.7])
    assert weights("leaky-ramp", offset=0.2, slope=1.0, high=0.6) == pytest.approx([0, 0.2, 0.6])


def seen_only(advantage, mask, *, factor=1.0):
    return factor * mask.expand_as(advantage).float()


def test_a_users_filter_is_given_the_mask():
    chosen = advantage_filter(FilterSettings(kind=f"{__name__}:seen_only", options={"factor": 3}))
    mask = torch.tensor([[[True], [False], [True]]])
    assert chosen(ADVANTAGE, mask).flatten().tolist() == [3, 0, 3]


def test_an_option_that_a_filter_does_not_take_is_the_users_error():
    with pytest.raises(UsageError, match="unexpected keyword argument 'beat'"):
        advantage_filter(FilterSettings(kind="exp", options={"beat": 1.0}))
