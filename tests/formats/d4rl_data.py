"""Synthetic files of D4RL's families, and a slow reader of them to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

h5py = pytest.importorskip("h5py")


@dataclass(frozen=True)
class Literal:
    """A trajectory worked out step by step."""

    observations: list[np.ndarray]
    actions: list[np.ndarray]
    rewards: list[float]
    terminated: bool


def flat(
    lengths: list[int],
    *,
    terminal: Mapping[int, bool] | None = None,
    size: int = 4,
    actions: int = 2,
    seed: int = 0,
    dtype: str = "float32",
) -> dict[str, np.ndarray]:
    """Episodes of these lengths; `terminal`: episode -> whether it ends by a terminal (default: even ones do)."""
    rng, ends = np.random.default_rng(seed), np.cumsum(lengths) - 1
    steps = int(sum(lengths))
    over, cut = np.zeros(steps, bool), np.zeros(steps, bool)
    for number, end in enumerate(ends):
        (over if (terminal or {}).get(number, number % 2 == 0) else cut)[end] = True
    states = rng.standard_normal((steps, 2, size)).astype(dtype)
    for start, end in zip(ends - np.array(lengths) + 1, ends, strict=True):
        states[start:end, 1] = states[start + 1 : end + 1, 0]  # what a step leads to is where the next one begins
    return {
        "observations": states[:, 0],
        "next_observations": states[:, 1],
        "actions": rng.uniform(-1, 1, (steps, actions)).astype(dtype),
        "rewards": rng.standard_normal(steps).astype(dtype),
        "terminals": over,
        "timeouts": cut,
    }


def without(data: dict[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    return {name: values for name, values in data.items() if name not in names}


def write(path: Path, data: Mapping[str, Any], **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in data.items():
            packed = options if np.ndim(values) else {}
            file.create_dataset(name, data=values, **packed)
    return path


def literal(data: Mapping[str, np.ndarray]) -> list[Literal]:
    """The trajectories of `data` by D4RL's rules, one step at a time."""
    found, obs, act, rew = [], [], [], []
    steps = len(data["rewards"])
    for i in range(steps):
        obs.append(data["observations"][i])
        act.append(data["actions"][i])
        rew.append(float(np.ravel(data["rewards"][i])[0]))
        over = bool(np.ravel(data["terminals"][i])[0])
        cut = bool(np.ravel(data["timeouts"][i])[0]) if "timeouts" in data else False
        if not (over or cut or i == steps - 1):
            continue
        if "next_observations" in data:
            obs.append(data["next_observations"][i])
        elif over:
            obs.append(obs[-1])
        else:
            act.pop()
            rew.pop()
        if act:
            found.append(Literal(obs, act, rew, over))
        obs, act, rew = [], [], []
    return found
