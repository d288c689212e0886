import pytest
import torch

from pipelines.nets.norms import RunningNorm, symlog


def test_symlog_by_hand():
    x = torch.tensor([0.0, 1.0, -1.0, 99.0])
    torch.testing.assert_close(symlog(x), torch.tensor([0.0, 0.693147, -0.693147, 4.605170]))


def test_first_update_sets_the_moments_to_the_batch():
    norm = RunningNorm(2, rate=1e-4)
    norm.update(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    torch.testing.assert_close(norm.mean, torch.tensor([2.0, 5.0]))
    out = norm(torch.tensor([[3.0, 7.0]]))
    torch.testing.assert_close(out, torch.tensor([[1.0, 7.0]]))  # the second never varied: it passes unchanged


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
    assert norm(torch.tensor([[1e9]])).item() == 1e4
    assert torch.equal(norm.mean, before)
