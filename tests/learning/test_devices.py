"""Tensors are made where the data is: with another default device than the data's, nothing changes."""

import numpy as np
import pytest
import torch

from pipelines.learning.acting import AgentPolicy
from pipelines.learning.batch import HostBatch, TensorBatch
from pipelines.learning.diagnostics import inspect
from pipelines.nets.attention import BACKENDS, AttentionWindow
from pipelines.nets.packing import Packing
from tests.learning.factories import ACTIONS, agent, batch, windows
from tests.tiers import crossed

ELSEWHERE = torch.device("meta")  # where a tensor has no data: one that got there by default cannot be used
SEQUENCES = {
    "transformer": {"kind": "transformer", "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 32, "dropout": 0},
    "transformer-window": {"kind": "transformer", "d_model": 16, "num_heads": 2, "window": 2, "sink": 1, "dropout": 0},
    "transformer-rope": {"kind": "transformer", "d_model": 16, "num_heads": 2, "position": "rope", "dropout": 0},
    "gru": {"kind": "gru", "hidden": 8, "output": 8},
    "mingru": {"kind": "mingru", "d_model": 8, "num_layers": 1},
    "mamba": {"kind": "mamba", "d_model": 8, "num_layers": 1, "state": 4},
}
CASES = [
    *((kind, action, {}) for kind in ("actor-critic", "multi-task", "behaviour-cloning") for action in ACTIONS),
    *(("actor-critic", "discrete", {"sequence": sequence}) for sequence in SEQUENCES.values()),
    ("actor-critic", "box", {"actor": {"hidden": [8], "distribution": "beta"}, "n_step": 3}),
    ("multi-task", "box", {"actor": {"hidden": [8], "distribution": "gaussian-mixture"}}),
    ("multi-task", "discrete", {"critic": {"hidden": [8], "labels": "hl-gauss"}, "filter": {"kind": "exp"}}),
]


@pytest.mark.parametrize(("case", "packed"), crossed(CASES, [False, True]), ids=lambda value: str(value)[:80])
def test_an_update_is_computed_where_its_batch_is(case, packed):
    (kind, action, more), losses = case, []
    for default in ("cpu", ELSEWHERE):
        learner = agent(action, kind=kind, **({"critic": {"hidden": [16, 16]}} | more))
        learner.packed = packed
        data = batch(learner)
        with torch.device(default):
            loss, metrics = learner.loss(data, torch.Generator("cpu").manual_seed(0))
            loss.backward()
            learner.update_targets()
            if kind != "behaviour-cloning":
                inspect(learner, data)
        assert {value.device.type for value in metrics.values()} == {"cpu"}
        losses.append(loss)
    assert torch.equal(*losses)


@pytest.mark.parametrize("name", SEQUENCES)
def test_acting_is_computed_where_the_agent_is(name):
    actions = []
    for default in ("cpu", ELSEWHERE):
        actor = agent(sequence=SEQUENCES[name]).eval()
        columns = windows(actor.spaces, lengths=(5,) * 3, rows=5).columns
        prefix = [{name: column[i, :3] for name, column in columns.items()} for i in range(3)]
        with torch.device(default):
            policy = AgentPolicy(actor, num_actors=3, capacity=4, greedy=True)
            policy.rebuild(prefix)
            for t in (3, 0):
                now = {"obs": columns["obs"][:, t]}
                act = policy.act(now, columns["action"][:, t], columns["reward"][:, t], np.full(3, t))
            actions.append(act)
    np.testing.assert_array_equal(*actions)


def test_batches_and_packings_say_where_they_are_made():
    learner = agent()
    with torch.device(ELSEWHERE):
        source = windows(learner.spaces)
        data = TensorBatch.from_numpy(source, learner.spaces)
        block = HostBatch.of(source, data, torch.device("meta")).block
        packing = Packing([3, 1, 2], time=3, device="cpu")
    found = [value.device.type for value in vars(data).values() if isinstance(value, torch.Tensor)]
    assert {*found, block.device.type, packing.tokens_N.device.type, packing.by_age[0].device.type} == {"cpu"}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["dense", "sdpa", "banded", "flex"])
@torch.no_grad()
def test_masks_are_made_where_queries_are(backend, packed):
    if backend == "banded" and packed:
        pytest.skip("is not for packed rows")
    window, lengths = AttentionWindow(size=6, sink=1), (13, 5, 4, 4)  # lengths no other test has: masks are kept
    packing = Packing(lengths, time=13) if packed else None
    q = torch.randn(2, 2, 13, 8)
    with torch.device(ELSEWHERE):
        out = BACKENDS[backend](q, q, q, window, packing)
    assert out.device.type == "cpu"
