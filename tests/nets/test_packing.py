from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipelines.nets.packing import Packing


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 3))
def test_every_token_has_a_place_and_comes_back(lengths, padding):
    time = max(lengths) + padding
    packing = Packing(lengths, time=time)
    tokens = torch.arange(len(lengths) * time).view(len(lengths), time)
    real = torch.arange(time) < torch.tensor(lengths)[:, None]
    rows = packing.pack(tokens)
    assert sorted(rows[packing.real_RW].tolist()) == tokens[real].tolist()
    assert torch.equal(packing.unpack(rows)[real], tokens[real])
    for row, document in zip(rows, packing.document_RW, strict=True):
        for window in set(document.tolist()) - {-1}:
            places = (document == window).nonzero()[:, 0]
            assert row[places].tolist() == tokens[window, : lengths[window]].tolist()  # in order, at one piece
            assert places.tolist() == list(range(int(places[0]), int(places[0]) + lengths[window]))
        assert (document >= 0).int().diff().le(0).all()  # what is empty ends the row


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_the_forms_that_kernels_take_agree(lengths):
    packing = Packing(lengths, time=max(lengths))
    documents = packing.document_RW[packing.real_RW].tolist()
    ends = packing.cumulative.tolist()
    for (first, last), window in zip(pairwise(ends), dict.fromkeys(documents), strict=True):
        assert documents[first:last] == [window] * lengths[window]
    places, sizes = packing.by_age
    by_age = list(zip(packing.age_RW.flatten()[places].tolist(), sizes.repeat_interleave(sizes).tolist(), strict=True))
    assert [age for age, _ in by_age] == sorted(age for age, _ in by_age)
    assert sizes.tolist() == [sum(length > age for length in lengths) for age in range(max(lengths))]
    chosen = packing.document_RW.flatten()[places].tolist()
    order = chosen[: len(lengths)]
    position = 0
    for size in sizes.tolist():  # the documents that are left, always in the same order
        assert chosen[position : position + size] == order[:size]
        position += size


def test_rows_are_few():
    packing = Packing([5, 1, 4, 2, 3], time=5)
    assert packing.document_RW.tolist() == [[0] * 5, [2, 2, 2, 2, 1], [4, 4, 4, 3, 3]]


def test_windows_of_one_length_are_left_alone():
    assert Packing.of([6] * 4, torch.ones(4, 6)) is None
