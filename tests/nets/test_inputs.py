from itertools import pairwise

import pytest
import torch

from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Ragged
from pipelines.nets.inputs import RunningNorm, symlog, to_features


def test_symlog_by_hand():
    x = torch.tensor([0.0, 1.0, -1.0, 99.0])
    torch.testing.assert_close(symlog(x), torch.tensor([0.0, 0.693147, -0.693147, 4.605170]))


def test_first_update_sets_the_moments_to_the_batch():
    norm = RunningNorm(2, rate=1e-4)
    norm.update(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    torch.testing.assert_close(norm.mean, torch.tensor([2.0, 5.0]))
    out = norm(torch.tensor([[3.0, 5.02], [2.5, 5.0]]))
    torch.testing.assert_close(out, torch.tensor([[1.0, 2.0], [0.5, 0.0]]), atol=1e-3, rtol=0)  # by 1, and by .01


def test_inputs_pass_unchanged_before_the_first_update():
    norm = RunningNorm(3, rate=1e-4)
    x = torch.tensor([[-3.0, 0.0, 0.5]])
    assert torch.equal(norm(x), x)


def test_standardised_inputs_are_clamped_to_the_limit():
    x = torch.tensor([[-30.0, 4.0]])
    for limit, expected in ((10.0, [[-10.0, 4.0]]), (1e4, [[-30.0, 4.0]]), (2.0, [[-2.0, 2.0]])):
        torch.testing.assert_close(RunningNorm(2, rate=1e-4, limit=limit)(x), torch.tensor(expected))


def test_a_feature_is_continuous_in_its_deviation():
    """Two rows at mean 1, a deviation apart: what a fixed input becomes as the deviation passes .01."""
    x = torch.tensor([[1.02]])
    seen = []
    for sigma in torch.logspace(-4, 0, 200).tolist():
        norm = RunningNorm(1, rate=1e-4)
        norm.update(torch.tensor([[1 - sigma], [1 + sigma]]))
        seen.append(norm(x).item())
    assert max(abs(a - b) for a, b in pairwise(seen)) < 0.15
    assert seen[0] == pytest.approx(2.0, abs=0.01)
    assert seen[-1] == pytest.approx(0.02, abs=0.01)


def test_second_update_averages_with_the_first():
    norm = RunningNorm(1, rate=0.5)
    norm.update(torch.tensor([[0.0], [4.0]]))
    norm.update(torch.tensor([[8.0]]))
    # step = .5 / (1 - .25) = 2/3
    assert norm.mean.item() == pytest.approx(2 / 3 + 8 * 2 / 3)
    assert norm.square.item() == pytest.approx(8 / 3 + 64 * 2 / 3)


def test_forward_is_pure_and_clamped():
    norm = RunningNorm(1, rate=0.1)
    norm.update(torch.tensor([[-0.02], [0.02]]))
    before = norm.state_dict()["mean"].clone()
    assert norm(torch.tensor([[1e9], [-1e9], [0.05]])).flatten().tolist() == [10.0, -10.0, pytest.approx(2.5)]
    assert torch.equal(norm.mean, before)


def test_choices_become_one_hot_also_above_255():
    out = to_features(torch.tensor([[0], [299]], dtype=torch.int32), Discrete(n=300))
    assert out.shape == (2, 1, 300)
    assert out.sum() == 2
    assert out[0, 0, 0] == out[1, 0, 299] == 1


def test_places_of_a_vector_have_a_block_each():
    out = to_features(torch.tensor([[1, 0, 3]], dtype=torch.int32), MultiDiscrete(nvec=(2, 3, 4)))
    assert out.tolist() == [[0, 1, 1, 0, 0, 0, 0, 0, 1]]


def test_numbers_and_bits_stay():
    assert to_features(torch.tensor([[1, 0]], dtype=torch.uint8), MultiBinary(n=2)).tolist() == [[1.0, 0.0]]
    assert to_features(torch.arange(8).view(2, 2, 2), Box(shape=(2, 2))).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert to_features(torch.tensor([5.0, 6.0]), Box(shape=())).tolist() == [[5.0], [6.0]]


def test_a_sequence_is_its_numbers_scaled():
    out = to_features(torch.tensor([[100, 50, 0]], dtype=torch.uint8), Ragged(max_length=3, dtype="uint8", scale=100.0))
    assert out.tolist() == [[1.0, 0.5, 0.0]]
