"""Training-only behavior is on in every update, however the agent was used before, and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipelines.data.batch import Batch
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.batch import TensorBatch
from pipelines.learning.diagnostics import inspect
from pipelines.training.learner import Learner
from tests.stages.recipes import tiny

SPACES = Spaces(observation={"obs.image": Box(shape=(8, 8, 1), dtype="uint8")}, action=Discrete(n=3))
SHIFT = 2


def made(**train: Any) -> tuple[Learner, list[torch.Tensor]]:
    """A learner that shifts every image while learning, and what its image encoder sees."""
    image = {"random_shift": SHIFT, "random_shift_share": 1.0}
    settings = tiny(agent={"timestep": {"image": image}, "sequence": {"dropout": 0.0}}, train=train)
    trained, seen = Learner(SPACES, settings.agent, settings.train, seed=3), []
    encoder = trained.agent.timestep.image_encoders[0]
    assert isinstance(encoder, torch.nn.Module)
    encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    return trained, seen


def windows(size: int = 6, rows: int = 6) -> Batch:
    columns = Schema(SPACES).empty(size * rows)
    columns = {name: column.reshape(size, rows, *column.shape[1:]) for name, column in columns.items()}
    rng = np.random.default_rng(0)
    columns["obs.image"] = rng.integers(0, 256, (size, rows, 8, 8, 1)).astype(np.uint8)
    columns["reward"] = rng.normal(size=(size, rows)).astype(np.float32)
    return Batch(columns=columns, lengths=np.full(size, rows), start=np.zeros(size, dtype=np.int64))


def shifts(moved: torch.Tensor, image: np.ndarray) -> list[tuple[int, int]]:
    """By how much a window's images were moved: pairs for which they equal the images with edges repeated."""
    out = []
    for dy in range(-SHIFT, SHIFT + 1):
        for dx in range(-SHIFT, SHIFT + 1):
            rows, columns = (np.clip(np.arange(8) + d, 0, 7) for d in (dy, dx))
            if np.array_equal(moved.numpy(), image[:, rows][:, :, columns]):
                out.append((dy, dx))
    return out


def test_every_update_shifts_images_also_after_evaluation() -> None:
    trained, seen = made(log_every=100)
    data = windows()
    for _ in range(2):
        trained.agent.eval()
        seen.clear()
        trained.step(lambda size: data)
        found = [shifts(moved, image) for moved, image in zip(seen[0], data.columns["obs.image"], strict=True)]
        assert all(len(places) == 1 for places in found)  # each window as a whole, by one shift
        assert len({places[0] for places in found}) > 1


@pytest.mark.parametrize("training", [False, True])
def test_an_agent_that_is_looked_at_or_acts_sees_images_as_they_are(training: bool) -> None:
    trained, seen = made()
    data = windows()
    trained.agent.train(training)
    inspect(trained.agent, TensorBatch.from_numpy(data, SPACES))
    np.testing.assert_array_equal(seen[0], data.columns["obs.image"])
    seen.clear()
    image = data.columns["obs.image"][:, 0]
    policy = AgentPolicy(trained.agent, num_actors=len(image), capacity=4)
    policy.act(
        {"obs.image": image}, np.zeros(len(image), np.int32), np.zeros(len(image), np.float32), np.zeros(len(image))
    )
    np.testing.assert_array_equal(seen[0], image)


def test_figures_for_the_log_are_of_images_as_they_are() -> None:
    trained, seen = made(log_every=1)
    data = windows()
    for _ in range(4):
        trained.step(lambda size: data)
    looked_at = seen[-1]  # the last pass of the update is the one for the log, on a part of the batch
    part = data.columns["obs.image"][: looked_at.shape[0], : looked_at.shape[1]]
    np.testing.assert_array_equal(looked_at, part)
