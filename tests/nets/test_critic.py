"""Ensembles, pass by pass, against one member at a time. (Whole updates: tests/learning/test_literal.py.)"""

import copy

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional as F

from pipelines.config.model import CriticSettings
from pipelines.nets import critic as critics
from pipelines.nets.critic import ActionInput, ActionValues, TwoHot
from pipelines.nets.inputs import symexp, symlog

SETTINGS = CriticSettings(ensemble=3, hidden=(8, 7))
TWO_HOT = SETTINGS.model_copy(update={"kind": "two-hot", "bins": 11, "low": -20, "high": 20, "labels": "two-hot"})
GAUSS = TWO_HOT.model_copy(update={"labels": "hl-gauss"})
EVEN = TWO_HOT.model_copy(update={"symlog": False, "low": -3, "high": 5})
GAMMAS = (0.1, 0.9)
KINDS = pytest.mark.parametrize(
    "settings", [SETTINGS, TWO_HOT, GAUSS, EVEN], ids=["scalar", "two-hot", "hl-gauss", "even two-hot"]
)


def member(critic, index, x, frozen=False):
    own = [t.detach() if frozen else t for t in critic.tensors()]
    depth = len(critic.weights)
    for weight, bias in zip(own[:depth], own[depth : 2 * depth], strict=True):
        x = F.leaky_relu(x @ weight[index] + bias[index])
    return x @ own[-2][index] + own[-1][index]


def values(critic, index, h, action, frozen=False):
    """(N, G) of actions (N, G, F), by concatenation."""
    out = []
    for g, gamma in enumerate(GAMMAS):
        horizon = symlog(torch.tensor([[1 / (1 - gamma)]])).expand(len(h), 1)
        raw = member(critic, index, torch.cat((h, action[:, g], horizon), -1), frozen)
        if not isinstance(critic.readout, TwoHot):
            out.append(raw[:, g])
            continue
        mean = raw.softmax(-1) @ critic.readout.bins_Z
        out.append(symexp(mean) if critic.readout.symlog else mean)
    return torch.stack(out, 1)


def shaken(critic):
    for parameter in critic.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return critic


def squared(target):
    """Squared error as a critic's loss, with its gradient, by autograd."""

    def loss(rows, outputs):
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            wanted = target[rows, :, None] if leaf.dim() == 4 else target[rows].t()
            error = (leaf - wanted).square().sum()
            (slope,) = torch.autograd.grad(error, leaf)
        return (error.detach(), slope) if leaf.dim() == 4 else (error.detach(), outputs, slope)

    return loss


def test_action_values_equal_members_one_by_one():
    critic, h = shaken(ActionValues(5, 2, 4, SETTINGS)), torch.randn(6, 5)
    out = critic(h)
    assert out.shape == (3, 6, 2, 4)
    for index in range(3):
        torch.testing.assert_close(out[index], member(critic, index, h).view(6, 2, 4))


@KINDS
@pytest.mark.parametrize("rows", [3, 1000])
def test_action_input_equals_the_concatenated_input(settings, rows, monkeypatch):
    monkeypatch.setattr(critics, "CPU_ROWS", rows)
    critic = shaken(ActionInput(5, 3, GAMMAS, settings))
    h, action = torch.randn(6, 5), torch.randn(6, 2, 4, 3)
    out, needed = critic(critic.states(h), action), torch.rand(3, 6, 2, 4) < 0.5
    assert out.shape == (3, 6, 2, 4)
    for index in range(3):
        for k in range(4):
            torch.testing.assert_close(out[index, ..., k], values(critic, index, h, action[:, :, k]))
    some = critic(critic.states(h), action, needed)
    torch.testing.assert_close(some, torch.where(needed, out, 0.0))
    shared = needed[:1, :, :1]  # broadcast over critics and discounts
    torch.testing.assert_close(critic(critic.states(h), action, shared), torch.where(shared, out, 0.0))


