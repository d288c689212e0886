"""Targets worked out by hand: gamma .5 (and 0), values 100, 200, 400, 800."""

import torch

from pipelines.learning.objectives import n_step_targets, trace_targets

REWARD = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
VALUE = torch.tensor([[[100.0], [200.0], [400.0], [800.0]]])
ALIVE = torch.zeros(1, 4, dtype=torch.bool)
REAL = torch.ones(1, 4, dtype=torch.bool)
HALF = torch.tensor([0.5])


def targets(n, *, terminated=ALIVE, mask=REAL):
    return n_step_targets(REWARD, terminated, VALUE, HALF, mask, n=n)[0, :, 0].tolist()


def test_one_step():
    assert targets(1) == [1 + 50, 2 + 100, 4 + 200, 8 + 400]


def test_two_steps_shorten_at_the_end_of_the_window():
    assert targets(2) == [1 + 1 + 50, 2 + 2 + 100, 4 + 4 + 200, 8 + 400]


def test_three_steps():
    assert targets(3) == [1 + 1 + 1 + 50, 2 + 2 + 2 + 100, 4 + 4 + 200, 8 + 400]


def test_more_steps_than_the_window_sum_all_rewards():
    assert targets(9) == [1 + 1 + 1 + 1 + 50, 2 + 2 + 2 + 100, 4 + 4 + 200, 8 + 400]


def test_a_terminal_cuts_the_sum_and_the_bootstrap():
    terminated = torch.tensor([[False, True, False, False]])
    assert targets(1, terminated=terminated) == [51, 2, 204, 408]
    assert targets(3, terminated=terminated) == [1 + 1, 2, 4 + 4 + 200, 408]


def test_padding_ends_the_window():
    mask = torch.tensor([[True, True, False, False]])
    assert targets(3, mask=mask)[:2] == [1 + 1 + 50, 2 + 100]


def test_each_discount_by_itself():
    gammas = torch.tensor([0.0, 0.5])
    out = n_step_targets(REWARD, ALIVE, VALUE.expand(-1, -1, 2), gammas, REAL, n=2)
    assert out[0].tolist() == [[1, 52], [2, 104], [4, 208], [8, 408]]


def traced(share, *, q=VALUE, terminated=ALIVE, mask=REAL):
    trace = torch.full_like(VALUE, share)
    return trace_targets(REWARD, terminated, VALUE, q, trace, HALF, mask)[0, :, 0].tolist()


def test_traces_of_nothing_are_one_step_and_whole_ones_sum_all_rewards():
    assert traced(0.0) == targets(1)
    assert traced(1.0) == targets(9)


def test_half_a_trace_by_hand():
    """Q(lambda): y = r + (V + y') / 4 where both halve, from the back: 408; 4 + (400 + 408) / 4; ..."""
    assert traced(0.5) == [1 + (100 + 2 + (200 + 206) / 4) / 4, 2 + (200 + 206) / 4, 4 + (400 + 408) / 4, 408]


def test_a_trace_corrects_by_the_value_of_what_was_done():
    """y = r + (V + c (y' - Q)) / 2: with Q 100 above V the whole trace gives 50 less each time."""
    assert traced(1.0, q=VALUE + 100)[2:] == [4 + (400 + 408 - 500) / 2, 408]


def test_a_trace_ends_at_a_terminal_and_at_padding():
    terminated = torch.tensor([[False, True, False, False]])
    assert traced(1.0, terminated=terminated) == [1 + 1, 2, 4 + 4 + 200, 408]
    mask = torch.tensor([[True, True, False, False]])
    assert traced(1.0, mask=mask)[:2] == [1 + 1 + 50, 2 + 100]
