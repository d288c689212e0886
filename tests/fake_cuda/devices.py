"""Updates, diagnostics and checkpoints on a device: no operator mixes devices, and losses are those of the CPU."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fake_cuda.device import CUDA  # before torch

import torch  # isort: skip

from pipelines.config.model import AgentSettings
from pipelines.config.settings import TrainSettings
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Spaces
from pipelines.learning import checkpoint as checkpoints
from pipelines.learning.diagnostics import inspect
from pipelines.training.learner import Learner
from pipelines.training.trainer import means
from tests.learning import factories
from tests.learning.test_devices import CASES
from tests.tiers import crossed, some

SMALL: dict[str, Any] = {
    "timestep": {"hidden": [16], "output": 16}, "actor": {"hidden": [16]}, "critic": {"hidden": [16, 16]},
    "sequence": {"kind": "transformer", "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 32, "dropout": 0},
}  # fmt: skip
OBSERVATIONS: dict[str, dict[str, Any]] = {
    "numbers": {"obs": Box(shape=(3,))},
    "image": {"obs": Box(shape=(16, 16, 3), dtype="uint8"), "more": Discrete(n=3)},
    "text": {"obs": Box(shape=(3,)), "text": MultiDiscrete(nvec=(7, 7, 7, 7))},
    "action mask": {"obs": Box(shape=(3,)), "legal": MultiBinary(n=4)},
}


@pytest.mark.parametrize(("case", "packed"), crossed(CASES, [False, True]), ids=lambda value: str(value)[:80])
def test_losses_and_diagnostics_are_those_of_the_cpu(case: Any, packed: bool) -> None:
    (kind, action, more), losses = case, []
    for device in ("cpu", "cuda"):
        agent = factories.agent(action, kind=kind, **({"critic": {"hidden": [16, 16]}} | more)).to(device)
        agent.packed = packed
        data = factories.move(factories.windows(agent.spaces), agent, device)
        loss, metrics = agent.loss(data, torch.Generator("cpu").manual_seed(0))
        loss.backward()
        agent.update_targets()
        if kind != "behaviour-cloning":
            inspect(agent, data)
        assert {value.device.type for value in metrics.values()} == {device}
        losses.append(loss.detach().cpu())
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


def learner(observation: str, device: str, **train: Any) -> Learner:
    agent = dict(SMALL)
    if observation == "action mask":
        agent["action_mask"] = "legal"
    if observation == "text":
        agent["timestep"] = agent["timestep"] | {"columns": {"text": "tokens"}}
    spaces = Spaces(observation=OBSERVATIONS[observation], action=Discrete(n=4))
    options: dict[str, Any] = {"batch_size": 4, "context_length": 8, "threads": 1, "log_every": 2, "ema_decay": 0.9}
    settings = TrainSettings(device=device, precision="float32", **(options | train))
    return Learner(spaces, AgentSettings.model_validate(agent), settings, seed=0)


@pytest.mark.parametrize(
    ("observation", "accumulation", "packing"),
    some(list(product(OBSERVATIONS, [1, 2], [False, True])), 0, 3, 5, 6, 8, 11, 13, 14),
)
def test_logged_updates_are_those_of_the_cpu(
    observation: str, accumulation: int, packing: bool, tmp_path: Path
) -> None:
    options = {"packing": packing, "grad_accumulation": accumulation}
    here, there = (learner(observation, device, **options) for device in ("cpu", "cuda"))

    def on_cpu() -> tuple[list[torch.Generator], list[int]]:
        generators, seeds = Learner.randomness(there)
        return [torch.Generator().manual_seed(each.initial_seed()) for each in generators], seeds

    there.randomness = on_cpu  # type: ignore[method-assign]
    data = factories.windows(
        here.spaces, lengths=(9, 4, 4, 3)[: here.micro_batch_size], terminated=0.0,
        importance=np.array([1.0, 0.5, 0.2, 0.7])[: here.micro_batch_size],
    )  # fmt: skip
    data.trajectory, data.lake = np.arange(here.micro_batch_size), None
    figures, errors = [], []
    for trained in (here, there):
        learnt: list[np.ndarray] = []
        batch = _batch(data)
        recent = [trained.step(lambda _: batch, lambda *args: learnt.append(args[2])) for _ in range(2)]  # noqa: B023
        figures.append(means(recent))
        errors.append(np.concatenate(learnt))
    assert figures[0].keys() == figures[1].keys()
    for name, value in figures[0].items():
        assert figures[1][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    np.testing.assert_allclose(*errors, rtol=1e-3, atol=1e-5)
    there.save(tmp_path, {"env": {}})
    again = learner(observation, "cuda", **options)
    again.restore(checkpoints.load(tmp_path))
    for a, b in zip(there.parameters, again.parameters, strict=True):
        assert a.device == b.device == CUDA
        assert torch.equal(a, b)


def _batch(windows: Any) -> Any:
    from pipelines.data.batch import Batch

    names = ("columns", "lengths", "start", "importance", "trajectory", "lake")
    return Batch(**{name: getattr(windows, name) for name in names})
