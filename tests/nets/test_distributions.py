"""Policies against torch.distributions and by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import distributions as td
from torch.nn import functional as F

from pipelines.config.model import ActorSettings
from pipelines.errors import UsageError
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from pipelines.nets.actor import Categorical, make_distribution

SETTINGS = ActorSettings()
KINDS = ["tanh-gaussian", "beta", "gaussian-mixture"]
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


def policies():
    """Each space with each of its distributions."""
    for name, space in SPACES.items():
        families: list[dict] = [{}, {"gumbel": True}]
        if isinstance(space, Box):
            families = [{"distribution": kind} for kind in (*KINDS, "grid")]
        for options in families:
            yield pytest.param(space, ActorSettings(**options), id=f"{name} {options or ''}")


@pytest.mark.parametrize(("space", "settings"), list(policies()))
def test_shapes_and_round_trip(space, settings):
    generator = torch.Generator().manual_seed(0)
    policy = make_distribution(space, settings)
    params = torch.randn(4, 3, policy.num_params, generator=generator, requires_grad=True)
    action = stored(space, (4, 3), generator)
    assert policy.log_prob(params, action).shape == policy.entropy(params).shape == (4, 3)
    for drawn in (policy.sample(params, torch.rand(4, 3, policy.noise_size)), policy.mode(params)):
        assert drawn.shape == (4, 3, space.flat_size)
        kept = policy.to_stored(drawn)
        assert kept.shape == (4, 3, *space.shape)
        assert str(kept.dtype) == f"torch.{space.dtype}"
        assert torch.isfinite(policy.log_prob(params, kept.detach())).all()
    (policy.sample(params, torch.rand(4, 3, policy.noise_size)) * torch.randn(space.flat_size)).sum().backward()
    assert params.grad.abs().sum() > 0


@pytest.mark.parametrize("name", [name for name, space in SPACES.items() if not isinstance(space, Box)])
def test_distributions_of_numbers_are_refused_where_actions_are_choices(name):
    with pytest.raises(UsageError, match="'beta' is one of Box actions") as refused:
        make_distribution(SPACES[name], ActorSettings(distribution="beta"))
    assert refused.value.hint == "leave it out"


def test_a_floor_is_mixed_in_by_hand():
    probs = torch.tensor([0.7, 0.3, 0.0, 0.0])
    torch.testing.assert_close(Categorical.mix_floor(probs, 0.01), torch.tensor([0.682, 0.298, 0.01, 0.01]))
    legal = torch.tensor([True, True, False, True])
    torch.testing.assert_close(Categorical.mix_floor(probs, 0.01, legal), torch.tensor([0.689, 0.301, 0.0, 0.01]))


def test_the_floors_are_those_of_the_settings():
    sure = torch.tensor([[-50.0, 50.0]])
    torch.testing.assert_close(make_distribution(Discrete(n=2), SETTINGS).probs(sure), torch.tensor([[0.001, 0.999]]))
    torch.testing.assert_close(make_distribution(MultiBinary(n=2), SETTINGS).probs(sure), torch.tensor([[0.01, 0.99]]))


def test_a_ceiling_clamps_and_normalises_by_hand():
    policy = make_distribution(Discrete(n=3), ActorSettings(probability_floor=0.01, probability_ceiling=0.9))
    params = torch.tensor([0.99, 0.0099, 0.0001]).log()
    torch.testing.assert_close(policy.probs(params), torch.tensor([0.9, 0.01, 0.01]) / 0.92)
    legal = torch.tensor([True, False, True])
    torch.testing.assert_close(policy.probs(params, legal), torch.tensor([0.9, 0.0, 0.01]) / 0.91)
    even = make_distribution(Discrete(n=1000), ActorSettings(probability_ceiling=0.99))
    torch.testing.assert_close(even.probs(torch.zeros(1000)), torch.full((1000,), 1e-3))
    with pytest.raises(ValueError, match=r"probability_ceiling 0\.1 is below"):
        ActorSettings(probability_floor=0.2, probability_ceiling=0.1)


def raised(probs, temperature):
    powers = np.asarray(probs, np.float64) ** (1 / temperature)
    return powers / powers.sum(-1, keepdims=True)


@pytest.mark.parametrize("temperature", [0.02, 0.5, 3.0])
@pytest.mark.parametrize("gumbel", [False, True])
def test_choices_at_a_temperature_are_as_frequent_as_by_hand(temperature, gumbel):
    """Without the floors that learning mixes in: e ** x / sum by numpy."""
    settings, draws = ActorSettings(gumbel=gumbel), 40_000
    logits, legal = np.array([0.3, -1.2, 2.0, 0.9, 0.0]), np.array([True, True, False, True, True])
    weights = np.exp(logits) * legal
    plain = weights / weights.sum()
    params, mask = torch.tensor(logits, dtype=torch.float32), torch.tensor(legal)
    policy = make_distribution(Discrete(n=5), settings).for_play(temperature)
    np.testing.assert_allclose(policy.probs(params, mask).numpy(), raised(plain, temperature), atol=1e-6)
    noise = torch.rand(draws, policy.noise_size, generator=torch.Generator().manual_seed(0))
    drawn = policy.sample(params.expand(draws, -1), noise, mask).mean(0).numpy()
    np.testing.assert_allclose(drawn, raised(plain, temperature), atol=4 * 0.5 / draws**0.5)

    parts = make_distribution(MultiDiscrete(nvec=(2, 3)), settings).for_play(temperature)
    noise = torch.rand(draws, parts.noise_size, generator=torch.Generator().manual_seed(1))
    drawn = parts.sample(params.expand(draws, -1), noise).mean(0).numpy()
    for place in (slice(0, 2), slice(2, 5)):
        plain = np.exp(logits[place]) / np.exp(logits[place]).sum()
        np.testing.assert_allclose(drawn[place], raised(plain, temperature), atol=4 * 0.5 / draws**0.5)

    bits = make_distribution(MultiBinary(n=5), settings).for_play(temperature)
    each = 1 / (1 + np.exp(-logits))
    noise = torch.rand(draws, 5, generator=torch.Generator().manual_seed(2))
    drawn = bits.sample(params.expand(draws, -1), noise).mean(0).numpy()
    wanted = raised(np.stack((1 - each, each), -1), temperature)[:, 1]
    np.testing.assert_allclose(drawn, wanted, atol=4 * 0.5 / draws**0.5)


FLOORLESS = {"probability_floor": 0.0, "bit_probability_floor": 0.0}


def test_a_clamped_policy_plays_as_it_learns():
    """AMAGO's: the reference clamps the probabilities by which it plays, too."""
    policy = make_distribution(Discrete(n=3), ActorSettings(probability_floor=0.01, probability_ceiling=0.9))
    params = torch.tensor([9.0, 0.0, 0.0])
    assert torch.equal(policy.for_play().probs(params), policy.probs(params))


