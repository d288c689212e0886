import torch

from pipelines.learning.objectives import draw, reduce


def test_members_are_drawn_without_replacement_and_evenly():
    drawn = draw(torch.rand(4, 6000, generator=torch.Generator().manual_seed(0)), 2)
    assert (drawn[0] != drawn[1]).all()
    counts = torch.bincount(drawn.flatten(), minlength=4) / 6000
    torch.testing.assert_close(counts, torch.full((4,), 0.5), atol=0.03, rtol=0)


def test_each_place_has_its_own_draw():
    assert len(draw(torch.rand(4, 50), 2).T.unique(dim=0)) > 5


def test_minimum_and_mean_of_the_drawn():
    values = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 5.0]])
    drawn = torch.tensor([[0, 1], [2, 2]])
    assert reduce(values, drawn, "min").tolist() == [1, 5]
    assert reduce(values, drawn, "mean").tolist() == [2, 12.5]
