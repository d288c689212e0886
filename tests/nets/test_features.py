import torch

from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Ragged
from pipelines.nets.features import features


def test_choices_become_one_hot_also_above_255():
    out = features(torch.tensor([[0], [299]], dtype=torch.int32), Discrete(n=300))
    assert out.shape == (2, 1, 300)
    assert out.sum() == 2
    assert out[0, 0, 0] == out[1, 0, 299] == 1


def test_places_of_a_vector_have_a_block_each():
    out = features(torch.tensor([[1, 0, 3]], dtype=torch.int32), MultiDiscrete(nvec=(2, 3, 4)))
    assert out.tolist() == [[0, 1, 1, 0, 0, 0, 0, 0, 1]]


def test_numbers_and_bits_stay():
    assert features(torch.tensor([[1, 0]], dtype=torch.uint8), MultiBinary(n=2)).tolist() == [[1.0, 0.0]]
    assert features(torch.arange(8).view(2, 2, 2), Box(shape=(2, 2))).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert features(torch.tensor([5.0, 6.0]), Box(shape=())).tolist() == [[5.0], [6.0]]


def test_a_sequence_is_its_numbers_scaled():
    out = features(torch.tensor([[100, 50, 0]], dtype=torch.uint8), Ragged(max_length=3, dtype="uint8", scale=100.0))
    assert out.tolist() == [[1.0, 0.5, 0.0]]
