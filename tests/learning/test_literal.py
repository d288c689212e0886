"""The fused update against the literal one: loss and every gradient, for all agents, action spaces and options."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipelines.lake.spaces import Box, MultiBinary
from pipelines.learning.batch import StepIndex
from tests.learning.factories import ACTIONS, agent, batch
from tests.learning.literal import Literal
from tests.learning.test_agent import in_parts
from tests.tiers import crossed, some

MULTI = {"kind": "multi-task"}
EVEN = {"labels": "two-hot", "symlog": False, "bins": 5, "low": -3, "high": 2, "hidden": [6]}
SMALL = {"actor": {"hidden": [8]}, "critic": {"hidden": [8, 6]}, "timestep": {"hidden": [8], "output": 8}}
LENGTHS = {"lengths": (5, 3), "rows": 5}

GRID = {"distribution": "grid", "grid_points": 2, "hidden": [8]}
CASES = {
    **{f"actor-critic {action}": (action, {}) for action in ACTIONS},
    **{f"multi-task {action}": (action, MULTI) for action in ACTIONS},
    "n-step": ("discrete", {"n_step": 3}),
    "n-step box": ("box", {"n_step": 3}),
    "peng": ("discrete", {"trace": "peng", "trace_decay": 0.7}),
    "peng box": ("box", {"trace": "peng", "trace_decay": 0.7}),
    "tree backup": ("discrete", {"trace": "tree-backup", "trace_decay": 0.9}),
    "retrace": ("discrete", {"trace": "retrace", "trace_decay": 0.9}),
    "entropy bonus": ("discrete", {"entropy_weight": 0.3}),
    "entropy bonus of a box": ("box", {"entropy_weight": 0.3}),
    "entropy bonus of bits": ("multi_binary", {"entropy_weight": 0.3}),
    "one hidden layer": ("box", {"critic": {"hidden": [6]}}),
    "one hidden layer of a table": ("discrete", {"critic": {"hidden": [6]}}),
    "three hidden layers, three critics": ("box", {"critic": {"hidden": [6, 5, 4], "ensemble": 3, "subset": 1}}),
    "samples": ("box", {"critic_samples": 2, "actor_samples": 3}),
    "samples of bits": ("multi_binary", {"critic_samples": 3, "actor_samples": 2}),
    "online actor in targets": ("discrete", {"target_actor": False}),
    "online actor in targets of a box": ("box", {"target_actor": False}),
    "exp": ("box", {"filter": {"kind": "exp"}}),
    "leaky relu": ("discrete", {"filter": {"kind": "leaky-relu"}}),
    "two-hot maximised": ("box", {"critic": {"kind": "two-hot", "labels": "two-hot", "hidden": [8, 6]}}),
    "two-hot of choices maximised": ("discrete", {"critic": {"kind": "two-hot", "hidden": [8, 6]}}),
    "hl-gauss": ("discrete", MULTI | {"critic": {"hidden": [6]}}),
    "few bins": ("box", MULTI | {"critic": {"labels": "two-hot", "bins": 5, "low": -3, "high": 2, "hidden": [6]}}),
    "bins even in value": ("box", MULTI | {"critic": EVEN}),
    "bins even in value maximised": ("box", {"critic": EVEN | {"kind": "two-hot"}}),
    "gaussian over bins even in value": ("discrete", MULTI | {"critic": EVEN | {"labels": "hl-gauss"}}),
    "scalar multi-task": ("discrete", MULTI | {"critic": {"kind": "scalar", "hidden": [6]}}),
    "weights by hand": ("box", MULTI | {"actor_weight": 0.5, "bc_weight": 0.3}),
    "means instead of minima": ("box", {"actor_weight": 0.0}),
    "one discount": ("box", {"gammas": []}),
    "without value normalization": ("discrete", {"popart": {"enabled": False}}),
    "beta": ("box", {"actor": {"distribution": "beta", "hidden": [8]}}),
    "grid": ("box", {"actor": {"distribution": "grid", "hidden": [8]}, "entropy_weight": 0.1}),
    "grid with traces": ("box", {"actor": GRID, "trace": "retrace", "trace_decay": 0.9}),
    "grid of a multi-task agent": ("box", MULTI | {"actor": GRID}),
    "mixture": ("box", {"actor": {"distribution": "gaussian-mixture", "hidden": [8]}}),
    "gumbel": ("multi_discrete", {"actor": {"gumbel": True, "hidden": [8]}}),
    "gumbel of bits": ("multi_binary", {"actor": {"gumbel": True, "hidden": [8]}}),
}


def made(action, changes, **options):
    """An agent with policies far from uniform, whose targets differ from it."""
    owner = agent(action, sequence="gru", **(SMALL | changes), **options)
    noise = torch.Generator().manual_seed(1)
    for parameter in owner.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=noise)
    if owner.advantage_scale is not None:
        owner.advantage_scale.square_G += torch.linspace(0.1, 3, len(owner.gammas))
        owner.advantage_scale.reward_square += 2.0
        owner.advantage_scale.updates += 3
        owner.advantage_scale.reward_updates += 2
    if not owner.settings.popart.enabled:
        return owner
    owner.popart.mu_G += torch.linspace(-1, 1, len(owner.gammas))
    owner.popart.variance_G += torch.linspace(0.5, 9, len(owner.gammas))
    owner.popart.updates += 3
    return owner


def literal(owner):
    multi = owner.settings.kind == "multi-task"
    said = owner.settings
    weights = (0.0, 1.0) if multi else (1.0, 0.1)
    given = (said.actor_weight, said.bc_weight)
    weights = tuple(w if g is None else g for w, g in zip(weights, given, strict=True))
    box = isinstance(owner.spaces.action, Box)
    return Literal(
        owner,
        weights,
        critic=said.critic.kind or ("two-hot" if multi else "scalar"),
        samples=(said.critic_samples or 1, said.actor_samples or (3 if multi else 1)),
        label_smoothing=0.01 if multi and not box else 0.0,
    )


def tolerance(name):
    """Relative error of a gradient; encoders, in float32 on both sides, enlarge what is rounded before them."""
    return 1e-5 if name.startswith("heads.") else 5e-5


def compare(owner, data):
    slow = literal(copy.deepcopy(owner))
    expected = slow.loss(data, torch.Generator().manual_seed(3))
    expected.backward()
    loss, metrics = owner.loss(data, torch.Generator().manual_seed(3))
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, value in slow.metrics.items():
        assert metrics[name].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-6), name
    for (name, ours), theirs in zip(owner.named_parameters(), slow.agent.parameters(), strict=True):
        if theirs.grad is None or not theirs.grad.any():
            assert ours.grad is None or not ours.grad.any(), name
            continue
        error = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
        assert error < tolerance(name), f"{name}: {error}"
    torch.testing.assert_close(owner.state_dict(), slow.agent.state_dict(), rtol=1e-5, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("name", some(CASES, *range(0, 99, 2)))
def test_loss_and_gradients_equal_the_literal_ones(name):
    action, changes = CASES[name]
    owner = made(action, changes)
    compare(owner, batch(owner, **LENGTHS))


@pytest.mark.parametrize(("kind", "action"), crossed(["actor-critic", "multi-task"], ["discrete", "box"]))
def test_importance_multiplies_what_a_window_adds(kind, action):
    owner = made(action, {"kind": kind})
    compare(owner, batch(owner, importance=np.array([0.3, 1.7]), **LENGTHS))


@pytest.mark.parametrize(
    ("action", "changes"),
    some(
        [
            ("discrete", {"entropy_weight": 0.3}),
            ("box", {"actor_samples": 2, "filter": {"kind": "exp"}}),
            ("discrete", MULTI),
            ("box", MULTI | {"actor_weight": 0.5}),
        ],
        0,
        1,
    ),
)
@pytest.mark.parametrize("importance", [None, np.array([0.3, 1.7])])
def test_an_actor_mask_leaves_steps_out_of_the_policys_terms_alone(action, changes, importance):
    owner = made(action, changes)
    data = batch(owner, importance=importance, **LENGTHS)
    taught = torch.tensor([[True, False, False, True], [False, True, False, False]])
    compare(owner, replace(data, actor_counted=StepIndex.of(data.mask & taught)))


@pytest.mark.parametrize("kind", ["actor-critic", "multi-task"])
@pytest.mark.parametrize("action", some(["discrete", "multi_discrete", "multi_binary"], 0))
def test_legal_actions(kind, action):
    size = ACTIONS[action].flat_size
    observation = {"obs": Box(shape=(3,)), "obs.legal": MultiBinary(n=size)}
    owner = made(action, {"kind": kind, "action_mask": "obs.legal"}, observation=observation)
    data = batch(owner, **LENGTHS)
    assert not data.observation["obs.legal"].all()
    compare(owner, data)


def test_retrace_counts_legal_actions_only():
    observation = {"obs": Box(shape=(3,)), "obs.legal": MultiBinary(n=ACTIONS["discrete"].n)}
    owner = made("discrete", {"trace": "retrace", "action_mask": "obs.legal"}, observation=observation)
    compare(owner, batch(owner, **LENGTHS))


@pytest.mark.system
def test_rows_in_several_chunks(monkeypatch):
    monkeypatch.setattr("pipelines.nets.critic.CPU_ROWS", 5)
    for action, changes in (("discrete", {}), ("box", {"actor_samples": 2}), ("discrete", MULTI)):
        owner = made(action, changes)
        compare(owner, batch(owner, **LENGTHS))


@pytest.mark.parametrize(
    "name", some(["actor-critic box", "multi-task discrete", "multi-task box", "actor-critic discrete"], 0, 1)
)
def test_micro_batches_add_up_to_the_literal_batch(name):
    action, changes = CASES[name]
    owner = made(action, changes)
    data = batch(owner, lengths=(5, 3, 4), rows=5)
    slow = literal(copy.deepcopy(owner))
    slow.loss(data, torch.Generator().manual_seed(3)).backward()
    for loss, _ in owner.losses(*in_parts(data, 3, seed=3)):
        loss.backward()
    for (name_of, ours), theirs in zip(owner.named_parameters(), slow.agent.parameters(), strict=True):
        if ours.grad is None:
            continue
        error = (ours.grad - theirs.grad).norm() / theirs.grad.norm().clamp_min(1e-12)
        assert error < tolerance(name_of), f"{name_of}: {error}"
