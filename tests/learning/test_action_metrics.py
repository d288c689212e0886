"""What an update reports of the actions: does the policy prefer the best one, and can the critics tell which it is?"""

import math

import pytest
import torch

from pipelines.lake.spaces import Box
from pipelines.learning.agent import rank_actions
from pipelines.learning.diagnostics import inspect
from tests.learning.factories import agent, batch
from tests.learning.test_agent import generator

# Two critics, three rows, three actions.
TABLE_CNA = torch.tensor(
    [
        [[1.0, 3.0, 2.0], [5.0, 0.0, 0.0], [1.0, 1.0, 4.0]],
        [[1.0, 5.0, 0.0], [1.0, 4.0, 0.0], [1.0, 0.0, 2.0]],
    ]
)


def test_best_action_has_the_highest_mean_over_critics():
    best, gap, spread = rank_actions(TABLE_CNA, None)
    # Means: 1 4 1, 3 2 0 and 1 .5 3.
    assert best.tolist() == [1, 0, 2]
    assert gap.tolist() == [3, 1, 2]
    assert spread.tolist() == [1, 2, 1]


def test_illegal_actions_are_not_ranked():
    legal = torch.tensor([[True, False, True], [False, False, True], [False, False, False]])
    best, gap, spread = rank_actions(TABLE_CNA, legal)
    assert best.tolist()[1:] == [2, 2]
    assert gap.tolist() == [0, 0, 2]  # two equal means, a single legal action, and none: all count
    assert spread.tolist()[1:] == [0, 1]


def literal(owner, data):
    """Agreement, gap, spread and share of the entropy, step by step from the definitions."""
    steps = owner.valid_steps(data, owner.encode(data))
    critic, popart = owner.heads.critic, owner.popart
    sums = dict.fromkeys(("agreement", "action_gap", "action_spread", "entropy_share"), 0.0)
    table_CNA = critic(steps.h_ND)[:, :, -1].double()
    legal_NA = None if steps.legal is None else steps.legal[:, 0]
    for row in range(len(steps.h_ND)):
        params = steps.params_NGP[row, -1]
        legal = None if legal_NA is None else legal_NA[row]
        allowed = [a for a in range(len(params)) if legal is None or legal[a]] or [*range(len(params))]
        q = {a: table_CNA[:, row, a].mean().item() for a in allowed}
        best = max(q, key=q.get)
        probs = owner.heads.policy.probs(params, legal).tolist()
        sums["agreement"] += max(allowed, key=lambda a: probs[a]) == best
        scale = popart.sigma_G[-1].item() / owner.settings.reward_scale
        others = [value for a, value in q.items() if a != best]
        sums["action_gap"] += scale * (q[best] - max(others)) if others else 0
        values = table_CNA[:, row, best].tolist()
        mean = sum(values) / len(values)
        sums["action_spread"] += scale * math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
        entropy = -sum(p * math.log(p) for p in probs if p > 0)
        sums["entropy_share"] += entropy / math.log(len(allowed)) if len(allowed) > 1 else 0
    return {name: value / len(steps.h_ND) for name, value in sums.items()}


@pytest.mark.parametrize("masked", [False, True])
def test_action_metrics_equal_their_definitions(masked):
    observation = {"obs": Box(shape=(3,)), "legal": Box(shape=(4,))} if masked else None
    changes = {"action_mask": "legal"} if masked else {}
    owner = agent("discrete", observation, reward_scale=3.0, critic={"hidden": [16], "ensemble": 4}, **changes)
    data = batch(owner, lengths=(9,) * 12)
    for _ in range(3):  # let PopArt leave its initial scale
        owner.loss(data, generator())
    _, metrics = owner.loss(data, generator())
    for name, value in literal(owner, data).items():
        assert metrics[name].item() == pytest.approx(value, rel=1e-4), name


def test_policy_that_follows_the_critics_agrees_always_and_one_that_opposes_them_never():
    owner = agent("discrete", sequence="identity", critic={"hidden": [8], "ensemble": 2})
    data = batch(owner)
    with torch.no_grad():  # values and policies that depend on no state: the last layers' biases alone
        owner.heads.critic.last_weight.zero_()
        owner.heads.critic.last_bias.copy_(torch.tensor([0.0, 3.0, 1.0, 2.0]).repeat(3))
        last = list(owner.heads.actor.parameters())
        for parameter in last:
            parameter.zero_()
        for logits, expected in (([0.0, 4.0, 1.0, 1.0], 1.0), ([4.0, 0.0, 1.0, 1.0], 0.0)):
            last[-1].copy_(torch.tensor(logits).repeat(3).view_as(last[-1]))
            _, metrics = owner.loss(data, generator())
            assert metrics["agreement"].item() == pytest.approx(expected)
            assert metrics["action_spread"].item() == 0


def test_inspection_of_steps_has_the_figures_whose_means_are_the_metrics():
    owner = agent("discrete", reward_scale=3.0)
    data = batch(owner)
    owner.loss(data, generator())
    _, metrics = owner.loss(data, generator())
    figures = inspect(owner, data)
    for name in ("agreement", "action_gap"):
        assert figures[name].shape == (*data.mask.shape, 3)
        mean = figures[name][data.mask.numpy()][:, -1].mean()
        assert metrics[name].item() == pytest.approx(mean, rel=1e-4), name
    assert "action_gap" not in inspect(agent("discrete", kind="multi-task"), data)


@pytest.mark.parametrize(("action", "kind"), [("box", "actor-critic"), ("discrete", "multi-task")])
def test_agents_without_a_table_of_values_rank_no_actions(action, kind):
    owner = agent(action, kind=kind)
    _, metrics = owner.loss(batch(owner), generator())
    assert not {"agreement", "action_gap", "action_spread"} & metrics.keys()
    assert "ensemble_disagreement" in metrics
    assert ("entropy_share" in metrics) == (action == "discrete")
