"""Verification of a policy bundle: its files are unchanged, and its forms answer recorded steps as the policy did.

Nothing in a bundle is imported or executed. `policy.pt2` and `policy.aoti.pt2` are opened only where that is allowed.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelines.config.policy_files import make_damage_error, read_record
from pipelines.errors import InputMissing
from pipelines.export import forms, parity
from pipelines.export.policy_bundle import load_policy
from pipelines.files.checksums import Mismatch
from pipelines.files.malformed import UNREADABLE
from pipelines.lake.spaces import Spaces, zeros
from pipelines.learning import bundle
from pipelines.learning.acting import AgentPolicy

_MOST_BYTES = 1 << 28


@dataclass(frozen=True)
class VerifiedBundle:
    """Result of a verification: agreements by form, in order, and the reasons why forms were not tried."""

    files: int
    update: Any
    forms: Mapping[str, parity.Agreement] = field(default_factory=dict)
    untried: Mapping[str, str] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether every form that was tried acts as the policy did."""
        return all(agreement.holds for agreement in self.forms.values())


def verify(directory: Path, *, trust: bool) -> VerifiedBundle:
    """Verify the bundle in `directory`; `trust`: open `policy.pt2`, `policy.aoti.pt2` and modules that it names.

    InputMissing if there is none or it lacks a recording; IntegrityError if it was altered.
    """
    try:
        record = read_record(directory)
        contents = bundle.checked_files(directory, record)
        if parity.RECORDING not in contents:
            load_policy(directory, trust=trust)
            return VerifiedBundle(
                len(contents), record.get("update"), untried={forms.WEIGHTS: "it has no recorded steps"}
            )
        forms.require_forms(record)
        recording = _load_recording(contents[parity.RECORDING], Spaces.from_json(record["spaces"]))
        actors = recording["reset"].shape[1]
        found, untried = {}, {}
        for form in (forms.WEIGHTS, *record["forms"]):
            try:
                if form == forms.WEIGHTS:
                    agent = load_policy(directory, trust=trust).agent
                    step = _step_of_weights(agent, record["context_length"], actors)
                else:
                    forms.require(form, record, trust=trust)
                    step = forms.open_form(form, contents[forms.FILES[form]], record, actors)
            except InputMissing as error:
                # A bundle is not verified if its weights cannot be loaded.
                if form == forms.WEIGHTS:
                    raise
                untried[form] = error.message
            else:
                found[form] = parity.compare(recording, step, forms.choose_limits(form, record))
        return VerifiedBundle(len(contents), record.get("update"), found, untried)
    except FileNotFoundError as error:
        raise InputMissing(f"no policy bundle at '{directory}'", hint="make one with: amago export RUN") from error
    except UNREADABLE as error:
        raise make_damage_error(directory, error) from error


def _load_recording(content: bytes, spaces: Spaces) -> parity.Arrays:
    """Load the arrays of a recording. ValueError if it does not fit these spaces."""
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


def _step_of_weights(agent: Any, capacity: int, actors: int) -> parity.Step:
    policy = AgentPolicy(agent, num_actors=actors, capacity=capacity)
    head, time = agent.make_player(), np.zeros(actors, np.int64)

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
            "greedy": head.to_stored(head.mode(params, legal)).numpy(),
            "sampled": head.to_stored(head.sample(params, torch.from_numpy(noise), legal)).numpy(),
        }

    return step