@KINDS
def test_min_q_passes_its_gradient_through_one_critic_to_the_actions_alone(settings):
    critic = shaken(ActionInput(5, 3, GAMMAS, settings))
    h, action = torch.randn(6, 5), torch.randn(6, 2, 4, 3, requires_grad=True)
    drawn = torch.rand(3, 6, 2).topk(2, 0).indices
    least, everything = critic.min_q(critic.states(h), action, drawn)
    by_hand = torch.stack([values(critic, c, h, action[:, :, k], frozen=True) for c in range(3) for k in range(4)])
    means = by_hand.view(3, 4, 6, 2).mean(1)
    torch.testing.assert_close(everything, means.detach())
    expected = means.gather(0, drawn).amin(0)
    torch.testing.assert_close(least, expected)
    factor = torch.randn(6, 2)
    (expected_grad,) = torch.autograd.grad((expected * factor).sum(), action)
    (least * factor).sum().backward()
    torch.testing.assert_close(action.grad, expected_grad)
    assert all(parameter.grad is None for parameter in critic.parameters())


def test_without_gradient_nothing_is_kept():
    critic, table = ActionInput(5, 3, GAMMAS, SETTINGS), ActionValues(5, 2, 4, SETTINGS)
    h, target = torch.randn(6, 5), torch.zeros(6, 2)
    with torch.no_grad():
        loss, _ = critic.fused_loss(h, critic.states(h), torch.randn(6, 3), squared(target))
        other, _ = table.fused_loss(h, squared(target))
    assert not loss.requires_grad
    assert not other.requires_grad


def test_lower_precision_changes_little_and_gradients_stay_in_float32():
    critic = shaken(ActionInput(16, 3, GAMMAS, CriticSettings(hidden=(64, 64))))
    h, action, target = torch.randn(300, 16, requires_grad=True), torch.randn(300, 3), torch.randn(300, 2)
    grads = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss, _ = critic.fused_loss(h, critic.states(h), action, squared(target))
        grads.append(torch.autograd.grad(loss, [h, *critic.parameters()]))
    for full, low in zip(*grads, strict=True):
        assert low.dtype == torch.float32
        assert F.cosine_similarity(full.flatten(), low.flatten(), dim=0) > 0.99


def rounded(values):
    """Share of values that bf16 has exactly."""
    return (values == values.bfloat16().float()).float().mean().item()


def test_values_are_not_rounded_to_lower_precision():
    """Differences of nearly equal values decide; what is left of the rounding of hidden layers averages out."""
    h, action, target = torch.randn(300, 16), torch.randn(300, 3), torch.randn(300, 2)
    inputs = shaken(ActionInput(16, 3, GAMMAS, CriticSettings(hidden=(64, 64))))
    table = shaken(ActionValues(16, 2, 4, CriticSettings(hidden=(64, 64))))
    for critic in (inputs, table):
        critic.last_bias.data.zero_()
    of_input = action[:, None, None].expand(-1, 2, 1, -1)

    def found():
        yield inputs.fused_loss(h, inputs.states(h), action, squared(target))[1]
        yield inputs(inputs.states(h), of_input)
        yield table.fused_loss(h, squared(target))[1]
        yield table(h)

    full = list(found())
    with torch.autocast("cpu", torch.bfloat16):
        low = list(found())
    for expected, actual in zip(full, low, strict=True):
        assert rounded(actual) < 0.05
        assert (actual - expected).norm() < 0.01 * expected.norm()


def test_two_bins_about_a_target_have_its_distance_as_shares():
    readout = TwoHot(
        CriticSettings(kind="two-hot", bins=3, low=-1, high=1, labels="two-hot")
    )  # bins at -log 2, 0, log 2 of symlog
    half = float(torch.expm1(torch.log(torch.tensor(2.0)) / 2))
    labels = readout.labels(torch.tensor([0.0, 1.0, half, 50.0, -50.0]))
    expected = torch.tensor([[0, 1, 0], [0, 0, 1], [0, 0.5, 0.5], [0, 0, 1], [1, 0, 0]])
    torch.testing.assert_close(labels, expected, atol=1e-6, rtol=0)
    decoded = symexp(labels @ readout.bins_Z)
    torch.testing.assert_close(decoded, torch.tensor([0.0, 1.0, half, 1.0, -1.0]))