@pytest.mark.parametrize(("space", "settings"), list(policies()))
def test_play_leaves_out_the_floor_alone_and_a_density_has_no_temperature(space, settings):
    policy = make_distribution(space, settings)
    if not policy.hard:
        with pytest.raises(UsageError, match="these actions have a density"):
            policy.for_play(0.5)
        return
    bare = make_distribution(space, settings.model_copy(update=FLOORLESS))
    generator = torch.Generator().manual_seed(0)
    params = 3 * torch.randn(50, policy.num_params, generator=generator)
    noise = torch.rand(50, policy.noise_size, generator=generator)
    wanted = policy.sample(params, noise)
    played = policy.for_play().sample(params, noise)
    assert torch.equal(played, bare.sample(params, noise))
    assert torch.equal(policy.for_play().mode(params), policy.mode(params))
    policy.for_play(0.1)
    assert torch.equal(policy.sample(params, noise), wanted), "the agent's own distribution stays as it is"


@pytest.mark.parametrize("name", ["discrete", "large", "multi_discrete", "multi_binary"])
def test_a_policy_that_is_sure_and_wrong_has_a_gradient(name):
    """A logit gap of 7.5 puts the probability below the floor: clamped, its gradient would be zero.

    With p' = f + (1 - n f) p, d log p' / d logit = (1 - n f) p (1 - p) / p' of the action that was taken."""
    space = SPACES[name]
    policy, places = make_distribution(space, SETTINGS), {"multi_discrete": 3, "multi_binary": 6}.get(name, 1)
    sizes = list(space.nvec) if name == "multi_discrete" else [2 if name == "multi_binary" else space.n]
    params = torch.zeros(policy.num_params, requires_grad=True)
    wrong = torch.zeros(policy.num_params)
    firsts = [0, 2, 5] if name == "multi_discrete" else list(range(places))
    wrong[firsts] = -7.5
    action = torch.tensor([1] * 6) if name == "multi_binary" else torch.zeros(space.shape)
    policy.log_prob(params + wrong, action).backward()
    for place, first in enumerate(firsts):
        n = sizes[place % len(sizes)]
        floor = 0.01 if name == "multi_binary" else min(0.001, 0.1 / n)
        p = math.exp(-7.5) / (math.exp(-7.5) + n - 1)
        slope = (1 - n * floor) * p * (1 - p) / (floor + (1 - n * floor) * p)
        scale = 1 / 6 if name == "multi_binary" else 1  # the mean over bits
        assert params.grad[first].item() == pytest.approx(slope * scale, rel=1e-3)


