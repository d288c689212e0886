import pytest
import torch

from pipelines.errors import IntegrityError
from pipelines.lake.spaces import Spaces
from pipelines.learning.batch import StepIndex, TensorBatch, require_choices
from tests.learning.factories import ACTIONS, OBSERVATION, windows

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


def test_split_gives_back_all_windows():
    tensors = TensorBatch.from_numpy(windows(SPACES), SPACES)
    parts = tensors.split(4)
    assert [len(part.mask) for part in parts] == [2, 2, 1, 1]
    assert torch.equal(torch.cat([part.action for part in parts]), tensors.action)
    assert torch.equal(torch.cat([part.observation["obs"] for part in parts]), tensors.observation["obs"])
    with pytest.raises(ValueError, match="6 windows into 7 parts"):
        tensors.split(7)


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
