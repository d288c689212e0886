"""The oracles of an update. Small networks, random windows of unequal lengths."""

import copy
from dataclasses import replace

import pytest
import torch

from pipelines.lake.spaces import Box, Discrete, MultiBinary, Spaces
from pipelines.learning.batch import StepIndex, TensorBatch
from pipelines.learning.objectives import draw, reduce
from tests.learning.factories import ACTIONS, SEQUENCES, agent, batch, padded, split, windows
from tests.tiers import crossed


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def in_parts(data, parts, seed=0):
    """Micro-batches, and one generator that all of them draw from: together they draw what the whole batch does."""
    shared = generator(seed)
    return split(data, parts), [shared] * parts


def gradients(owner):
    return {name: p.grad for name, p in owner.named_parameters() if p.requires_grad}


def update(owner, data, seed=0):
    """One whole update; returns the metrics."""
    optimizer = torch.optim.AdamW(owner.trainable_parameters().values(), lr=1e-3)
    optimizer.zero_grad()
    loss, metrics = owner.loss(data, generator(seed))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(owner.trainable_parameters().values(), 1.0)
    optimizer.step()
    owner.update_targets()
    return metrics


@pytest.mark.parametrize(("action", "sequence"), crossed([*ACTIONS], [*SEQUENCES]))
def test_an_update_on_every_action_space_and_sequence_encoder(action, sequence):
    owner = agent(action, sequence=sequence)
    before = copy.deepcopy(owner.state_dict())
    metrics = update(owner, batch(owner))
    assert all(torch.isfinite(value) for value in metrics.values())
    assert not any(value.requires_grad for value in metrics.values())
    unmoved = [n for n, p in owner.named_parameters() if torch.equal(p, before[n])]
    assert unmoved == []


def test_an_update_with_images_and_everything_else():
    observation = {
        "obs.image": Box(shape=(6, 6, 3), dtype="uint8"),
        "obs.room": Discrete(n=300),
        "obs.keys": MultiBinary(n=2),
        "obs.place": Box(shape=(2,), dtype="float64"),
    }
    owner = agent(observation=observation)
    assert torch.isfinite(update(owner, batch(owner))["loss"])


