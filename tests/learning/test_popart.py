import pytest
import torch

from pipelines.config.model import CriticSettings, PopArtSettings
from pipelines.learning.popart import PopArt
from pipelines.nets.critic import ActionInput, ActionValues


def test_values_start_at_what_the_mean_reward_sums_to() -> None:
    popart = PopArt((0.9, 0.99), PopArtSettings(reward_mean=-2.0), reward_scale=10.0)
    zero = torch.zeros(1, 2)
    torch.testing.assert_close(popart.denormalize(zero), torch.tensor([[-200.0, -2000.0]]))
    popart.update(-20 + torch.tensor([0.9, 0.99]) * popart.denormalize(torch.zeros(4, 2)))  # one reward of -2, then on
    torch.testing.assert_close(popart.denormalize(zero), torch.tensor([[-200.0, -2000.0]]))
    disabled = PopArt((0.9,), PopArtSettings(reward_mean=-2.0, enabled=False))
    assert disabled.denormalize(torch.ones(1)) == disabled.normalize(torch.ones(1)) == 1


def test_moments_by_hand():
    """Batches weigh 1; 3/4 and 1; 9/16, 3/4 and 1: beta 1/4 forgets a quarter an update."""
    popart = PopArt((0.9,), PopArtSettings(beta=0.25))
    scale, shift = popart.update(torch.tensor([[2.0], [6.0]]))  # mean 4, mean square 20
    assert popart.mu_G.item() == pytest.approx(4)
    assert popart.sigma_G.item() == pytest.approx(2)  # (20 - 16) ** .5
    assert (scale.item(), shift.item()) == (1, 0)  # there was nothing to preserve
    scale, shift = popart.update(torch.tensor([[11.0]]))  # mean (3 + 11) / 1.75 = 8, square (15 + 121) / 1.75
    assert popart.mu_G.item() == pytest.approx(8)
    sigma = (136 / 1.75 - 64) ** 0.5
    assert popart.sigma_G.item() == pytest.approx(sigma)
    assert (scale.item(), shift.item()) == pytest.approx((2 / sigma, -4 / sigma))
    popart.update(torch.tensor([[1.0], [3.0]]))  # mean (9/4 + 33/4 + 2) / (37/16), square (45/4 + 363/4 + 5) / (37/16)
    assert popart.mu_G.item() == pytest.approx(200 / 37)
    assert popart.sigma_G.item() == pytest.approx((107 * 16 / 37 - (200 / 37) ** 2) ** 0.5)


def test_the_scale_is_right_from_the_first_updates_on_not_after_thousands():
    """Targets of deviation .3, as in a sparse task; a start at 100 would give 9.8, 7.8 and 4.7 here."""
    popart, generator = PopArt((0.9,), PopArtSettings()), torch.Generator().manual_seed(0)
    for update in range(1, 1001):
        popart.update(0.5 + 0.3 * torch.randn(200, 1, generator=generator))
        if update in (1, 10, 100, 1000):
            assert popart.sigma_G.item() == pytest.approx(0.3, rel=0.15)
            assert popart.mu_G.item() == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
def test_early_batches_count_alike_in_any_unit(unit):
    popart = PopArt((0.9,), PopArtSettings())
    for value in (1.0, 2.0, 3.0, 4.0):
        popart.update(torch.tensor([[value * unit]]))
    assert popart.mu_G.item() == pytest.approx(2.5 * unit, rel=1e-3)
    assert popart.sigma_G.item() == pytest.approx(1.25**0.5 * unit, rel=1e-3)


def test_large_values_that_differ_a_little_keep_their_deviation():
    popart = PopArt((0.9,), PopArtSettings())
    for _ in range(5):
        popart.update(1e4 + torch.tensor([[-0.5], [0.5]]))
    assert popart.sigma_G.item() == pytest.approx(0.5, rel=1e-3)


def test_values_are_zero_until_their_scale_is_known():
    popart = PopArt((0.9, 0.99), PopArtSettings())
    assert not popart.denormalize(torch.randn(3, 2)).any()
    popart.update(torch.ones(3, 2))
    assert popart.denormalize(torch.zeros(1, 2)).tolist() == [[1, 1]]


def test_targets_that_are_not_finite_leave_the_moments_alone():
    popart = PopArt((0.9, 0.99), PopArtSettings(beta=0.5))
    popart.update(torch.tensor([[1.0, 1.0], [3.0, 3.0]]))
    popart.update(torch.tensor([[5.0, torch.nan], [5.0, 5.0]]))
    assert popart.mu_G[1] == 2
    assert popart.sigma_G.isfinite().all()


def test_disabled_it_changes_nothing():
    popart = PopArt((0.9,), PopArtSettings(enabled=False))
    assert [x.item() for x in popart.update(torch.tensor([[5.0], [50.0]]))] == [1, 0]
    value = torch.randn(4, 1)
    assert popart.normalize(value).equal(value)
    assert popart.denormalize(value).equal(value)


def test_normalize_and_denormalize_are_inverse_and_sigma_is_bounded():
    popart = PopArt((0.9, 0.99), PopArtSettings(beta=1.0))
    popart.update(torch.tensor([[5.0, 1e9], [5.0, -1e9]]))
    assert popart.sigma_G.tolist() == pytest.approx([1e-4, 1e6])
    value = torch.randn(3, 2)
    torch.testing.assert_close(popart.denormalize(popart.normalize(value)), value, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", ["table", "input"])
def test_outputs_are_preserved(kind):
    torch.manual_seed(0)
    settings, popart, h = CriticSettings(hidden=(8,)), PopArt((0.9, 0.99), PopArtSettings(beta=0.3)), torch.randn(5, 4)
    critic = ActionValues(4, 2, 3, settings) if kind == "table" else ActionInput(4, 3, (0.5, 0.9), settings)

    def values():
        if kind == "table":
            return popart.denormalize(critic(h).transpose(-1, -2))
        return popart.denormalize(critic(critic.states(h), torch.ones(5, 2, 1, 3))[..., 0])

    critic.rescale(*popart.update(1e3 * torch.rand(7, 2)))
    for _ in range(4):
        before = values()
        critic.rescale(*popart.update(1e3 * torch.rand(7, 2)))
        torch.testing.assert_close(values(), before, rtol=1e-4, atol=1e-3)
