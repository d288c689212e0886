"""Which critics count, by numbers worked out by hand: three critics that value everything at 1, 2 and 4.

The least of two drawn without replacement is 1, 1 or 2: 4/3 in the mean (of all three it would be 1); the mean of two
drawn is 7/3 in the mean, 1.5 to 3 in each place.
"""

import pytest
import torch

from tests.learning.factories import agent, batch
from tests.learning.test_agent import generator

CRITICS = {"hidden": [8], "ensemble": 3, "subset": 2}
ACTIONS = ["discrete", "box", "multi_discrete", "multi_binary"]


def constant(action, **changes):
    """Three discounts; values neither normalized nor scaled."""
    changes = {"critic": CRITICS, "popart": {"enabled": False}, "reward_scale": 1, "bc_weight": 0} | changes
    owner = agent(action, sequence="identity", **changes)
    for heads in (owner.heads, owner.target_heads):
        heads.critic.last_weight.data.zero_()
        for member, value in enumerate((1.0, 2.0, 4.0)):
            heads.critic.last_bias.data[member] = value
    return owner


def many(owner):
    return batch(owner, lengths=[9] * 60, reward=0.0, terminated=0.0)  # 480 steps, three discounts each


@pytest.mark.parametrize("action", ACTIONS)
def test_the_policy_maximises_the_least_of_the_drawn_critics(action):
    owner = constant(action)
    loss = owner.loss(many(owner), generator())[1]["actor_loss"].item()
    assert loss == pytest.approx(-4 / 3, abs=0.05)  # a deviation of .47 / sqrt(1440) = .012


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(("online", "values", "mean"), [(1.0, [1.0, 2.0], 4 / 3), (0.0, [1.5, 2.5, 3.0], 7 / 3)])
def test_a_next_state_has_the_least_or_the_mean_of_the_drawn_critics(action, online, values, mean):
    owner = constant(action, actor_weight=online)
    data = many(owner)
    target = owner.targets(data, owner.encode(data), generator()) / owner.gamma_G
    found = target.flatten().unique().tolist()
    assert sorted({round(value, 4) for value in found}) == values
    assert target.mean().item() == pytest.approx(mean, abs=0.06)
    assert not torch.equal(target[:, 0], target[:, 1])  # drawn for each discount


@pytest.mark.parametrize("action", ACTIONS)
def test_advantages_are_between_means_of_all_critics(action):
    """All actions have the same values, so nothing is an advantage."""
    owner = constant(action, filter={"kind": f"{__name__}:seen"}, bc_weight=1)
    SEEN.clear()
    owner.loss(many(owner), generator())
    torch.testing.assert_close(SEEN[0], torch.zeros_like(SEEN[0]), atol=1e-5, rtol=0)


SEEN = []


def seen(advantage, mask):
    SEEN.append(advantage)
    return torch.ones_like(advantage)
