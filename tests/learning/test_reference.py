"""A policy that is held near a frozen one: the divergence by hand and by torch, and the term of the loss."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.config.model import AgentSettings
from pipelines.errors import UsageError
from pipelines.lake.spaces import Box, MultiBinary
from pipelines.learning.agent import ReferencePolicy
from pipelines.nets.actor import Distribution, make_distribution
from tests.learning.factories import ACTIONS, batch, settings
from tests.learning.test_literal import LENGTHS, compare, made
from tests.learning.test_logp import with_logp

DENSITIES = ["tanh-gaussian", "beta", "grid"]


def policy(action: str, **actor: Any) -> Distribution:
    return make_distribution(ACTIONS[action], settings(actor={"hidden": [8], **actor}).actor)


def test_divergence_of_choices_by_hand() -> None:
    ours = policy("discrete", probability_floor=0.0)
    p, q = [0.5, 0.25, 0.25, 0.0], [0.125, 0.125, 0.5, 0.25]
    params, others = (torch.tensor(each).clamp_min(1e-30).log() for each in (p, q))
    # 1/2 log 4 + 1/4 log 2 + 1/4 log 1/2 + 0
    assert ours.divergence(params, ours, others).item() == pytest.approx(math.log(2), rel=1e-5)
    assert ours.divergence(params, ours, params).item() == 0
    legal = torch.tensor([True, True, False, False])
    # p = 2/3, 1/3 and q = 1/2, 1/2 among the legal ones
    expected = 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)
    assert ours.divergence(params, ours, others, legal).item() == pytest.approx(expected, rel=1e-5)


def test_divergence_of_gaussians_by_hand() -> None:
    ours = policy("box", min_log_std=-5.0, max_log_std=5.0)

    def params(mean: list[float], std: list[float]) -> torch.Tensor:
        # The log-deviation is bounded by a tanh between -5 and 5.
        return torch.tensor([*mean, *(math.atanh(math.log(each) / 5) for each in std)])

    found = ours.divergence(params([0, 0], [1, 1]), ours, params([1, 0], [2, 1]))
    assert found.item() == pytest.approx(math.log(2) + (1 + 1) / 8 - 0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("action", "actor"),
    [("box", {"distribution": name}) for name in DENSITIES] + [(name, {}) for name in ("discrete", "multi_discrete")],
)
def test_divergence_is_the_mean_difference_of_log_probabilities(action: str, actor: dict[str, Any]) -> None:
    ours = policy(action, **actor)
    rng = torch.Generator().manual_seed(0)
    params, others = 0.7 * torch.randn((2, ours.num_params), generator=rng)
    noise = torch.rand((200_000, ours.noise_size), generator=rng)
    params, others = (each.expand(len(noise), -1) for each in (params, others))
    drawn = ours.to_stored(ours.sample(params, noise))
    difference = ours.log_prob(params, drawn) - ours.log_prob(others, drawn)
    error = difference.std() / math.sqrt(len(difference))
    # Actions at the bounds are clipped before their probability is computed, which loses a little of the divergence.
    slack = 0.05 * difference.mean().abs() if actor.get("distribution") == "tanh-gaussian" else 0.0
    assert abs(ours.divergence(params[0], ours, others[0]) - difference.mean()) < 5 * error + slack


def test_divergence_of_bits_is_that_of_independent_choices() -> None:
    ours = policy("multi_binary", bit_probability_floor=0.0)
    p, q = torch.tensor([0.5, 0.9, 0.2]), torch.tensor([0.25, 0.9, 0.7])
    bernoulli = torch.distributions.Bernoulli
    expected = torch.distributions.kl_divergence(bernoulli(p), bernoulli(q)).sum()
    torch.testing.assert_close(ours.divergence(p.logit(), ours, q.logit()), expected)


@pytest.mark.parametrize("kind", ["actor-critic", "multi-task"])
@pytest.mark.parametrize("action", ["discrete", "box"])
def test_loss_and_gradients_equal_the_literal_ones(kind: str, action: str) -> None:
    owner = made(action, {"kind": kind, "reference": "runs/other", "reference_weight": 0.7})
    # Another network, which learned one of the three discounts: its acting policy stands for the others.
    other = made(action, {"gammas": [0.3, 0.9], "acting_gamma": 0.95, "actor": {"hidden": [5]}}, seed=5)
    owner.reference = ReferencePolicy(other, of=owner)
    before = copy.deepcopy(other.state_dict())
    compare(owner, batch(owner, importance=np.array([0.3, 1.7]), **LENGTHS))
    assert all(parameter.grad is None for parameter in other.parameters())
    for name, value in other.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("kind", ["actor-critic", "multi-task"])
@pytest.mark.parametrize("action", ["discrete", "box"])
def test_cloning_weighs_actions_by_how_much_more_often_the_reference_takes_them(kind: str, action: str) -> None:
    owner = made(action, {"kind": kind, "bc_weight": 1.3, "reference": "named", "reference_ratio": 1.2})
    other = made(action, {"gammas": [0.3, 0.9], "acting_gamma": 0.95, "actor": {"hidden": [5]}}, seed=5)
    owner.reference = ReferencePolicy(other, of=owner)
    data = with_logp(batch(owner, importance=np.array([0.3, 1.7]), **LENGTHS))
    steps = owner.valid_steps(data, owner.encode(data))
    ratio = owner.reference.compare(steps, data)[1]
    assert ratio is not None
    assert ratio.max() == pytest.approx(1.2)
    assert ratio.min() < 1
    compare(owner, data)


def test_ratios_of_all_actions_give_the_policy_of_the_reference() -> None:
    """The mean over the data's policy of what is cloned is the reference's policy."""
    owner = made("discrete", {"reference": "named", "reference_ratio": 1e6})
    owner.reference = ReferencePolicy(made("discrete", {}, seed=5), of=owner)
    data = batch(owner, **LENGTHS)
    steps = owner.valid_steps(data, owner.encode(data))
    space = owner.spaces.action
    count, first = space.n, space.start
    behaviour = torch.rand(count, *data.reward.shape, generator=torch.Generator().manual_seed(3)).add(0.1)
    behaviour /= behaviour.sum(0)
    found = 0.0
    for choice in range(count):
        taken = replace(data, logp=behaviour[choice].log())
        ratio = owner.reference.compare(replace(steps, action=torch.full_like(steps.action, first + choice)), taken)[1]
        assert ratio is not None
        found = found + ratio * steps.index.take_after(behaviour[choice])[:, None]
    torch.testing.assert_close(found, torch.ones_like(found))


def test_ratios_need_a_reference_and_actions() -> None:
    with pytest.raises(ValueError, match="compares with a reference"):
        AgentSettings.model_validate({"reference_ratio": 1.0})
    with pytest.raises(ValueError, match="weighs actions that were taken"):
        AgentSettings.model_validate({"reference_ratio": 1.0, "reference": "named", "target": "label"})


def test_action_masks_apply_to_the_reference_too() -> None:
    observation = {"obs": Box(shape=(3,)), "obs.legal": MultiBinary(n=4)}
    owner = made("discrete", {"action_mask": "obs.legal"}, observation=observation)
    owner.reference = ReferencePolicy(made("discrete", {}, observation=observation, seed=5), of=owner)
    compare(owner, batch(owner, **LENGTHS))


def test_a_reference_is_a_term_of_the_loss_but_not_of_the_state() -> None:
    owner = made("discrete", {"reference": "runs/other", "reference_weight": 0.5})
    data = batch(owner, **LENGTHS)
    held = copy.deepcopy(owner)
    held.reference = ReferencePolicy(made("discrete", {}, seed=5), of=held)
    assert held.state_dict().keys() == owner.state_dict().keys()
    assert held.trainable_parameters().keys() == owner.trainable_parameters().keys()
    (loss, metrics), (near, more) = (each.loss(data, torch.Generator().manual_seed(0)) for each in (owner, held))
    assert more.keys() - metrics.keys() == {"reference_loss"}
    assert near.item() == pytest.approx(loss.item() + 0.5 * more["reference_loss"].item(), rel=1e-6)
    assert more["reference_loss"].item() > 0.01


@pytest.mark.parametrize("distribution", ["beta", "gaussian-mixture", "grid"])
def test_policies_without_a_divergence_are_refused(distribution: str) -> None:
    actor = {"actor": {"hidden": [8], "distribution": distribution}}
    with pytest.raises(UsageError, match=r"agent\.reference: the divergence of a TanhGaussian from"):
        ReferencePolicy(made("box", actor), of=made("box", {}))
    if distribution == "gaussian-mixture":
        with pytest.raises(UsageError, match="the divergence of a GaussianMixture"):
            ReferencePolicy(made("box", actor), of=made("box", actor))
