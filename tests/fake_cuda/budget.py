"""What an update and a step of acting ask of a device: kernel launches, waits of the host, copies in both directions.

Small networks are bound by the host, which spends about 10 microseconds on each launch and stalls at each wait. The
numbers of `UPDATES` and `ACTING` may only shrink: lower them with the change that saves some.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.fake_cuda.device import FakeCuda  # before torch

import torch  # isort: skip

from pipelines.config.model import AgentSettings
from pipelines.config.settings import TrainSettings
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.agent import Agent
from pipelines.learning.agent_types import resolve
from pipelines.learning.heads import make_heads
from pipelines.nets.critic import ActionInput
from pipelines.training.learner import Learner
from pipelines.training.trainer import means
from tests.learning import factories

TRANSFORMER = {"kind": "transformer", "d_model": 256, "num_layers": 3, "num_heads": 8, "d_ff": 1024}
ACTIONS = {"discrete": Discrete(n=4), "continuous": Box(shape=(4,))}
BF16 = {"precision": "bf16"}
Counts = tuple[int, int, int, int]  # launches, waits, copies to the device, copies to the host

# By action space, agent and settings of training.
UPDATES: list[tuple[str, dict[str, Any], dict[str, Any], Counts]] = [
    ("discrete", {}, {}, (523, 1, 1, 0)),
    ("discrete", {}, BF16, (596, 1, 1, 0)),
    ("discrete", {}, BF16 | {"packing": True}, (664, 1, 2, 0)),
    ("discrete", {}, BF16 | {"cuda_graphs": True}, (7, 1, 1, 0)),
    ("discrete", {}, BF16 | {"grad_accumulation": 4}, (3122, 1, 4, 0)),
    ("discrete", {"kind": "multi-task"}, BF16, (649, 1, 1, 0)),
    ("continuous", {}, BF16, (635, 1, 1, 0)),
    ("continuous", {"actor": {"distribution": "grid"}, "trace": "retrace"}, BF16, (672, 1, 1, 0)),
]
# By sequence encoder and precision, for 16 actors.
ACTING: list[tuple[dict[str, Any], str, Counts]] = [
    (TRANSFORMER, "float32", (114, 1, 5, 1)),
    (TRANSFORMER, "bf16", (140, 1, 5, 1)),
    ({"kind": "gru"}, "bf16", (62, 1, 5, 1)),
    ({"kind": "mamba", "num_layers": 3}, "bf16", (234, 1, 5, 1)),
]


def _name(value: Any) -> str | None:
    return None if isinstance(value, tuple) else str(value)


def counts(device: FakeCuda) -> Counts:
    return tuple(each.total() for each in (device.launches, device.syncs, device.h2d, device.d2h))  # type: ignore[return-value]


def require(device: FakeCuda, budget: Counts) -> None:
    """Require the counts of the table. Versions of torch may differ by a twentieth of the launches."""
    spent = counts(device)
    where = "\n".join(
        f"{name}: {counter.most_common(30)}"
        for name, counter in (("launches", by_file(device.launches)), ("waits", device.syncs), ("to it", device.h2d))
    )
    assert all(s <= b for s, b in zip(spent, budget, strict=True)), f"{spent} exceed the budget {budget}\n{where}"
    is_tight = spent[1:] == budget[1:] and spent[0] >= 0.95 * budget[0]
    assert is_tight, f"{spent} are below the budget {budget}: lower it\n{where}"


def by_file(launches: Counter[str]) -> Counter[str]:
    found = Counter[str]()
    for place, number in launches.items():
        found[place.rpartition(" ")[2].partition(":")[0]] += number
    return found


@pytest.mark.parametrize(("action", "agent", "train", "budget"), UPDATES, ids=_name)
def test_update(action: str, agent: dict[str, Any], train: dict[str, Any], budget: Counts, device: FakeCuda) -> None:
    spaces = Spaces(observation={"obs": Box(shape=(20,))}, action=ACTIONS[action])
    settings = AgentSettings.model_validate({"sequence": TRANSFORMER} | agent)
    options: dict[str, Any] = {"batch_size": 4, "context_length": 32, "device": "cuda", "threads": 1}
    options |= {"precision": "float32", "cuda_graphs": False} | train
    learner = Learner(spaces, settings, TrainSettings(log_every=1000, **options), seed=0)
    size = learner.micro_batch_size
    lengths = (33, 5, 20, 8) if "packing" in train else (33,) * size
    data = factories.windows(spaces, lengths=lengths, rows=33, terminated=0.0)
    for _ in range(2):
        learner.step(lambda _: data)
        device.reset()
    learner.step(lambda _: data)
    require(device, budget)


def test_critics_compute_a_large_update_in_four_chunks(device: FakeCuda) -> None:
    """Windows of 64 x 1024 steps, seven discounts, four critics: each chunk costs a pass of launches."""
    settings = factories.settings(gammas=[0.5] * 6)
    heads = make_heads(8, 8, ACTIONS["continuous"], (*settings.gammas, 0.99), settings, resolve(settings))
    assert isinstance(heads.critic, ActionInput)
    assert heads.critic.members == 4
    assert len([*heads.critic.split_chunks(torch.empty(64 * 1024, 1, device="cuda"), 7)]) == 4


def test_log_line(device: FakeCuda) -> None:
    """Its figures, means over updates, come to the host in one copy."""
    recent = [{name: torch.rand((), device="cuda") for name in ("loss", "q", "v")} for _ in range(25)]
    device.reset()
    assert 0 < means(recent)["q"] < 1
    assert (device.syncs.total(), device.d2h.total()) == (1, 1)


@pytest.mark.parametrize(("sequence", "precision", "budget"), ACTING, ids=_name)
def test_acting(sequence: dict[str, Any], precision: str, budget: Counts, device: FakeCuda) -> None:
    spaces = Spaces(observation={"obs": Box(shape=(20,))}, action=ACTIONS["discrete"])
    agent = Agent(spaces, AgentSettings.model_validate({"sequence": sequence})).to("cuda").eval()
    policy = AgentPolicy(agent, num_actors=16, capacity=64, device="cuda", precision=precision)
    observation = {"obs": np.zeros((16, 20), np.float32)}
    for step in range(3):
        device.reset()
        policy.act(observation, np.zeros(16, np.int32), np.zeros(16, np.float32), np.full(16, step))
    require(device, budget)
    assert torch.cuda.is_available()
