"""The learner: schedules by hand, gradients of micro-batches, nothing but finite updates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines.config.settings import TrainSettings
from pipelines.data.batch import Batch
from pipelines.errors import InputMissing, StageFailed, UsageError
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.training import checkpoint as checkpoints
from pipelines.training.learner import Learner, resolve_device
from pipelines.training.optimizer import learning_rate
from tests.stages.recipes import tiny

SPACES = Spaces(observation={"obs": Box(shape=(3,))}, action=Discrete(n=4))


def batch(rng: np.random.Generator, size: int = 4, steps: int = 5) -> Batch:
    columns = Schema(SPACES).empty(size * (steps + 1))
    columns = {name: column.reshape(size, steps + 1, *column.shape[1:]) for name, column in columns.items()}
    columns["obs"] = rng.normal(size=(size, steps + 1, 3)).astype(np.float32)
    columns["reward"] = rng.normal(size=(size, steps + 1)).astype(np.float32)
    columns["action"] = rng.integers(4, size=(size, steps + 1)).astype(np.int32)
    return Batch(columns=columns, lengths=rng.integers(2, steps + 2, size=size), start=np.zeros(size, dtype=np.int64))


def learner(**train: object) -> Learner:
    settings = tiny(train=train, agent={"sequence": {"dropout": 0.0}})
    return Learner(SPACES, settings.agent, settings.train, seed=3)


def test_the_rate_warms_up_and_then_holds_or_decays() -> None:
    hold = TrainSettings(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(u, hold) for u in (0, 1, 3, 4, 1000)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    decay = TrainSettings(learning_rate=1.0, warmup_steps=0, decay_steps=100)
    assert [round(learning_rate(u, decay), 4) for u in (0, 50, 100, 200)] == [1.0, 0.55, 0.1, 0.1]


def test_micro_batches_add_up_to_the_batch() -> None:
    rng = np.random.default_rng(0)
    whole = batch(rng, size=4)
    halves = [
        Batch(
            columns={k: v[part] for k, v in whole.columns.items()}, lengths=whole.lengths[part], start=whole.start[part]
        )
        for part in (slice(0, 2), slice(2, 4))
    ]
    one, two = learner(), learner(accumulate=2)
    for _ in range(3):
        one.step(lambda size: whole)
        parts = iter(halves)
        two.step(lambda size, parts=parts: next(parts))
    for (name, a), b in zip(one.agent.state_dict().items(), two.agent.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
    assert one.steps_seen == two.steps_seen == 3 * int((whole.lengths - 1).sum())


def test_a_gradient_that_is_not_finite_stops_training() -> None:
    broken = batch(np.random.default_rng(0))
    broken.columns["reward"][:] = np.nan
    trained = learner()
    with pytest.raises(StageFailed, match="not finite at update 0"):
        trained.step(lambda size: broken)
    assert trained.update == 0


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UsageError, match="multiple"):
        learner(accumulate=3)
    with pytest.raises(UsageError):
        resolve_device("tpu-please")
    if not torch.cuda.is_available():
        with pytest.raises(InputMissing):
            resolve_device("cuda")


def test_the_average_is_a_running_mean_that_survives_a_checkpoint(tmp_path: Path) -> None:
    data = batch(np.random.default_rng(0))
    trained = learner(average=0.9)
    expected = [parameter.detach().clone() for parameter in trained.parameters]
    for update in range(12):
        trained.step(lambda size: data)
        decay = min(0.9, (1 + update) / (10 + update))
        expected = [decay * e + (1 - decay) * p.detach() for e, p in zip(expected, trained.parameters, strict=True)]
    for mean, value in zip(trained.average, expected, strict=True):
        torch.testing.assert_close(mean, value, rtol=1e-5, atol=1e-6)
    trained.save(tmp_path, {"env": {}})
    checkpoint = checkpoints.load(tmp_path)
    again = learner(average=0.9)
    again.restore(checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(trained.average, again.average, strict=True))
    name, parameter = next(iter(trained.agent.named_parameters()))
    assert torch.equal(checkpoint.acting[name], trained.average[0])
    assert torch.equal(checkpoint.weights[name], parameter)
    assert not torch.equal(checkpoint.acting[name], checkpoint.weights[name])


def test_without_an_average_the_last_weights_act(tmp_path: Path) -> None:
    trained = learner()
    trained.save(tmp_path, {"env": {}})
    checkpoint = checkpoints.load(tmp_path)
    assert all(torch.equal(value, checkpoint.weights[name]) for name, value in checkpoint.acting.items())