def test_an_illegal_action_has_no_probability_whatever_the_floor():
    policy = make_distribution(Discrete(n=4), SETTINGS)
    legal = torch.tensor([True, False, True, False])
    probs = policy.probs(torch.tensor([-50.0, 50.0, 0.0, 0.0]), legal)
    assert probs[1] == probs[3] == 0
    assert probs.sum().item() == pytest.approx(1)
    assert probs[0] >= 0.001


def test_the_floor_takes_at_most_a_tenth():
    policy = make_distribution(Discrete(n=1000), SETTINGS)
    params = torch.zeros(1000)
    params[700] = 100
    assert policy.probs(params)[700] > 0.89


def test_pick_follows_the_probabilities():
    probs = torch.tensor([0.2, 0.0, 0.5, 0.3])
    uniform = torch.linspace(0, 1, 10_001)[:-1]
    counts = torch.bincount(Categorical.pick(probs.expand(10_000, -1), uniform), minlength=4)
    torch.testing.assert_close(counts / 10_000, probs, atol=1e-3, rtol=0)


def test_categoricals_add_up_and_bits_average():
    params = torch.randn(7, 9)
    action = torch.stack([torch.randint(0, n, (7,)) for n in (2, 3, 4)], -1)
    parts = [td.Categorical(logits=p).log_prob(a) for p, a in zip(params.split((2, 3, 4), -1), action.T, strict=True)]
    bare = ActorSettings(probability_floor=0, bit_probability_floor=0)
    ours = make_distribution(MultiDiscrete(nvec=(2, 3, 4)), bare).log_prob(params, action)
    torch.testing.assert_close(ours, sum(parts))
    bits, values = torch.randn(7, 6), torch.randint(0, 2, (7, 6))
    ours = make_distribution(MultiBinary(n=6), bare).log_prob(bits, values)
    torch.testing.assert_close(ours, td.Bernoulli(logits=bits).log_prob(values.float()).mean(-1))


def test_tanh_gaussian_equals_the_transformed_distribution():
    policy = make_distribution(Box(shape=(3,)), SETTINGS)
    params, action = torch.randn(5, 6), torch.rand(5, 3) * 1.9 - 0.95
    mean, log_std = policy._split(params)
    reference = td.TransformedDistribution(td.Normal(mean, log_std.exp()), td.TanhTransform())
    expected = reference.log_prob(action).sum(-1)
    torch.testing.assert_close(policy.log_prob(params, action), expected, rtol=1e-4, atol=1e-4)
    edge = policy.log_prob(params, torch.ones(5, 3))
    torch.testing.assert_close(edge, policy.log_prob(params, torch.full((5, 3), 0.99)))


def test_deviation_stays_within_its_bounds():
    policy = make_distribution(Box(shape=(1,)), SETTINGS)
    noise = torch.tensor([0.8413447])  # one standard deviation
    for raw, log_std in ((-100.0, -5.0), (100.0, 2.0)):
        sample = policy.sample(torch.tensor([0.0, raw]), noise)
        assert sample.item() == pytest.approx(math.tanh(math.exp(log_std)), rel=1e-4)


def test_samples_of_bits_and_choices_are_hard_and_pass_the_gradient_straight():
    policy = make_distribution(MultiBinary(n=2), SETTINGS)
    params = torch.tensor([0.0, 3.0], requires_grad=True)
    sample = policy.sample(params, torch.tensor([0.4, 0.999]))
    assert sample.tolist() == pytest.approx([1.0, 0.0])
    sample.sum().backward()
    torch.testing.assert_close(params.grad, 0.98 * params.sigmoid() * (1 - params.sigmoid()))


