"""The proof that an exported policy acts as the trained one: recorded steps, and the answers of every form.

The agent makes the recording as it acts in evaluations, with its own memories, in its environment. Actors are also
reset at random, at different times. T steps of N actors.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pipelines.envs.env import Env
from pipelines.errors import IntegrityError, Interrupted
from pipelines.evaluation.runner import evaluate
from pipelines.events import Listener, Progress, silent
from pipelines.files.checksums import read_checked
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.bundle import Bundle

RECORDING, REPORT = "parity.npz", "parity.json"
STEPS, ACTORS = 1_000, 4
TOLERANCE = 1e-4
"""Greatest difference of action parameters, and of the numbers of a Box action, that counts as equal."""
_RELATIVE = 1e-5
"""Likewise of parameters, as a share of the largest, if that is more: runtimes add up in another order. Logits of a
policy that has learned alchemy for half an hour are up to 190, and those of ONNX Runtime are 1.1e-4 from torch's."""
_EQUAL = 0.999
"""Share of greedy actions that must be equal."""
_WIDER = "export wider weights: --weights float16 or float32"
_RESETS = 0.01  # share of an actor's steps
_MOST_BYTES = 8 << 20

Arrays = dict[str, np.ndarray]
Step = Callable[[Arrays, np.ndarray, np.ndarray, np.ndarray, np.ndarray], Mapping[str, np.ndarray]]
"""One step of a form for N actors with their own memory: (columns, action, reward, reset, noise) -> outputs by name."""


@dataclass(frozen=True, kw_only=True)
class ParityLimits:
    """Limits within which two policies act alike: the greatest difference of action parameters, the greatest difference
    of the numbers of a Box action, and the least share of greedy actions that are equal."""

    parameters: float = TOLERANCE
    actions: float = TOLERANCE
    equal: float = _EQUAL


STRICT = ParityLimits()
LIMITS = {
    "float32": STRICT,
    "float16": ParityLimits(parameters=0.1, actions=0.01, equal=0.99),
    "int8": ParityLimits(parameters=2.0, actions=0.05, equal=0.95),
}
"""By how weights are stored."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Agreement of a form with a recording: the greatest difference of action parameters, shares of equal actions, and
    their limits (`ParityLimits`; large parameters may differ by more)."""

    greatest_difference: float
    equal_greedy: float
    equal_sampled: float
    steps: int
    actors: int
    resets: int
    tolerance: float = TOLERANCE
    least_equal: float = _EQUAL

    @property
    def holds(self) -> bool:
        """Whether the form acts as the agent did."""
        return self.greatest_difference <= self.tolerance and self.equal_greedy >= self.least_equal


class _StepRecorder:
    """A policy that acts for an agent and records its inputs and answers."""

    def __init__(self, policy: AgentPolicy, *, steps: int, greedy: bool, seed: int, listener: Listener) -> None:
        self._policy, self._steps, self._greedy, self._listener = policy, steps, greedy, listener
        self._rng = np.random.default_rng(seed)
        self._time = np.zeros(policy.num_actors, np.int64)
        self.rows: list[Arrays] = []

    @property
    def full(self) -> bool:
        return len(self.rows) >= self._steps

    def act(
        self, observation: Mapping[str, np.ndarray], prev_action: np.ndarray, prev_reward: np.ndarray, time: np.ndarray
    ) -> np.ndarray:
        reset = (time == 0) | (self._rng.random(len(time)) < _RESETS)
        self._time = np.where(reset, 0, self._time + 1)
        action = np.where(reset.reshape(-1, *[1] * (prev_action.ndim - 1)), 0, prev_action).astype(prev_action.dtype)
        reward = np.where(reset, 0, prev_reward).astype(np.float32)
        params, legal = self._policy.parameters(observation, action, reward, self._time)
        head = self._policy.agent.make_player()
        noise = self._rng.random((len(time), head.noise_size), np.float32)
        greedy = head.to_stored(head.mode(params, legal)).numpy()
        sampled = head.to_stored(head.sample(params, torch.from_numpy(noise), legal)).numpy()
        self.rows.append(
            {
                **{f"observation.{name}": np.array(column) for name, column in observation.items()},
                **{"action": np.array(prev_action), "reward": np.array(prev_reward, np.float32), "reset": reset},
                **{"noise": noise, "parameters": params.numpy(), "greedy": greedy, "sampled": sampled},
            }
        )
        self._listener(Progress(stage="export: recording", done=len(self.rows), total=self._steps, unit="steps"))
        return greedy if self._greedy else sampled


