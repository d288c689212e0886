"""Small spaces, settings and batches for the tests of learning."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from pipelines.config.model import AgentSettings
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space, Spaces
from pipelines.learning.agent import Agent
from pipelines.learning.batch import HostBatch, StepIndex, TensorBatch

ACTIONS: dict[str, Space] = {
    "discrete": Discrete(n=4),
    "large_discrete": Discrete(n=300),
    "multi_discrete": MultiDiscrete(nvec=(2, 3)),
    "multi_binary": MultiBinary(n=3),
    "box": Box(shape=(2,)),
}
OBSERVATION: dict[str, Space] = {"obs": Box(shape=(3,))}
SEQUENCES = {
    "transformer": {"kind": "transformer", "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 32, "dropout": 0},
    "gru": {"kind": "gru", "num_layers": 2, "hidden": 12, "output": 10},
    "feedforward": {"kind": "feedforward", "d_model": 12, "num_layers": 1, "d_ff": 16, "dropout": 0},
    "identity": {"kind": "identity"},
}


def settings(sequence="transformer", **changes):
    small = {
        "timestep": {"hidden": [16], "output": 12},
        "sequence": SEQUENCES[sequence] if isinstance(sequence, str) else sequence,
        "actor": {"hidden": [16]},
        "critic": {"hidden": [16, 16]},
        "gammas": [0.5, 0.9],
        "acting_gamma": 0.99,
    }
    return AgentSettings.model_validate(small | changes)


def agent(action="discrete", observation=None, *, seed=0, **changes):
    return Agent(Spaces(observation=observation or OBSERVATION, action=ACTIONS[action]), settings(**changes), seed=seed)


def values(space, leading, rng):
    """Random values of `space` in stored form; the first of a choice's is its greatest."""
    match space:
        case Discrete(n=n):
            out = rng.integers(0, n, leading)
            out.flat[0] = n - 1
        case MultiDiscrete(nvec=nvec):
            out = rng.integers(0, nvec, (*leading, len(nvec)))
        case MultiBinary(n=n):
            out = rng.integers(0, 2, (*leading, n))
        case Box(shape=shape, dtype="uint8"):
            out = rng.integers(0, 256, (*leading, *shape))
        case Box(shape=shape):
            out = rng.uniform(-1, 1, (*leading, *shape))
    return out.astype(space.dtype)


def windows(spaces, *, lengths=(9, 4, 9, 2, 7, 9), rows=9, seed=0, reward=None, terminated=0.2, importance=None):
    """Right-padded windows as the sampler gives them: zeros beyond each length."""
    rng = np.random.default_rng(seed)
    batch = len(lengths)
    columns = {name: values(space, (batch, rows), rng) for name, space in spaces.observation.items()}
    columns["action"] = values(spaces.action, (batch, rows), rng)
    rewards = rng.normal(size=(batch, rows)) if reward is None else np.full((batch, rows), reward)
    columns["reward"] = rewards.astype("f4")
    columns["terminated"] = np.zeros((batch, rows), np.uint8)
    for i, length in enumerate(lengths):
        columns["terminated"][i, length - 1] = rng.random() < terminated
        for column in columns.values():
            column[i, length:] = 0
    start = rng.integers(0, 5, batch)
    return SimpleNamespace(
        columns=columns, lengths=np.asarray(lengths), start=start, importance=importance, warm_up=None, cut_off=None
    )


def batch(owner, **options):
    return move(windows(owner.spaces, **options), owner, "cpu")


def move(source, owner, device):
    """The tensors of windows on a device."""
    tensors, there = TensorBatch.from_numpy(source, owner.spaces), torch.device(device)
    return HostBatch.of(source, tensors, there).move(there)


def split(data, parts):
    """Micro-batches of (nearly) equal size."""

    def indices(steps):
        return [StepIndex.of(mask.numpy()) for mask in steps.mask_BT.tensor_split(parts)]

    chunks = {name: value.tensor_split(parts) for name, value in vars(data).items() if isinstance(value, torch.Tensor)}
    steps = {name: indices(value) for name, value in vars(data).items() if isinstance(value, StepIndex)}
    observation = {name: value.tensor_split(parts) for name, value in data.observation.items()}
    lengths = np.array_split(np.array(data.lengths), parts)
    return [
        replace(
            data,
            observation={name: value[i] for name, value in observation.items()},
            lengths=tuple(lengths[i].tolist()),
            **{name: value[i] for name, value in (chunks | steps).items()},
        )
        for i in range(parts)
    ]


def padded(source, extra, value=7):
    """The same windows with `extra` more rows of padding, filled with anything but zeros."""
    columns = {}
    for name, column in source.columns.items():
        tail = np.full((len(column), extra, *column.shape[2:]), value).astype(column.dtype)
        columns[name] = np.concatenate((column, tail), 1)
    return SimpleNamespace(
        columns=columns,
        lengths=source.lengths,
        start=source.start,
        importance=source.importance,
        warm_up=None,
        cut_off=None,
    )