@pytest.mark.parametrize("labels", ["two-hot", "hl-gauss"])
def test_bins_can_be_even_in_value(labels):
    settings = CriticSettings(kind="two-hot", symlog=False, bins=5, low=-2, high=6, labels=labels, label_sigma=0.1)
    readout = TwoHot(settings)
    assert readout.bins_Z.tolist() == [-2, 0, 2, 4, 6]
    found = readout.labels(torch.tensor([2.0, 4.0, 99.0]))
    torch.testing.assert_close(found, torch.eye(5)[[2, 3, 4]], atol=1e-5, rtol=0)
    if labels == "two-hot":
        torch.testing.assert_close(readout.labels(torch.tensor([2.5])), torch.tensor([[0, 0, 0.75, 0.25, 0]]))
    weight, bias = torch.zeros(1, 3, 5), torch.tensor([[[0.5, 0.0, 0.25, 0.25, 0.0]]]).log()
    value = readout.values(torch.ones(1, 1, 3), weight, bias, torch.zeros(1, 1, dtype=torch.int64))
    torch.testing.assert_close(value, torch.tensor([[-1.0 + 0.5 + 1.0]]))


def test_bins_even_in_value_need_a_range():
    with pytest.raises(ValidationError, match="set low and high"):
        CriticSettings(symlog=False, high=10)
    again = CriticSettings.model_validate(CriticSettings(symlog=False, low=-10, high=10).model_dump())
    assert (again.low, again.high, again.symlog) == (-10, 10, False)


def test_a_gaussian_label_has_its_mean_at_the_target():
    readout = TwoHot(CriticSettings(kind="two-hot", bins=128, labels="hl-gauss"))
    target = torch.tensor([0.0, 3.0, -700.0])
    labels = readout.labels(target)
    torch.testing.assert_close(labels.sum(-1), torch.ones(3))
    torch.testing.assert_close(symexp(labels @ readout.bins_Z), target, rtol=1e-2, atol=1e-2)
    spread = ((readout.bins_Z - symlog(target)[:, None]).square() * labels).sum(-1).sqrt() / readout.step
    torch.testing.assert_close(spread, torch.full((3,), (2.5**2 + 1 / 12) ** 0.5), rtol=1e-2, atol=0)


def test_rescale_changes_outputs_per_discount():
    scale, shift = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 3.0])
    h, action = torch.randn(6, 5), torch.randn(6, 2, 1, 3)
    table, value = shaken(ActionValues(5, 2, 4, SETTINGS)), shaken(ActionInput(5, 3, GAMMAS, SETTINGS))
    before = table(h), value(value.states(h), action)
    table.rescale(scale, shift)
    value.rescale(scale, shift)
    torch.testing.assert_close(table(h), before[0] * scale[:, None] + shift[:, None], atol=1e-5, rtol=1e-5)
    after = value(value.states(h), action)[..., 0]
    torch.testing.assert_close(after, before[1][..., 0] * scale + shift, atol=1e-5, rtol=1e-5)


@KINDS
def test_computing_all_rows_equals_computing_those_that_are_needed(settings, monkeypatch):
    """A device computes all rows of a small pass, where a CPU finds out first which of them are needed."""
    torch.manual_seed(0)
    critic = shaken(ActionInput(5, 2, GAMMAS, settings))
    state = critic.states(torch.randn(6, 5))
    action = torch.randn(6, 2, 4, 2, requires_grad=True)
    drawn = torch.rand(3, 6, 2).argsort(0)[:2]
    needed = torch.rand(3, 6, 2, 4) < 0.4
    found = []
    for waits in (True, False):
        monkeypatch.setattr(ActionInput, "may_wait", staticmethod(lambda rows, device, waits=waits: waits))
        value, all_values = critic.min_q(state, action, drawn)
        (slope,) = torch.autograd.grad(value.square().sum(), action)
        found.append((value.detach(), all_values, slope, critic(state, action.detach(), needed)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_casts_follow_the_parameters():
    critic = shaken(ActionValues(5, 2, 4, SETTINGS))
    first = critic.layers(torch.bfloat16)
    assert critic.layers(torch.bfloat16) is first
    copied = copy.deepcopy(critic)
    with torch.no_grad():
        copied.last_weight.add_(1)
        critic.last_weight.add_(2)
    for changed in (critic, copied):
        assert torch.equal(changed.layers(torch.bfloat16).last_weight, changed.last_weight.bfloat16())
