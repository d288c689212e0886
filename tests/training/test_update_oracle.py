"""Whole updates of a learner against what they are meant to be, written out in float64: clipping by the global norm,
AdamW with bias correction and weight decay by role, the schedule of the rate, target heads after the step, the running
average. Only the gradients are torch's: those of the same agent, in training mode, with the same random numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.data.batch import Batch
from pipelines.learning.batch import TensorBatch
from pipelines.nets.linear import SigmaLinear
from pipelines.training.learner import Learner
from tests.stages.recipes import tiny
from tests.training.test_learner import SPACES, batch

DECAY, CLIP, TAU, AVERAGE = 0.3, 0.5, 0.2, 0.9
RATES = [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.0085]  # warmed up over four updates, then .0015 less each, to .001

KERNELS = {
    "timestep.body.hidden.0.weight", "timestep.body.last.weight", "sequence.embed.weight",
    *(f"sequence.blocks.0.{name}.weight" for name in ("qkv", "merge", "expand", "contract")),
    "heads.actor.net.hidden.0.weight", "heads.actor.net.last.weight",
    "heads.critic.weights.0", "heads.critic.last_weight",
}  # fmt: skip

Arrays = dict[str, np.ndarray]


def made(**train: Any) -> Learner:
    settings = tiny(
        train={
            "learning_rate": 0.01, "weight_decay": DECAY, "grad_clip": CLIP, "warmup_steps": 4, "decay_steps": 10,
            "ema_decay": AVERAGE, "log_every": 100, **train,
        },
        agent={"target_tau": TAU, "sequence": {"dropout": 0.3}},
    )  # fmt: skip
    return Learner(SPACES, settings.agent, settings.train, seed=3)


def arrays(named: Any) -> Arrays:
    return {name: value.detach().double().numpy().copy() for name, value in named}


def trained_names(learner: Learner) -> list[str]:
    return [name for name, p in learner.agent.named_parameters() if p.requires_grad]


def before_the_step(learner: Learner, windows: Batch) -> tuple[Arrays, Arrays, Arrays, Arrays]:
    """Gradients, parameters, targets and average when the optimiser's step is due; the learner stays as it is.

    PopArt has rescaled last layers by then; of the average it does so in the learner alone, so that part is taken from
    a copy of the learner's.
    """
    shadow = copy.deepcopy(learner.agent)
    shadow.train()
    with torch.random.fork_rng(devices=()):
        for loss, _ in shadow.losses([TensorBatch.from_numpy(windows, SPACES)], *learner.randomness()):
            loss.backward()
    gradients = {name: p.grad.double().numpy() for name, p in shadow.named_parameters() if p.grad is not None}
    own = {name: value for name, value in arrays(shadow.named_parameters()).items() if name in gradients}
    assert shadow.target_heads is not None
    average = arrays(zip(trained_names(learner), learner.average, strict=True))
    followed = arrays(shadow.rescaled_too[0].named_parameters())
    average |= {f"heads.{name}": value for name, value in followed.items()}
    return gradients, own, arrays(shadow.target_heads.named_parameters()), average


def adamw(
    own: Arrays, gradients: Arrays, moments: dict[str, tuple[np.ndarray, np.ndarray]], update: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Loshchilov & Hutter 2019, algorithm 2, with betas .9 and .999, on gradients clipped to the norm `CLIP`."""
    norm = np.sqrt(sum(np.square(g).sum() for g in gradients.values()))
    assert norm > 2 * CLIP  # the clip matters
    for name, value in own.items():
        g = gradients[name] * CLIP / norm
        m, v = moments.get(name, (np.zeros_like(g), np.zeros_like(g)))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        moments[name] = m, v
        step = (m / (1 - 0.9 ** (update + 1))) / (np.sqrt(v / (1 - 0.999 ** (update + 1))) + 1e-8)
        shrunk = value * (1 - RATES[update] * DECAY) if name in KERNELS else value
        yield name, shrunk - RATES[update] * step


def assert_equal(actual: Arrays, expected: Arrays, rest: Arrays, what: str) -> None:
    """Within 1% of the root mean square change since `rest`, and what float32 can tell apart."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        change = np.sqrt(np.square(value - rest[name]).mean())
        error = np.sqrt(np.square(actual[name] - value).mean())
        assert error <= 0.01 * change + 1e-7, f"{what} of {name}: off by {error:.2g} where the change is {change:.2g}"


def test_six_updates_are_those_written_out() -> None:
    learner, rng = made(), np.random.default_rng(0)
    moments: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for update in range(6):
        windows = batch(rng, size=8)
        gradients, own, targets, average = before_the_step(learner, windows)
        learner.agent.eval()  # as acting and evaluation leave it: an update must turn dropout on by itself
        metrics = learner.step(lambda size, windows=windows: windows)
        assert gradients.keys() == own.keys() == {*trained_names(learner)}
        norm = np.sqrt(sum(np.square(g).sum() for g in gradients.values()))
        assert metrics["grad_norm"].item() == pytest.approx(norm, rel=1e-4)
        expected = dict(adamw(own, gradients, moments, update))
        actual = {n: v for n, v in arrays(learner.agent.named_parameters()).items() if n in own}
        assert_equal(actual, expected, own, f"update {update}: weights")
        moved = {name: (1 - TAU) * old + TAU * expected[f"heads.{name}"] for name, old in targets.items()}
        assert learner.agent.target_heads is not None
        assert_equal(
            arrays(learner.agent.target_heads.named_parameters()), moved, targets, f"update {update}: target heads"
        )
        decay = min(AVERAGE, (1 + update) / (10 + update))
        mean = {name: decay * old + (1 - decay) * expected[name] for name, old in average.items()}
        kept = arrays(zip(trained_names(learner), learner.average, strict=True))
        assert_equal(kept, mean, average, f"update {update}: average")


def test_every_update_takes_one_power_iteration_on_every_spectral_norm() -> None:
    learner, rng = made(), np.random.default_rng(0)
    layers = [module for module in learner.agent.modules() if isinstance(module, SigmaLinear)]
    assert len(layers) == 4
    for _ in range(3):
        expected = []
        for layer in layers:
            weight = layer.weight.detach().double().numpy()
            right = weight.T @ layer.left.double().numpy()
            left = weight @ right
            expected.append((left / np.linalg.norm(left), right / np.linalg.norm(right)))
        learner.step(lambda size: batch(rng))
        for layer, (left, right) in zip(layers, expected, strict=True):
            np.testing.assert_allclose(layer.left, left, atol=1e-5)
            np.testing.assert_allclose(layer.right, right, atol=1e-5)


def test_input_statistics_take_in_every_update() -> None:
    """The first sets them, the second counts as much."""
    learner = made()
    norm, rng = learner.agent.timestep.norm, np.random.default_rng(0)
    assert norm is not None
    seen = []
    for _ in range(2):
        windows = batch(rng)
        valid = [windows.columns["obs"][b, :length] for b, length in enumerate(windows.lengths)]
        flat = np.concatenate(valid).astype(np.float64)
        seen.append((np.sign(flat) * np.log1p(np.abs(flat))).mean(0))
        learner.step(lambda size, windows=windows: windows)
        np.testing.assert_allclose(norm.mean[:3], np.mean(seen, 0), rtol=1e-3, atol=1e-5)
