"""Steps that are seen but do not count: burn-in, and a column that says so. One mask serves both."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipelines.errors import UsageError
from pipelines.lake.spaces import Box, Discrete, MultiBinary, Spaces
from pipelines.learning.batch import StepIndex, TensorBatch, require_mask
from pipelines.learning.diagnostics import inspect
from tests.learning.factories import ACTIONS, OBSERVATION, agent, batch, split, windows
from tests.learning.test_agent import generator, gradients, in_parts

SPACES = Spaces(observation=OBSERVATION, action=ACTIONS["discrete"])
# No randomness in a step's loss, and no statistics: the loss is a plain mean over steps.
PLAIN = {"critic": {"hidden": [8], "ensemble": 2, "subset": 2}, "popart": {"enabled": False}}


def made(**changes):
    owner = agent("discrete", sequence="gru", **(PLAIN | changes))
    noise = torch.Generator().manual_seed(1)
    for parameter in owner.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=noise)
    return owner


def masked(data, counted):
    return replace(data, counted=StepIndex.of(data.mask & counted))


def test_steps_that_warm_up_a_memory_do_not_count():
    source = windows(SPACES, lengths=(5, 5, 3, 2), rows=5)
    source.start[:] = [0, 7, 1, 4]
    source.warm_up = np.array([0, 2, 2, 2])
    data = TensorBatch.from_numpy(source, SPACES)
    assert data.mask.int().tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert data.loss_mask.int().tolist() == [[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert data.valid_rows.sum(1).tolist() == [5, 5, 3, 2]
    source.warm_up = None
    plain = TensorBatch.from_numpy(source, SPACES)
    assert torch.equal(plain.loss_mask, plain.mask)


@pytest.mark.parametrize("space", [Box(shape=()), Box(shape=(1,)), Discrete(n=3), MultiBinary(n=1)], ids=str)
def test_a_step_counts_where_what_it_observes_in_the_column_is_not_zero(space):
    spaces = Spaces(observation=OBSERVATION | {"obs.counts": space}, action=ACTIONS["discrete"])
    require_mask("train.loss_mask", "obs.counts", spaces)
    source = windows(spaces, lengths=(5, 4), rows=5)
    column = source.columns["obs.counts"]
    column[:] = np.array([[1, 0, 0, 1, 1], [0, 1, 1, 0, 0]]).reshape(column.shape)
    source.start[:] = [0, 3]
    data = TensorBatch.from_numpy(source, spaces, loss_mask="obs.counts")
    assert data.loss_mask.int().tolist() == [[1, 0, 0, 1], [0, 1, 1, 0]]
    source.warm_up = np.array([0, 2])
    both = TensorBatch.from_numpy(source, spaces, loss_mask="obs.counts")
    assert both.loss_mask.int().tolist() == [[1, 0, 0, 1], [0, 0, 1, 0]]


def test_an_actor_mask_is_read_from_its_column_beside_all_other_masks():
    spaces = Spaces(
        observation=OBSERVATION | {"obs.counts": Discrete(n=2), "obs.taught": Box(shape=(1,))},
        action=ACTIONS["discrete"],
    )
    source = windows(spaces, lengths=(5, 4), rows=5)
    source.start[:] = [0, 3]
    source.columns["obs.counts"][:] = np.array([[1, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    source.columns["obs.taught"][..., 0] = np.array([[1, 1, 0, 1, 0], [1, 0, 1, 1, 1]])
    alone = TensorBatch.from_numpy(source, spaces, actor_mask="obs.taught")
    assert alone.loss_mask.equal(alone.mask)
    assert alone.actor_counted.mask_BT.int().tolist() == [[1, 1, 0, 1], [1, 0, 1, 0]]
    source.warm_up, source.cut_off = np.array([0, 1]), np.array([[False] * 3 + [True], [False] * 4])
    both = TensorBatch.from_numpy(source, spaces, loss_mask="obs.counts", actor_mask="obs.taught")
    assert both.mask.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 0]]
    assert both.loss_mask.int().tolist() == [[1, 0, 1, 0], [0, 1, 1, 0]]
    assert both.actor_counted.mask_BT.int().tolist() == [[1, 0, 0, 0], [0, 0, 1, 0]]
    assert both.actor_counted.step_N.tolist() == [0, 6]
    assert [part.actor_counted.mask_BT.int().tolist() for part in split(both, 2)] == [[[1, 0, 0, 0]], [[0, 0, 1, 0]]]
    assert TensorBatch.from_numpy(source, spaces).actor_counted is None


def taught(data, mask):
    return replace(data, actor_counted=StepIndex.of(data.mask & mask))


@pytest.mark.parametrize("changes", [{}, {"filter": {"kind": "exp"}}, {"entropy_weight": 0.3}])
def test_an_actor_mask_changes_the_policys_terms_and_not_the_critics(changes):
    """The policy's terms are what they would be if the other steps did not count, the critics' what they were."""
    plain = made(**changes)
    only, fewer = copy.deepcopy(plain), copy.deepcopy(plain)
    data = batch(plain)
    half = torch.rand(data.mask.shape, generator=generator()) < 0.5
    metrics = []
    for owner, each in ((plain, data), (only, taught(data, half)), (fewer, masked(data, half))):
        loss, found = owner.loss(each, generator())
        loss.backward()
        metrics.append(found)
    assert torch.equal(metrics[1]["critic_loss"], metrics[0]["critic_loss"])
    for name in ("actor_loss", *(["entropy_loss"] if "entropy_weight" in changes else [])):
        torch.testing.assert_close(metrics[1][name], metrics[2][name])
        assert metrics[1][name].item() != pytest.approx(metrics[0][name].item(), rel=1e-3)
    before, after, without = gradients(plain), gradients(only), gradients(fewer)
    for name in before:
        if name.startswith("heads.critic"):
            assert torch.equal(after[name], before[name]), name
        elif name.startswith("heads.actor"):
            torch.testing.assert_close(after[name], without[name], rtol=1e-4, atol=1e-6)
            assert not torch.allclose(after[name], before[name], rtol=1e-3, atol=1e-6), name


def test_an_adjusted_entropy_weight_follows_the_entropy_of_the_steps_that_teach_the_policy():
    plain = agent("box", sequence="gru", entropy_weight="auto")
    only, fewer = copy.deepcopy(plain), copy.deepcopy(plain)
    data = batch(plain)
    likely = plain.heads.policy.action_entropy(plain.heads.actor(plain.encode(data)))[:, :-1, -1]
    half = likely > likely[data.mask].median()
    for owner, each in ((plain, data), (only, taught(data, half)), (fewer, masked(data, half))):
        owner.loss(each, generator())
    torch.testing.assert_close(only.temperature.state_dict(), fewer.temperature.state_dict())
    assert not torch.equal(only.temperature.weight_G, plain.temperature.weight_G)


def test_an_actor_mask_that_covers_all_steps_changes_no_bit_and_one_of_none_teaches_critics_alone():
    plain = made()
    every, none = copy.deepcopy(plain), copy.deepcopy(plain)
    data = batch(plain)
    found = []
    for owner, each in ((plain, data), (every, taught(data, data.mask)), (none, taught(data, ~data.mask))):
        loss, metrics = owner.loss(each, generator())
        loss.backward()
        found.append(metrics)
    assert torch.equal(found[1]["loss"], found[0]["loss"])
    for name, grad in gradients(plain).items():
        assert torch.equal(gradients(every)[name], grad), name
    assert found[2]["actor_loss"].item() == 0.0
    assert torch.equal(found[2]["critic_loss"], found[0]["critic_loss"])
    assert not any(grad.any() for name, grad in gradients(none).items() if name.startswith("heads.actor"))


def test_micro_batches_with_an_actor_mask_add_up():
    whole = made()
    parts = copy.deepcopy(whole)
    data = batch(whole, lengths=(9, 4, 9, 2))
    data = taught(data, torch.tensor([True, False, False, False])[:, None])  # the second half teaches critics alone
    loss, _ = whole.loss(data, generator())
    loss.backward()
    for each, _ in parts.losses(*in_parts(data, 2)):
        each.backward()
    for name, grad in gradients(whole).items():
        torch.testing.assert_close(gradients(parts)[name], grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("column", ["obs.missing", "obs"])
def test_a_column_that_cannot_say_it_is_refused(column):
    with pytest.raises(UsageError, match="not an observation of one number"):
        require_mask("train.loss_mask", column, SPACES)


@pytest.mark.parametrize("changes", [{}, {"n_step": 3}, {"kind": "behaviour-cloning"}, {"filter": {"kind": "exp"}}])
def test_losses_and_gradients_of_two_masks_add_up_to_those_of_both(changes):
    whole = made(**changes)
    first, second = copy.deepcopy(whole), copy.deepcopy(whole)
    data = batch(whole)
    half = torch.rand(data.mask.shape, generator=generator()) < 0.5
    parts = masked(data, half), masked(data, ~half)
    count = [int(part.loss_mask.sum()) for part in (data, *parts)]
    assert min(count) > 5
    losses = [
        owner.loss(each, generator())[0] for owner, each in zip((whole, first, second), (data, *parts), strict=True)
    ]
    for loss in losses:
        loss.backward()
    total, ours, theirs = (loss.item() * n for loss, n in zip(losses, count, strict=True))
    assert total == pytest.approx(ours + theirs, rel=1e-5)
    mine, others = gradients(first), gradients(second)
    for name, grad in gradients(whole).items():
        torch.testing.assert_close(
            mine[name] * count[1] + others[name] * count[2], grad * count[0], rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("action", ["discrete", "box"])
def test_targets_of_the_steps_that_count_are_summed_over_and_bootstrapped_from_all_valid_steps(action, n_step):
    owner = agent(action, sequence="gru", n_step=n_step)
    data = batch(owner)
    half = torch.rand(data.mask.shape, generator=generator()) < 0.5
    h = owner.encode(data).detach()
    expected = owner.targets(data, h, generator())[half[data.mask]]
    assert torch.equal(owner.targets(masked(data, half), h, generator()), expected)


def test_statistics_are_of_the_targets_that_count():
    owner = agent("discrete", sequence="gru")
    data = batch(owner)
    data = masked(data, torch.arange(data.mask.shape[1]) >= 2)
    owner.eval()
    copied = copy.deepcopy(owner)
    copied._update_statistics([data])
    target = copied.targets(data, copied.encode(data).detach(), generator())
    owner.loss(data, generator())
    torch.testing.assert_close(owner.popart.mu_G, target.mean(0))


def test_steps_that_do_not_count_are_seen_by_those_that_do():
    """Burn-in gives a memory: what is observed in it matters to the loss, and has a gradient."""
    owner = made()
    source = windows(owner.spaces, lengths=(6,), rows=6)
    source.start[:], source.warm_up = 4, np.array([3])
    data = TensorBatch.from_numpy(source, owner.spaces)
    observed = data.observation["obs"].requires_grad_()
    owner.loss(data, generator())[0].backward()
    assert (observed.grad[0, :3].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("kind", ["actor-critic", "multi-task", "behaviour-cloning"])
@pytest.mark.parametrize("action", ["discrete", "box", "multi_discrete"])
def test_a_micro_batch_of_which_no_step_counts_adds_nothing(action, kind):
    whole = agent(action, sequence="gru", kind=kind)
    parts = copy.deepcopy(whole)
    data = batch(whole, lengths=(9, 4, 9, 2))
    data = masked(data, torch.tensor([True, True, False, False])[:, None])
    loss, metrics = whole.loss(data, generator())
    loss.backward()
    summed = {}
    for part_loss, part_metrics in parts.losses(*in_parts(data, 2)):
        part_loss.backward()
        summed = {name: summed.get(name, 0) + value for name, value in part_metrics.items()}
    if kind == "behaviour-cloning" or action == "discrete":  # else actions are drawn for targets in another order
        torch.testing.assert_close(summed, metrics, rtol=1e-4, atol=1e-5)
    assert all(torch.isfinite(value) for value in summed.values())
    assert all(torch.isfinite(grad).all() for grad in gradients(parts).values())


@pytest.mark.parametrize("kind", ["actor-critic", "multi-task", "behaviour-cloning"])
@pytest.mark.parametrize("action", ["discrete", "box"])
def test_where_no_step_counts_there_is_nothing_to_learn(action, kind):
    owner = agent(action, sequence="gru", kind=kind)
    data = batch(owner)
    loss, metrics = owner.loss(masked(data, torch.tensor(False)), generator())
    loss.backward()
    assert loss.item() == 0.0
    assert all(torch.isfinite(value) for value in metrics.values())
    assert not any(grad.any() for grad in gradients(owner).values() if grad is not None)
    if owner.popart is not None:
        assert int(owner.popart.updates) == 0


def seen_mask(advantage, mask):
    assert mask.sum() == 3
    return torch.ones_like(advantage)


def seen_mask_by_a_loss(states, data, mask):
    assert mask.sum() == 3
    return torch.ones(mask.shape)


def test_filters_and_losses_of_ones_own_are_told_what_counts():
    name = __name__
    owner = agent(filter={"kind": f"{name}:seen_mask"}, auxiliary_losses=[{"kind": f"{name}:seen_mask_by_a_loss"}])
    data = batch(owner)
    counted = torch.zeros_like(data.mask)
    counted[0, 1:4] = True
    assert owner.loss(masked(data, counted), generator())[1]["auxiliary_loss_0"].item() == 1.0


def test_td_errors_are_means_over_the_steps_that_count_and_nan_where_none_does():
    owner = made()
    data = batch(owner, lengths=(9, 4), importance=np.ones(2))
    counted = torch.zeros_like(data.mask)
    counted[0, 3] = True
    errors = owner.loss(masked(data, counted), generator())[1]["td_errors"]
    assert torch.isfinite(errors[0])
    assert torch.isnan(errors[1])


def test_inspection_is_of_every_valid_step():
    owner = made()
    data = batch(owner)
    found, expected = inspect(owner, masked(data, torch.tensor(False))), inspect(owner, data)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
