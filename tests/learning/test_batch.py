import copy
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipelines.errors import IntegrityError
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.learning.batch import HostBatch, StepIndex, TensorBatch, list_tensors, require_choices
from tests.learning.factories import ACTIONS, OBSERVATION, agent, windows

SPACES = Spaces(observation=OBSERVATION, action=ACTIONS["discrete"])


def test_masks_follow_from_lengths_alone():
    source = windows(SPACES, lengths=(2, 4), rows=9)
    tensors = TensorBatch.from_numpy(source, SPACES)
    assert tensors.mask.tolist() == [[True, False, False], [True, True, True]]
    assert tensors.valid_rows.sum(1).tolist() == [2, 4]
    assert tensors.time[:, 0].tolist() == source.start.tolist()
    assert tensors.observation["obs"].shape == (2, 4, 3)  # cut to the longest window
    assert tensors.terminated.shape == (2, 3)


def test_the_last_time_is_that_of_a_valid_row():
    source = windows(SPACES, lengths=(2, 4), rows=9)
    source.start[:] = 7, 0  # the padding of the first window goes on to 10
    assert TensorBatch.from_numpy(source, SPACES).last_time == 8


def test_an_action_outside_its_space_is_damage_and_padding_is_not():
    source = windows(SPACES, lengths=(2, 4), rows=9)
    source.columns["action"][0, 3:] = 2**30
    require_choices(source, SPACES)
    source.columns["action"][0, 1] = 2**30
    with pytest.raises(IntegrityError, match="a value of 'action' is outside its space"):
        require_choices(source, SPACES)


def test_the_block_for_a_device_has_the_numbers_of_all_tensors():
    spaces = Spaces(
        observation={"obs": OBSERVATION["obs"], "image": Box(shape=(3, 5), dtype="uint8")}, action=Discrete(n=4)
    )
    source = windows(spaces, lengths=(2, 4, 3), rows=9, importance=np.array([1.0, 0.5, 0.25]))
    source.warm_up = np.array([1, 0, 2])
    tensors = TensorBatch.from_numpy(source, spaces)
    ready = HostBatch.of(source, tensors, torch.device("meta"))
    there = ready.block.clone()
    found = ready.find_in(there)
    ready.block.zero_()
    first, end = there.data_ptr(), there.data_ptr() + there.nbytes
    for ours, theirs in zip(list_tensors(found), list_tensors(tensors), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
        assert first <= ours.data_ptr() <= ours.data_ptr() + ours.nbytes <= end
        assert (ours.data_ptr() - first) % 256 == 0
    assert found.lengths == tensors.lengths
    assert found.last_time == tensors.last_time


def test_importance_weights_of_windows_stay_as_they_are():
    source = windows(SPACES, lengths=(2, 4), rows=9, importance=np.array([4.0, 2.0], np.float32))
    TensorBatch.from_numpy(source, SPACES).importance.zero_()
    assert source.importance.tolist() == [4, 2]


def test_steps_are_selected_as_by_their_mask():
    mask = torch.tensor([[True, False, True], [False, False, True]])
    index = StepIndex.of(mask)
    steps, rows = torch.randn(2, 3, 5), torch.randn(2, 4, 5, requires_grad=True)
    assert torch.equal(index.take(steps), steps[mask])
    assert torch.equal(index.take_before(rows), rows[:, :-1][mask])
    assert torch.equal(index.take_after(rows), rows[:, 1:][mask])
    scattered = index.scatter(steps[mask])
    assert torch.equal(scattered[mask], steps[mask])
    assert not scattered[~mask].any()
    weight = torch.randn(3, 5)
    (ours,) = torch.autograd.grad((index.take_before(rows) * weight).sum(), rows)
    (theirs,) = torch.autograd.grad((rows[:, :-1][mask] * weight).sum(), rows)
    assert torch.equal(ours, theirs)


@st.composite
def uneven(draw):
    lengths = draw(st.lists(st.integers(2, 33), min_size=2, max_size=12))
    source = windows(SPACES, lengths=tuple(lengths), rows=33, terminated=0.0)
    source.warm_up = draw(st.sampled_from([None, np.full(len(lengths), 3)]))
    return source


@given(uneven())
@hypothesis.settings(max_examples=200, deadline=None)
def test_rounded_batches_have_few_shapes_and_the_steps_of_others(source):
    plain = TensorBatch.from_numpy(source, SPACES)
    found = TensorBatch.from_numpy(source, SPACES, rounding=np.random.default_rng(0))
    steps, unit = plain.mask.shape[1], len(source.lengths)  # a 32nd of windows of 32 steps
    assert torch.equal(found.mask[:, :steps], plain.mask)
    assert not found.mask[:, steps:].any()
    if len(set(source.lengths.tolist())) == 1:
        assert found.mask.shape == plain.mask.shape
        assert len(found.valid) == len(plain.valid)
        return
    assert found.mask.shape[1] % 4 == 0
    assert found.mask.shape[1] - steps < 4
    assert len(found.valid) % unit == 0
    assert 0 <= len(found.valid) - len(plain.valid) < unit
    counted, all_counted = found.loss_mask[:, :steps], plain.loss_mask
    assert not (counted & ~all_counted).any()
    assert torch.equal(found.counted.step_N, found.loss_mask.flatten().nonzero()[:, 0])
    if all_counted.sum() < 4 * unit:
        assert torch.equal(counted, all_counted)
    else:
        assert len(found.counted) % unit == 0
        assert 0 <= len(plain.counted) - len(found.counted) < unit


@given(uneven())
@hypothesis.settings(max_examples=50, deadline=None)
def test_steps_that_are_repeated_change_no_value_of_a_batch(source):
    plain = TensorBatch.from_numpy(source, SPACES)
    found = TensorBatch.from_numpy(source, SPACES, rounding=np.random.default_rng(0))
    here, steps = found.valid, plain.mask.shape[1]
    for ours, theirs in (
        (here.scatter(here.take_after(found.reward)), plain.valid.scatter(plain.valid.take_after(plain.reward))),
        (here.scatter(here.take_before(found.reward)), plain.valid.scatter(plain.valid.take_before(plain.reward))),
        (here.scatter(here.take(found.terminated)), plain.valid.scatter(plain.valid.take(plain.terminated))),
    ):
        assert torch.equal(ours[:, :steps], theirs)
        assert not ours[:, steps:].any()


@pytest.mark.parametrize("trace", ["none", "peng", "tree-backup", "retrace", "vtrace"])
def test_the_loss_of_a_rounded_batch_is_that_of_its_steps(trace):
    owner = agent(trace=trace, critic={"subset": 2, "ensemble": 2}, sequence="gru")
    source = windows(owner.spaces, lengths=(33, 5, 20, 8, 2), rows=33, importance=np.array([1.0, 0.5, 0.2, 0.7, 0.9]))
    source.columns["logp"] = np.zeros(source.columns["reward"].shape, dtype=np.float32)
    found = TensorBatch.from_numpy(source, owner.spaces, logp=True, rounding=np.random.default_rng(0))
    plain = TensorBatch.from_numpy(source, owner.spaces, logp=True)
    assert len(found.counted) < len(plain.counted)
    plain = replace(plain, counted=StepIndex.of(found.loss_mask[:, : plain.mask.shape[1]].contiguous()))
    results = []
    for each in (found, plain):
        copied = copy.deepcopy(owner)
        loss, metrics = copied.loss(each, torch.Generator().manual_seed(0))
        loss.backward()
        results.append([metrics, *(parameter.grad for parameter in copied.parameters() if parameter.grad is not None)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6, equal_nan=True)
