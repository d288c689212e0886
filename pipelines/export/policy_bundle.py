"""A policy bundle: a directory that acts, without the run or the lake it came from.

    policy.json           spaces, network settings, context length, how it acts (`greedy`), where it came from,
                          SHA-256 of all files
    weights.safetensors   the weights that acting needs
    policy.py             a loader; with policy.onnx, a runtime that needs numpy and onnxruntime alone
    policy.mjs            with policy.onnx, the same runtime for Node and browsers
    policy.onnx           the step function for ONNX runtimes (`--format onnx`)
    policy.pt2            the step function for `torch.export` (`--format torch`)
    policy.aoti.pt2       the step function compiled by AOTInductor (`--format aoti`)
    parity.npz            recorded steps of the trained policy, and its answers
    parity.json           what every form answers to them, and the scores of evaluations through it

>>> from pipelines.export.policy_bundle import load_policy  # doctest: +SKIP
>>> policy = load_policy("runs/cartpole/export")  # doctest: +SKIP
>>> action = policy.act(observation)  # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from pipelines.config.places import find_bundle
from pipelines.config.policy_files import RECORD, read_record
from pipelines.errors import InputMissing, UsageError
from pipelines.files.atomic import write_together
from pipelines.files.checksums import seal
from pipelines.files.malformed import UNREADABLE
from pipelines.lake.spaces import (
    LENGTH,
    OBSERVATION,
    Box,
    Discrete,
    MultiDiscrete,
    Ragged,
    Space,
    convert_to_stored,
    zeros,
)
from pipelines.learning import bundle
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.agent import Agent
from pipelines.learning.checkpoint import TRAINING_ONLY, load_agent
from pipelines.trust import everything

_REWARD = Box(shape=())
_LOADER = '''"""Acts with the policy in this directory; needs the package `amago`.

    policy = load()
    observation, _ = env.reset()
    policy.reset()
    while not done:
        action = policy.act(observation, reward)     # reward: what the last action brought; 0 at first
"""

from pathlib import Path

from pipelines.export.policy_bundle import DeployedPolicy, load_policy


def load(*, greedy: bool | None = None, seed: int = 0, trust: bool = False) -> DeployedPolicy:
    return load_policy(Path(__file__).parent, greedy=greedy, seed=seed, trust=trust)
'''


def write_bundle(
    weights: Mapping[str, torch.Tensor],
    record: Mapping[str, Any],
    directory: Path,
    *,
    greedy: bool,
    forms: Mapping[str, bytes] | None = None,
    about: Mapping[str, Any] | None = None,
) -> int:
    """Write a bundle from a checkpoint's weights and record; returns its size in bytes.

    `greedy`: whether the policy takes the most likely actions unless its user says otherwise.
    `forms`: more files, whose `policy.py` replaces the loader; `about`: more of policy.json, which comes last: a
    directory without it is not a bundle.
    """
    spec = {**describe_policy(record, greedy=greedy), **(about or {})}
    kept = {key: value.contiguous() for key, value in weights.items() if not key.startswith(TRAINING_ONLY)}
    files = {
        bundle.WEIGHTS: save(kept),
        "policy.py": _LOADER.encode(),
        **(forms or {}),
    }
    files[RECORD] = seal(spec, files)
    former = find_former_files(directory)
    write_together(directory, files)
    for name in former - files.keys():  # forms of another policy, which would pass for forms of this one
        (directory / name).unlink(missing_ok=True)
    return sum(map(len, files.values()))


def find_former_files(directory: Path) -> set[str]:
    """List the files of the bundle in `directory`, which another is about to replace. UsageError if the directory
    contains something else, such as a dataset or the user's own notes."""
    real = directory.resolve()  # what is not there yet may be followed by ".."
    found = {path.name for path in real.iterdir()} if real.is_dir() else set()
    try:
        listed = read_record(real)["files"]
        return {name for name in listed if name in found}  # a record of somebody else may name any place
    except UNREADABLE:
        pass
    if bundle.WEIGHTS in found:  # of an export that was killed, or a damaged one
        return {name for name in found if name.startswith(("policy.", "parity."))}
    if strange := sorted(name for name in found if not name.startswith(".")):
        raise UsageError(
            f"'{directory}' contains no policy bundle, but other files: {', '.join(strange[:3])}",
            hint="choose an empty directory",
        )
    return set()


def describe_policy(record: Mapping[str, Any], *, greedy: bool) -> dict[str, Any]:
    """Describe a checkpoint with this record, and how it acts, for policy.json."""
    kept = {key: record[key] for key in ("spaces", "agent", "context_length", "update", "env")}
    # A place on the disk of the one who trained it, which nobody needs to act.
    kept["agent"] = {key: value for key, value in kept["agent"].items() if key != "reference"}
    return {"format": bundle.FORMAT, "version": bundle.VERSION, **kept, "greedy": greedy}