@pytest.mark.parametrize(("action", "n_step"), crossed(["discrete", "box"], [1, 3]))
def test_padding_changes_no_loss_and_no_gradient(action, n_step):
    results = []
    for extra in (0, 5):
        owner = agent(action, n_step=n_step)
        source = padded(windows(owner.spaces), extra) if extra else windows(owner.spaces)
        data = TensorBatch.from_numpy(source, owner.spaces)
        if extra:  # padding is cut by from_numpy: put it back by one full window whose steps are then masked
            data = _uncut(source, owner.spaces)
        loss, metrics = owner.loss(data, generator())
        loss.backward()
        results.append((loss.detach(), gradients(owner), metrics, owner.timestep.norm.mean))
    (loss, grads, metrics, mean), (loss_p, grads_p, metrics_p, mean_p) = results
    torch.testing.assert_close(loss_p, loss)
    torch.testing.assert_close(mean_p, mean)
    for name in grads:
        torch.testing.assert_close(grads_p[name], grads[name], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(metrics_p, metrics)


def _uncut(source, spaces):
    whole = copy.copy(source)
    whole.lengths = source.lengths * 0 + source.columns["reward"].shape[1]
    data = TensorBatch.from_numpy(whole, spaces)
    real = torch.arange(data.time.shape[1]) < torch.from_numpy(source.lengths)[:, None]
    index = StepIndex.of(real[:, 1:])
    return replace(data, valid=index, counted=index, valid_rows=real, lengths=tuple(source.lengths.tolist()))


@pytest.mark.parametrize("constant", [0.0, 4.0, 255.0])
def test_constant_observations_and_zero_rewards_change_no_mask(constant):
    owner = agent("large_discrete")
    source = windows(owner.spaces, reward=0.0, terminated=0.0)
    source.columns["obs"][:] = constant
    data = TensorBatch.from_numpy(source, owner.spaces)
    assert data.mask.sum(1).tolist() == (source.lengths - 1).tolist()
    assert data.action.max() == 299
    assert torch.isfinite(update(owner, data)["loss"])


@pytest.mark.parametrize("action", ["discrete", "box"])
def test_micro_batches_add_up_to_the_batch(action):
    whole, parts = agent(action), agent(action)
    data = batch(whole)
    loss, metrics = whole.loss(data, generator())
    loss.backward()
    total, summed = 0.0, {}
    for part_loss, part_metrics in parts.losses(*in_parts(data, 3)):
        part_loss.backward()
        total += part_loss.item()
        summed = {name: summed.get(name, 0) + value for name, value in part_metrics.items()}
    assert total == pytest.approx(loss.item(), rel=1e-4)
    torch.testing.assert_close(summed, metrics, rtol=1e-4, atol=1e-5)
    for name, grad in gradients(whole).items():
        torch.testing.assert_close(gradients(parts)[name], grad, atol=2e-5, rtol=1e-3)
    torch.testing.assert_close(parts.popart.state_dict(), whole.popart.state_dict())
    torch.testing.assert_close(parts.timestep.norm.state_dict(), whole.timestep.norm.state_dict())


@pytest.mark.parametrize("action", ["discrete", "box", "multi_discrete", "multi_binary"])
def test_the_policy_term_reaches_policy_and_encoder_but_never_the_critics(action):
    owner = agent(action, critic_weight=0.0)
    owner.loss(batch(owner), generator())[0].backward()
    for name, grad in gradients(owner).items():
        moved = grad is not None and grad.abs().sum() > 0
        assert moved != name.startswith("heads.critic"), name


@pytest.mark.parametrize("action", ["discrete", "box"])
def test_the_critic_loss_trains_the_encoder_and_never_the_policy(action):
    owner = agent(action, actor_weight=0.0, bc_weight=0.0)
    owner.loss(batch(owner), generator())[0].backward()
    for name, grad in gradients(owner).items():
        moved = grad is not None and grad.abs().sum() > 0
        assert moved != name.startswith("heads.actor"), name


@pytest.mark.parametrize("action", ["discrete", "box"])
def test_targets_take_no_gradient_and_follow_by_tau(action):
    owner = agent(action, target_tau=0.25)
    names = {name for name, p in owner.named_parameters() if p.requires_grad}
    assert {name for name, _ in owner.named_parameters()} - names == {
        name for name, _ in owner.named_parameters() if name.startswith("target_heads.")
    }
    assert sum(p.numel() for p in owner.trainable_parameters().values()) == sum(
        p.numel() for n, p in owner.named_parameters() if not n.startswith("target_heads.")
    )
    owner.loss(batch(owner), generator())[0].backward()
    assert all(p.grad is None for p in owner.target_heads.parameters())
    old = [p.clone() for p in owner.target_heads.parameters()]
    for p in owner.heads.parameters():
        p.data += 1.0
    owner.update_targets()
    for target, before, online in zip(owner.target_heads.parameters(), old, owner.heads.parameters(), strict=True):
        torch.testing.assert_close(target, 0.75 * before + 0.25 * online)


@torch.no_grad()
def test_discrete_losses_equal_the_equations_written_out():
    owner = agent("discrete", sequence="identity")
    owner.heads.actor.net.last.weight *= 100  # a policy far from uniform
    data = batch(owner)
    reference = copy.deepcopy(owner)
    loss, metrics = owner.loss(data, generator())

    reference._update_statistics([data])
    h = reference.encode(data)
    noise = generator()
    gammas = torch.tensor(owner.gammas)
    rows = data.mask.nonzero().tolist()
    next_draw = draw(torch.rand(len(rows), 3, 4, generator=noise).permute(2, 0, 1), 2)
    policy_draw = draw(torch.rand(len(rows), 3, 4, generator=noise).permute(2, 0, 1), 2)

    def probs(heads, state):
        p = heads.actor(state).softmax(-1).clamp(0.001, 0.99)
        return p / p.sum(-1, keepdim=True)

    targets = []
    for i, (b, t) in enumerate(rows):
        state = h[b, t + 1][None]
        value = (reference.target_heads.critic(state) * probs(reference.target_heads, state)).sum(-1)[:, 0]
        value = reduce(value, next_draw[:, i], "min") * reference.popart.sigma_G + reference.popart.mu_G
        alive = 1.0 - data.terminated[b, t].float()
        targets.append(10 * data.reward[b, t + 1] + gammas * alive * value)
    targets = torch.stack(targets)
    reference._update_popart(targets)

    critic = online = offline = 0.0
    for i, (b, t) in enumerate(rows):
        state, taken = h[b, t][None], int(data.action[b, t + 1])
        q, p = reference.heads.critic(state)[:, 0], probs(reference.heads, state)[0]
        critic += (q[:, :, taken] - reference.popart.normalize(targets[i])).square().mean()
        value = (q * p).sum(-1)
        online -= reduce(value, policy_draw[:, i], "min").mean()
        advantage = q[:, :, taken].mean(0) - value.mean(0)
        offline -= ((advantage > 0) * p[:, taken].log()).mean()
    expected = (online + 0.1 * offline + 10 * critic) / len(rows)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert metrics["critic_loss"].item() == pytest.approx((critic / len(rows)).item(), rel=1e-4)


def test_means_replace_minima_where_no_value_is_maximised():
    assert agent().reduction == "min"
    assert agent(actor_weight=0.0).reduction == "mean"


def test_equal_seeds_give_equal_agents_whatever_the_global_generator():
    torch.manual_seed(1)
    first = agent(seed=3)
    state = torch.get_rng_state()
    second = agent(seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)
    other = agent(seed=4)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("sequence", ["transformer", "gru"])
def test_a_state_dict_carries_everything_an_update_needs(sequence):
    first = agent(sequence=sequence)
    for seed in range(2):
        update(first, batch(first, seed=seed), seed)
    second = agent(sequence=sequence, seed=9)
    second.load_state_dict(first.state_dict())
    third = batch(first, seed=5)
    torch.testing.assert_close(update(second, third, 5), update(first, third, 5), rtol=0, atol=0)
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)


def test_metrics_speak_of_the_acting_discount_in_reward_units():
    owner = agent(sequence="identity", acting_gamma=0.0, gammas=[])
    data = batch(owner, reward=0.7)
    assert owner.loss(data, generator())[1]["target"].item() == pytest.approx(0.7)


def test_spaces_with_a_single_action_or_discount_work():
    owner = agent(gammas=[])
    assert torch.isfinite(update(owner, batch(owner))["loss"])
    one = Spaces(observation={"obs": Box(shape=())}, action=Discrete(n=1))
    lonely = type(owner)(one, owner.settings)
    assert torch.isfinite(update(lonely, batch(lonely))["loss"])
