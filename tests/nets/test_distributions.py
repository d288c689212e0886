"""Policies against torch.distributions and by hand."""

import math

import pytest
import torch
from torch import distributions as td

from pipelines.config.model import ActorSettings
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from pipelines.nets.distributions import bounded, distribution, pick

SETTINGS = ActorSettings()
SPACES = {
    "discrete": Discrete(n=5),
    "large": Discrete(n=300),
    "multi_discrete": MultiDiscrete(nvec=(2, 3, 4)),
    "multi_binary": MultiBinary(n=6),
    "box": Box(shape=(2, 2)),
    "scalar": Box(shape=()),
}


def stored(space, leading, generator):
    match space:
        case Discrete(n=n):
            return torch.randint(0, n, leading, generator=generator, dtype=torch.int32)
        case MultiDiscrete(nvec=nvec):
            return torch.stack([torch.randint(0, n, leading, generator=generator) for n in nvec], -1).int()
        case MultiBinary(n=n):
            return torch.randint(0, 2, (*leading, n), generator=generator, dtype=torch.uint8)
        case Box(shape=shape):
            return torch.rand(*leading, *shape, generator=generator) * 2 - 1


@pytest.mark.parametrize("name", SPACES)
def test_shapes_and_round_trip(name):
    space, generator = SPACES[name], torch.Generator().manual_seed(0)
    policy = distribution(space, SETTINGS)
    params = torch.randn(4, 3, policy.num_params, generator=generator, requires_grad=True)
    action = stored(space, (4, 3), generator)
    assert policy.log_prob(params, action).shape == policy.entropy(params).shape == (4, 3)
    for drawn in (policy.sample(params, torch.rand(4, 3, policy.noise_size)), policy.mode(params)):
        assert drawn.shape == (4, 3, space.flat_size)
        kept = policy.stored(drawn)
        assert kept.shape == (4, 3, *space.shape)
        assert str(kept.dtype) == f"torch.{space.dtype}"
        assert torch.isfinite(policy.log_prob(params, kept.detach())).all()
    (policy.sample(params, torch.rand(4, 3, policy.noise_size)) * torch.randn(space.flat_size)).sum().backward()
    assert params.grad.abs().sum() > 0


def test_floor_and_ceiling_by_hand():
    probs = bounded(torch.tensor([1.0, 0.0, 0.0]), 0.001, 0.99)
    torch.testing.assert_close(probs, torch.tensor([0.99, 0.001, 0.001]) / 0.992)


def test_an_illegal_action_has_no_probability_whatever_the_floor():
    policy = distribution(Discrete(n=4), SETTINGS)
    legal = torch.tensor([True, False, True, False])
    probs = policy.probs(torch.tensor([-50.0, 50.0, 0.0, 0.0]), legal)
    assert probs[1] == probs[3] == 0
    assert probs.sum().item() == pytest.approx(1)
    assert probs[0] >= 0.001


def test_the_floor_takes_at_most_a_tenth():
    policy = distribution(Discrete(n=1000), SETTINGS)
    params = torch.zeros(1000)
    params[700] = 100
    assert policy.probs(params)[700] > 0.89


def test_pick_follows_the_probabilities():
    probs = torch.tensor([0.2, 0.0, 0.5, 0.3])
    uniform = torch.linspace(0, 1, 10_001)[:-1]
    counts = torch.bincount(pick(probs.expand(10_000, -1), uniform), minlength=4)
    torch.testing.assert_close(counts / 10_000, probs, atol=1e-3, rtol=0)


def test_categoricals_add_up_and_bits_average():
    params = torch.randn(7, 9)
    action = torch.stack([torch.randint(0, n, (7,)) for n in (2, 3, 4)], -1)
    parts = [td.Categorical(logits=p).log_prob(a) for p, a in zip(params.split((2, 3, 4), -1), action.T, strict=True)]
    ours = distribution(MultiDiscrete(nvec=(2, 3, 4)), SETTINGS).log_prob(params, action)
    torch.testing.assert_close(ours, sum(parts))
    bits, values = torch.randn(7, 6), torch.randint(0, 2, (7, 6))
    ours = distribution(MultiBinary(n=6), SETTINGS).log_prob(bits, values)
    torch.testing.assert_close(ours, td.Bernoulli(logits=bits).log_prob(values.float()).mean(-1))


def test_tanh_gaussian_equals_the_transformed_distribution():
    policy = distribution(Box(shape=(3,)), SETTINGS)
    params, action = torch.randn(5, 6), torch.rand(5, 3) * 1.9 - 0.95
    mean, log_std = policy._split(params)
    reference = td.TransformedDistribution(td.Normal(mean, log_std.exp()), td.TanhTransform())
    expected = reference.log_prob(action).sum(-1)
    torch.testing.assert_close(policy.log_prob(params, action), expected, rtol=1e-4, atol=1e-4)
    edge = policy.log_prob(params, torch.ones(5, 3))
    torch.testing.assert_close(edge, policy.log_prob(params, torch.full((5, 3), 0.99)))


def test_deviation_stays_within_its_bounds():
    policy = distribution(Box(shape=(1,)), SETTINGS)
    noise = torch.tensor([0.8413447])  # one standard deviation
    for raw, log_std in ((-100.0, -5.0), (100.0, 2.0)):
        sample = policy.sample(torch.tensor([0.0, raw]), noise)
        assert sample.item() == pytest.approx(math.tanh(math.exp(log_std)), rel=1e-4)


def test_samples_of_bits_and_choices_are_hard_and_pass_the_gradient_straight():
    policy = distribution(MultiBinary(n=2), SETTINGS)
    params = torch.tensor([0.0, 3.0], requires_grad=True)
    sample = policy.sample(params, torch.tensor([0.4, 0.999]))
    assert sample.tolist() == pytest.approx([1.0, 0.0])
    sample.sum().backward()
    torch.testing.assert_close(params.grad, params.sigmoid() * (1 - params.sigmoid()))