def record(policy: AgentPolicy, env: Env, *, greedy: bool, seed: int, listener: Listener = silent) -> Arrays:
    """Record the inputs and answers of `policy` in `env`, which is fresh and has as many actors.

    The arrays (T, N, ...) are `observation.COLUMN`, `action`, `reward`, `reset`, `noise`, `parameters`, `greedy` and
    `sampled`.

    T is 1,000, or less where observations are large.
    """
    spaces = policy.agent.spaces.observation.values()
    row = policy.num_actors * sum(int(np.prod(space.shape)) * np.dtype(space.dtype).itemsize for space in spaces)
    steps = int(np.clip(_MOST_BYTES // row, 16, STEPS))
    recorder = _StepRecorder(policy, steps=steps, greedy=greedy, seed=seed, listener=listener)
    try:
        with torch.no_grad():
            most = (steps + 1) * policy.num_actors  # episodes, if each had one step
            evaluate(env, recorder, episodes=most, stop=lambda: recorder.full)
    except Interrupted:
        if not recorder.full:
            raise
    return {name: np.stack([each[name] for each in recorder.rows]) for name in recorder.rows[0]}


def compare(
    recording: Mapping[str, np.ndarray], step: Step, limits: ParityLimits = STRICT, *, listener: Listener = silent
) -> Agreement:
    """Repeat a recording through a form that begins with an empty memory."""
    start = "observation."
    columns = {name.removeprefix(start): rows for name, rows in recording.items() if name.startswith(start)}
    greatest, equal = 0.0, {"greedy": 0, "sampled": 0}
    largest = float(np.abs(recording["parameters"]).max(initial=0.0))
    steps, actors = recording["reset"].shape
    for t in range(steps):
        given = (recording[name][t] for name in ("action", "reward", "reset", "noise"))
        found = step({name: rows[t] for name, rows in columns.items()}, *given)
        difference = np.abs(found["parameters"] - recording["parameters"][t])
        greatest = max(greatest, float(difference.max()) if np.isfinite(difference).all() else np.inf)
        for name in equal:
            same = np.isclose(found[name], recording[name][t], rtol=0, atol=limits.actions)
            equal[name] += int(same.reshape(actors, -1).all(1).sum())
        listener(Progress(stage="export: comparing", done=t + 1, total=steps, unit="steps"))
    return Agreement(
        greatest_difference=greatest,
        equal_greedy=equal["greedy"] / (steps * actors),
        equal_sampled=equal["sampled"] / (steps * actors),
        steps=steps,
        actors=actors,
        resets=int(recording["reset"].sum()),
        tolerance=max(limits.parameters, _RELATIVE * largest) if np.isfinite(largest) else limits.parameters,
        least_equal=limits.equal,
    )


def require(found: Mapping[str, Agreement]) -> None:
    """Raise IntegrityError if a form does not act as the agent did."""
    for form, agreement in found.items():
        if not agreement.holds:
            raise IntegrityError(
                f"the form '{form}' does not act as the policy: parameters differ by up to "
                f"{agreement.greatest_difference:.1e}, {agreement.equal_greedy:.2%} of greedy actions are equal",
                hint=f"{agreement.tolerance:g} and {agreement.least_equal:.1%} are demanded; "
                + ("please report it with the agent's settings" if agreement.least_equal == _EQUAL else _WIDER),
            )


def encode_files(
    recording: Mapping[str, np.ndarray], found: Mapping[str, Agreement], evaluations: Mapping[str, Any]
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Encode the files of the proof: the recording, and the report on all forms, which is also returned."""
    file = io.BytesIO()
    np.savez_compressed(file, **recording)  # type: ignore[arg-type]
    forms = {name: {**vars(agreement), "holds": agreement.holds} for name, agreement in found.items()}
    report = {"forms": forms, "evaluations": dict(evaluations)}
    return {RECORDING: file.getvalue(), REPORT: json.dumps(report, indent=1).encode()}, report


def read_scores(found: Bundle) -> dict[str, Any] | None:
    """Read the scores of the policy in a bundle's own proof; None if it has none. IntegrityError if it was altered."""
    if REPORT not in found.record["files"]:
        return None
    with found.understood():
        scores = json.loads(read_checked(found.path, REPORT, found.record))["evaluations"].get("original")
        return dict(scores) if scores else None
