"""Verification of a policy bundle: its files are as they were written, and its forms answer the recorded steps as the
trained policy did. Nothing in a bundle is imported or executed; `policy.pt2` is opened only where that is allowed."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field

from pipelines.errors import InputMissing, IntegrityError
from pipelines.export import forms, parity
from pipelines.export.policy_bundle import load_policy
from pipelines.files.checksums import Mismatch, read_checked, read_sealed
from pipelines.files.json import Form, fits
from pipelines.files.malformed import UNREADABLE, reason
from pipelines.lake.spaces import Spaces, zeros
from pipelines.learning.acting import AgentPolicy

WEIGHTS = "weights"
_MOST_BYTES, _MOST_MEMORY = 1 << 28, 1 << 30


class _Exported(Form):
    """What is read of the record of a bundle with forms."""

    forms: list[str]
    memory: dict[str, list[Any]]
    noise: int = Field(ge=0, le=1 << 20)
    max_time: int | None = None


@dataclass(frozen=True)
class VerifiedBundle:
    """What was found: agreements by form, in order, and why a form was not tried."""

    files: int
    update: Any
    forms: Mapping[str, parity.Agreement] = field(default_factory=dict)
    untried: Mapping[str, str] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether every form that was tried acts as the policy did."""
        return all(agreement.holds for agreement in self.forms.values())


def verify(directory: Path, *, trust: bool) -> VerifiedBundle:
    """Verify the bundle in `directory`; `trust`: open `policy.pt2` and modules that it names.

    InputMissing if there is none or it lacks a recording; IntegrityError if it was altered.
    """
    try:
        record = read_sealed(directory / "policy.json")
        contents = {name: _content(directory, name, record) for name in record["files"]}
        if not record.get("forms"):
            load_policy(directory, trust=trust)
            return VerifiedBundle(len(contents), record.get("update"), untried={WEIGHTS: "it has no recorded steps"})
        if not fits(record, _Exported):
            raise Mismatch("policy.json has not the fields of one")
        record["memory"] = {name: (shape, _dtype(shape, dtype)) for name, (shape, dtype) in record["memory"].items()}
        recording = _recording(contents[parity.RECORDING], Spaces.from_json(record["spaces"]))
        found, untried = {}, {}
        for form in (WEIGHTS, *record["forms"]):
            try:
                step = _opened(form, directory, contents, record, recording["reset"].shape[1], trust=trust)
            except InputMissing as error:
                untried[form] = error.message
            else:
                found[form] = parity.compare(recording, step)
        return VerifiedBundle(len(contents), record.get("update"), found, untried)
    except FileNotFoundError as error:
        raise InputMissing(f"no policy bundle at '{directory}'", hint="make one with: amago export RUN") from error
    except UNREADABLE as error:
        text = f"policy bundle '{directory}' is damaged: {reason(error)}"
        raise IntegrityError(text, hint="copy it again") from error


def _content(directory: Path, name: str, record: Mapping[str, Any]) -> bytes:
    if not isinstance(name, str) or Path(name).name != name:
        raise Mismatch("policy.json names a file outside its directory")
    return read_checked(directory, name, record)


def _dtype(shape: list[int], name: str) -> str:
    if name not in ("float32", "int64") or any(type(size) is not int or size < 1 for size in shape):
        raise Mismatch("its memory is not one of numbers")
    if math.prod(shape) * 8 > _MOST_MEMORY:
        raise Mismatch("its memory is larger than 1 GiB an actor")
    return name


def _recording(content: bytes, spaces: Spaces) -> parity.Arrays:
    """Return the arrays of a recording. ValueError if it is none for these spaces."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if sum(item.file_size for item in archive.infolist()) > _MOST_BYTES:
            raise Mismatch(f"{parity.RECORDING} has more than {_MOST_BYTES >> 20} MiB")
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        found = {name: archive[name] for name in archive.files}
    leading = found["reset"].shape
    wanted = {f"observation.{name}": space for name, space in spaces.observation.items()}
    wanted |= dict.fromkeys(("action", "greedy", "sampled"), spaces.action)
    fitting = all(
        found[name].shape == (*leading, *space.shape) and found[name].dtype == zeros(space).dtype
        for name, space in wanted.items()
    )
    if len(leading) != 2 or not min(leading) or not fitting:
        raise Mismatch(f"{parity.RECORDING} does not fit the spaces")
    return found


def _opened(
    form: str, directory: Path, contents: Mapping[str, bytes], record: Mapping[str, Any], actors: int, *, trust: bool
) -> parity.Step:
    if form == WEIGHTS:
        return _eager(load_policy(directory, trust=trust).agent, record["context_length"], actors)
    if form not in forms.FILES:
        raise InputMissing("this version does not know it")
    if form == forms.TORCH and not trust:
        raise InputMissing("opening it needs --trust")
    forms.require_packages((form,))
    return forms.opened(form, contents[forms.FILES[form]], record, actors)


def _eager(agent: Any, capacity: int, actors: int) -> parity.Step:
    policy = AgentPolicy(agent, num_actors=actors, capacity=capacity)
    head, time = agent.heads.policy, np.zeros(actors, np.int64)

    def step(
        columns: parity.Arrays, action: np.ndarray, reward: np.ndarray, reset: np.ndarray, noise: np.ndarray
    ) -> Mapping[str, np.ndarray]:
        nonlocal time
        time = np.where(reset, 0, time)
        before = np.where(reset.reshape(-1, *[1] * (action.ndim - 1)), 0, action).astype(action.dtype)
        params, legal = policy.parameters(columns, before, np.where(reset, 0, reward).astype(np.float32), time)
        time = time + 1
        return {
            "parameters": params.numpy(),
            "greedy": head.stored(head.mode(params, legal)).numpy(),
            "sampled": head.stored(head.sample(params, torch.from_numpy(noise), legal)).numpy(),
        }

    return step
