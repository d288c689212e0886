"""Values of windows against those of the whole trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.errors import UsageError
from pipelines.lake.schema import Schema
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectory
from pipelines.view import critic
from pipelines.view.critic import SHOWN, CriticLanes
from pipelines.view.steps import StepReader
from tests.view.lakes import episode, put


class Sums:
    """An agent whose figures are sums of the rewards seen in the last `window` steps, and the time."""

    run, update, window, discounts = Path("runs/x"), 7, 4, (0.5, 0.9)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, trajectory: Trajectory, schema: Schema, *, offset: int = 0) -> Mapping[str, np.ndarray]:
        self.calls += 1
        reward = trajectory.columns["reward"][1:].astype(np.float64)
        sums = np.array([reward[max(0, t - 3) : t + 1].sum() for t in range(len(reward))])
        time = np.arange(offset, offset + len(reward))
        both = np.stack([time, sums], axis=1)
        return {name: both if name != "entropy" else both[:, ::-1] for name in SHOWN}


def values(lake: Lake, uid: str, lanes: CriticLanes, start: int, stop: int) -> dict[str, Any]:
    reader = StepReader(lake)
    return lanes.lanes(reader, reader.find(uid), start, stop)


def test_a_window_has_the_values_of_the_whole_trajectory(lake: Lake) -> None:
    uid = put(lake, episode(30))
    lanes = CriticLanes(Sums())
    whole = values(lake, uid, lanes, 0, 99)
    assert whole["t"] == list(range(30))
    part = values(lake, uid, lanes, 12, 20)
    assert (part["start"], part["t"]) == (12, list(range(12, 20)))
    np.testing.assert_allclose(part["lanes"]["q"], whole["lanes"]["q"][12:20], rtol=1e-5)
    assert part["lanes"]["entropy"] == list(range(12, 20))  # the time is that in the trajectory


def test_the_acting_discount_is_shown(lake: Lake) -> None:
    lanes = CriticLanes(Sums())
    assert lanes.about == {"run": "runs/x", "update": 7, "discount": 0.9}


def test_a_window_is_evaluated_once(lake: Lake) -> None:
    agent, uid = Sums(), put(lake, episode(30))
    lanes = CriticLanes(agent)
    assert values(lake, uid, lanes, 0, 9) == values(lake, uid, lanes, 0, 9)
    assert agent.calls == 1


def test_the_last_observation_has_no_values(lake: Lake) -> None:
    uid = put(lake, episode(3))
    assert values(lake, uid, CriticLanes(Sums()), 3, 4)["t"] == []


def test_windows_that_are_too_large_are_refused(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = put(lake, episode(30))
    monkeypatch.setattr(critic, "MOST_STEPS", 10)
    with pytest.raises(UsageError, match="zoom in"):
        values(lake, uid, CriticLanes(Sums()), 0, 30)
    monkeypatch.setattr(critic, "_MOST_BYTES", 100)
    with pytest.raises(UsageError, match="zoom in"):
        values(lake, uid, CriticLanes(Sums()), 0, 5)
