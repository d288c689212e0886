from __future__ import annotations

import numpy as np
import pytest

from pipelines.envs.make import make
from pipelines.events import Event, Progress
from pipelines.export import parity
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.agent import Agent
from tests.learning.factories import settings


def test_a_recording_resets_actors_at_different_times_within_their_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or memories that a form does not clear, or clears for all actors, would agree with the policy's."""
    monkeypatch.setattr(parity, "STEPS", 200)
    env = make("tmaze", num_envs=3, seed=0, params={"corridor": 500})  # no episode ends
    policy = AgentPolicy(Agent(env.spec.spaces, settings("gru"), seed=0), num_actors=3, capacity=1)
    reset = parity.record(policy, env, greedy=False, seed=0)["reset"]
    assert reset.shape == (200, 3)
    assert reset[0].all()
    later = reset[1:]
    assert later.any(0).all()
    assert (later.sum(1) < 3).all()


def test_recording_and_comparing_report_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "STEPS", 20)
    env = make("tmaze", num_envs=2, seed=0, params={"corridor": 500})
    policy = AgentPolicy(Agent(env.spec.spaces, settings("gru"), seed=0), num_actors=2, capacity=1)
    heard: list[Event] = []
    recording = parity.record(policy, env, greedy=False, seed=0, listener=heard.append)
    answer = {name: recording[name][0] for name in ("parameters", "greedy", "sampled")}
    parity.compare(recording, lambda *given: answer, listener=heard.append)
    found = [(event.stage, event.done, event.total) for event in heard if isinstance(event, Progress)]
    assert found == [(f"export: {stage}", step, 20) for stage in ("recording", "comparing") for step in range(1, 21)]


@pytest.mark.parametrize(
    ("largest", "difference", "holds"), [(1, 9e-5, True), (1, 2e-4, False), (190, 1.1e-3, True), (190, 3e-3, False)]
)
def test_large_parameters_may_differ_by_as_many_roundings(largest: float, difference: float, holds: bool) -> None:
    parameters = np.array([[[0, largest]]], np.float32)
    recording = {name: np.zeros((1, 1)) for name in ("action", "reward", "noise", "greedy", "sampled")}
    recording |= {"reset": np.ones((1, 1), bool), "parameters": parameters}
    answer = {"parameters": parameters[0] + np.float32(difference), "greedy": np.zeros(1), "sampled": np.zeros(1)}
    assert parity.compare(recording, lambda *given: answer).holds == holds