def uniforms(policy, *leading, seed=0):
    return torch.rand(*leading, policy.noise_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_densities_of_box_actions_integrate_to_one(kind):
    policy = make_distribution(Box(shape=()), ActorSettings(distribution=kind, action_clip=0.9999))
    params = torch.randn(policy.num_params, generator=torch.Generator().manual_seed(1))
    inner = torch.linspace(-4.9, 4.9, 20_001, dtype=torch.float64)  # even before tanh, where the mass is near the ends
    action = inner.tanh()
    density = policy.log_prob(params.double(), action).exp() * (1 - action.square())
    assert torch.trapezoid(density, inner).item() == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_box_actions_follow_the_density(kind):
    policy = make_distribution(Box(shape=()), ActorSettings(distribution=kind, action_clip=0.9999))
    params = 0.4 * torch.randn(policy.num_params, generator=torch.Generator().manual_seed(2))
    drawn = policy.sample(params, uniforms(policy, 40_000))[:, 0].double()
    inner = torch.linspace(-4.9, 4.9, 20_001, dtype=torch.float64)
    action = inner.tanh()
    density = policy.log_prob(params.double(), action).exp() * (1 - action.square())
    for power in (1, 2, 3):
        expected = torch.trapezoid(density * action**power, inner).item()
        assert drawn.pow(power).mean().item() == pytest.approx(expected, abs=0.015)


def test_the_most_likely_action_of_a_flat_beta_is_in_the_middle():
    policy = make_distribution(Box(shape=(2,)), ActorSettings(distribution="beta"))
    params = torch.tensor([[-200.0, -30.0, -200.0, -30.0], [-200.0, 5.0, 3.0, -200.0]])
    torch.testing.assert_close(policy.mode(params), torch.tensor([[0.0, 0.0], [-1.0, 1.0]]), atol=1e-4, rtol=0)


def test_beta_equals_the_reference():
    policy = make_distribution(Box(shape=(2,)), ActorSettings(distribution="beta"))
    params, action = torch.randn(5, 4), torch.rand(5, 2) * 1.9 - 0.95
    a, b = 1.0001 + F.softplus(params[:, :2]), 1.0001 + F.softplus(params[:, 2:])
    reference = td.TransformedDistribution(td.Beta(a, b), td.AffineTransform(-1, 2))
    torch.testing.assert_close(
        policy.log_prob(params, action), reference.log_prob(action).sum(-1), rtol=1e-4, atol=1e-4
    )
    entropy = (td.Beta(a, b).entropy() + math.log(2)).sum(-1)
    torch.testing.assert_close(policy.entropy(params), entropy, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("shape", "points"), [((), 2), ((3,), 4), ((2, 2), 3)])
def test_grid_of_points_by_hand(shape, points):
    policy = make_distribution(
        Box(shape=shape), ActorSettings(distribution="grid", grid_points=points, probability_floor=0.0)
    )
    axis = [-1 + 2 * k / (points - 1) for k in range(points)]
    size = math.prod(shape)
    expected = torch.tensor([*itertools.product(axis, repeat=size)]).reshape(-1, *shape)
    everything = torch.arange(points**size)
    assert torch.equal(policy.index(expected), everything)
    between = (expected + 0.4 / (points - 1) * (2 * torch.rand(expected.shape) - 1)).clamp(-1, 1)
    assert torch.equal(policy.index(between), everything)
    params = 50.0 * torch.eye(points**size)
    torch.testing.assert_close(policy.to_stored(policy.mode(params)), expected)
    torch.testing.assert_close(policy.to_stored(policy.sample(params, torch.rand(len(params), 1))), expected)
    torch.testing.assert_close(
        policy.log_prob(torch.zeros_like(params), between), torch.full((len(params),), -math.log(len(params)))
    )


def test_grid_of_too_many_points_is_refused():
    with pytest.raises(UsageError, match="Box of 17 dimensions"):
        make_distribution(Box(shape=(17,)), ActorSettings(distribution="grid"))


@pytest.mark.parametrize("deviation", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("mean", [0.0, 0.7, 2.5])
def test_entropy_of_tanh_gaussian_is_that_of_its_actions(mean, deviation):
    """Against the mean of -log p over many samples, by torch's own distribution."""
    policy = make_distribution(Box(shape=(1,)), SETTINGS)
    raw = math.atanh(2 * (math.log(deviation) - policy.low) / (policy.high - policy.low) - 1)
    inner = td.Normal(torch.tensor(mean), torch.tensor(deviation))
    reference = td.TransformedDistribution(inner, td.TanhTransform(cache_size=1))
    drawn = reference.sample((200_000,))
    expected = -reference.log_prob(drawn).mean()
    torch.testing.assert_close(policy.action_entropy(torch.tensor([mean, raw])), expected, atol=0.02, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_samples_are_those_of_the_mean(kind):
    """d E[x^2] / d params by reparametrised samples, against finite differences of the integral."""
    policy = make_distribution(Box(shape=()), ActorSettings(distribution=kind, action_clip=0.9999, modes=2))
    params = 0.5 * torch.randn(policy.num_params, generator=torch.Generator().manual_seed(3))
    if kind == "gaussian-mixture":
        params[0] = 30.0  # weights get theirs straight through the choice, which is biased: here there is one mode
    inner = torch.linspace(-4.9, 4.9, 20_001, dtype=torch.float64)
    action = inner.tanh()

    def mean(at):
        density = policy.log_prob(at, action).exp() * (1 - action.square())
        return torch.trapezoid(density * (action + action.square()), inner)

    at = params.double().requires_grad_()
    (expected,) = torch.autograd.grad(mean(at), at)
    drawn = params.requires_grad_()
    x = policy.sample(drawn, uniforms(policy, 60_000))[:, 0]
    (found,) = torch.autograd.grad((x + x.square()).mean(), drawn)
    torch.testing.assert_close(found.double(), expected, atol=0.015, rtol=0.05)


def test_mixture_by_hand():
    settings = ActorSettings(distribution="gaussian-mixture", modes=2)
    policy = make_distribution(Box(shape=(1,)), settings)
    params = torch.tensor([0.0, math.log(3.0), -0.5, 0.0, 0.5, 0.0])  # logits; mean, deviation; mean, deviation
    std = math.log(2) + math.exp(-5.0)
    parts = [td.TransformedDistribution(td.Normal(m, std), td.TanhTransform()) for m in (-0.5, 0.5)]
    action = torch.tensor([0.3])
    expected = (0.25 * parts[0].log_prob(action).exp() + 0.75 * parts[1].log_prob(action).exp()).log()
    torch.testing.assert_close(policy.log_prob(params, action), expected[0], rtol=1e-4, atol=1e-4)
    assert policy.mode(params).item() == pytest.approx(math.tanh(0.5))


@pytest.mark.parametrize("gumbel", [False, True])
@pytest.mark.parametrize("name", ["discrete", "multi_discrete", "multi_binary"])
def test_samples_follow_the_probabilities_and_never_what_is_illegal(name, gumbel):
    space = SPACES[name]
    policy = make_distribution(space, ActorSettings(gumbel=gumbel))
    params = torch.randn(policy.num_params, generator=torch.Generator().manual_seed(5), requires_grad=True)
    legal = torch.arange(space.flat_size) % 3 != 1
    for mask in (None, legal):
        drawn = policy.sample(params, uniforms(policy, 20_000), mask)
        assert ((drawn == 0) | (drawn == 1)).all()
        parts = params.split(space.nvec) if name == "multi_discrete" else [params]
        masks = [None] * len(parts) if mask is None else mask.split([len(p) for p in parts])
        inner = policy.parts if name == "multi_discrete" else [policy]
        probs = torch.cat([p.probs(v, m) for p, v, m in zip(inner, parts, masks, strict=True)])
        torch.testing.assert_close(drawn.mean(0), probs, atol=0.015, rtol=0)
        if mask is not None:
            assert not drawn[:, ~legal].any()
            assert not policy.mode(params, mask)[~legal].any()
            assert torch.isfinite(policy.entropy(params, mask))
            (grad,) = torch.autograd.grad(policy.sample(params, uniforms(policy, 50), mask)[:, 0].sum(), params)
            assert torch.isfinite(grad).all()


def test_where_nothing_is_legal_everything_is():
    policy = make_distribution(Discrete(n=3), SETTINGS)
    params = torch.tensor([0.0, 1.0, 2.0])
    torch.testing.assert_close(policy.probs(params, torch.zeros(3, dtype=torch.bool)), policy.probs(params))


def test_an_illegal_action_in_data_gives_no_gradient():
    policy = make_distribution(Discrete(n=3), SETTINGS)
    params = torch.zeros(3, requires_grad=True)
    log_prob = policy.log_prob(params, torch.tensor(1), torch.tensor([True, False, True]))
    log_prob.backward()
    assert torch.isfinite(log_prob)
    assert not params.grad.any()


def test_the_gradient_of_gumbel_is_that_of_its_soft_choice():
    policy = make_distribution(Discrete(n=3), ActorSettings(gumbel=True, gumbel_temperature=0.7, probability_floor=0))
    params, noise = torch.tensor([0.1, 0.5, -0.2], requires_grad=True), torch.tensor([0.3, 0.6, 0.9])
    log_probs = policy.probs(params).log()
    soft = ((log_probs - (-noise.log()).log()) / 0.7).softmax(-1)
    factor = torch.tensor([1.0, -2.0, 0.5])
    (expected,) = torch.autograd.grad((soft * factor).sum(), params, retain_graph=True)
    (found,) = torch.autograd.grad((policy.sample(params, noise) * factor).sum(), params)
    torch.testing.assert_close(found, expected)
