import pytest
import torch

from pipelines.config.model import CriticSettings, PopArtSettings
from pipelines.learning.popart import PopArt
from pipelines.nets.critic import ActionInput, ActionValues


def test_moments_by_hand():
    popart = PopArt(1, PopArtSettings(beta=0.25))
    assert popart.sigma_G.item() == 10
    scale, shift = popart.update(torch.tensor([[2.0], [6.0]]))  # mean 4, mean square 20
    assert popart.mu_G.item() == pytest.approx(1.0)
    assert popart.nu_G.item() == pytest.approx(0.75 * 100 + 0.25 * 20)
    sigma = (80 - 1) ** 0.5
    assert popart.sigma_G.item() == pytest.approx(sigma)
    assert (scale.item(), shift.item()) == pytest.approx((10 / sigma, -1 / sigma))


def test_normalize_and_denormalize_are_inverse_and_sigma_is_bounded():
    popart = PopArt(2, PopArtSettings(beta=1.0))
    popart.update(torch.tensor([[5.0, 1e9], [5.0, -1e9]]))
    assert popart.sigma_G.tolist() == pytest.approx([1e-4, 1e6])
    value = torch.randn(3, 2)
    torch.testing.assert_close(popart.denormalize(popart.normalize(value)), value, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["table", "input"])
def test_outputs_are_preserved(kind):
    torch.manual_seed(0)
    settings, popart, h = CriticSettings(hidden=(8,)), PopArt(2, PopArtSettings(beta=0.3)), torch.randn(5, 4)
    critic = ActionValues(4, 2, 3, settings) if kind == "table" else ActionInput(4, 3, (0.5, 0.9), settings)

    def values():
        if kind == "table":
            return popart.denormalize(critic(h).transpose(-1, -2))
        return popart.denormalize(critic(critic.states(h), torch.ones(5, 2, 1, 3))[..., 0])

    for _ in range(4):
        before = values()
        critic.rescale(*popart.update(1e3 * torch.rand(7, 2)))
        torch.testing.assert_close(values(), before, rtol=1e-4, atol=1e-3)