def load_policy(
    directory: Path | str, *, greedy: bool | None = None, seed: int = 0, trust: bool = False
) -> DeployedPolicy:
    """Load the policy of a bundle, which `amago export` writes.

    Args:
        directory: directory of the bundle, zoo:NAME, or hf://ORG/NAME[@REVISION][/PATH], which is fetched.
        greedy: take the most likely action instead of sampling one (None: as the bundle says).
        seed: seed of sampled actions.
        trust: import modules that the bundle names; a bundle that names any is refused otherwise.

    Returns:
        A policy for one environment: `act(observation, reward)` takes an observation and a reward as `gymnasium`
        returns them and returns an action for `env.step`; `reset()` starts an episode.

    Raises:
        InputMissing: there is no bundle, it needs a newer version, or it names modules and is not trusted.
        IntegrityError: the bundle is damaged.

    >>> policy = load_policy("runs/short/export")
    >>> policy.act([0.0, 0.0], 0.0) in range(4)
    True
    """
    with everything() if trust else contextlib.nullcontext():
        found = bundle.read(find_bundle(directory) or Path(directory))
        agent = load_agent(found)
    greedy = found.greedy if greedy is None else greedy
    with found.understood():
        return DeployedPolicy(agent, capacity=found.record["context_length"], greedy=greedy, seed=seed)


class DeployedPolicy:
    """A trained policy for one environment, with the observations and actions of `gymnasium`."""

    def __init__(self, agent: Agent, *, capacity: int, greedy: bool, seed: int) -> None:
        self.agent, self.spaces = agent, agent.spaces
        self._policy = AgentPolicy(agent, num_actors=1, capacity=capacity, greedy=greedy, seed=seed)
        self.reset()

    def __repr__(self) -> str:
        return f"DeployedPolicy(observation={dict(self.spaces.observation)}, action={self.spaces.action})"

    def reset(self) -> None:
        """Start an episode: clear the memory."""
        self._time = 0
        self._action = zeros(self.spaces.action, (1,))

    def act(self, observation: Any, reward: float = 0.0) -> Any:
        """Choose the action for `observation`; `reward` is that of the previous action (0 at the start). InputMissing
        if a column is missing, UsageError for values that are not of its space."""
        columns: dict[str, np.ndarray] = {}
        self._flatten(observation, OBSERVATION, columns)
        absent = [name for name in self.spaces.observation if name not in columns]
        if absent:
            raise InputMissing(f"the observation lacks {', '.join(absent)}: the policy was trained with it")
        spaces = self.spaces.observation
        stored = {name: _store(columns[name], spaces[name], f"observation '{name}'")[None] for name in spaces}
        before = _store(np.asarray(reward), _REWARD, "the reward")[None]
        self._action = self._policy.act(stored, self._action, before, np.array([self._time], dtype=np.int64))
        self._time += 1
        return to_environment(self._action[0], self.spaces.action)

    def _flatten(self, value: Any, name: str, columns: dict[str, np.ndarray]) -> None:
        """Collect the columns of an observation, whose members may be tables and tuples, under dotted names."""
        space = self.spaces.observation.get(name)
        if isinstance(space, Ragged):
            columns[name], length = space.pad(value)
            columns[f"{name}.{LENGTH}"] = np.asarray(length)
        elif isinstance(value, Mapping):
            for key, member in value.items():
                self._flatten(member, f"{name}.{key}", columns)
        elif isinstance(value, tuple):
            for place, member in enumerate(value):
                self._flatten(member, f"{name}.{place}", columns)
        else:
            columns[name] = np.asarray(value)


def _store(value: np.ndarray, space: Space, what: str) -> np.ndarray:
    """Convert numbers to stored form. UsageError if they are not of the space."""
    try:
        return convert_to_stored(value.reshape(space.shape), space)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what}: {error}") from error


def to_environment(action: np.ndarray, space: Space) -> Any:
    """Convert an action of the agent to the environment's form."""
    if isinstance(space, Discrete):
        return int(action) + space.start
    if isinstance(space, MultiDiscrete):
        return action if space.start is None else action + np.asarray(space.start, dtype=action.dtype)
    if isinstance(space, Box) and space.low is not None and space.high is not None:
        low, high = (np.asarray(bound, dtype=np.float64).reshape(space.shape) for bound in (space.low, space.high))
        scaled = low + (np.clip(action, -1.0, 1.0).astype(np.float64) + 1) * (high - low) / 2
        dtype = np.dtype(space.native or space.dtype)
        return (np.rint(scaled) if dtype.kind in "iu" else scaled).astype(dtype)
    return action
