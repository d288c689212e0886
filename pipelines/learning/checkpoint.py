"""A checkpoint: everything needed to act, and to resume training bit-identically.

    checkpoints/000200/  checkpoint.json      counters, spaces, the settings of agent and training, lake snapshot, and
                                              the SHA-256 of every file, checked when it is loaded
                         weights.safetensors  agent: networks, target heads, PopArt, input statistics
                         average.safetensors  moving averages of trained weights, if training keeps them
                         training.pt          optimiser, priorities (torch, weights_only)
    checkpoints/latest, checkpoints/best      symbolic links

A checkpoint is written under a temporary name, synced and renamed, and renamed before it is deleted: readers never
see a partial one.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as safetensors_bytes

from pipelines import trust
from pipelines.config.host import count_ranks
from pipelines.config.model import AgentSettings, SequencePluginSettings
from pipelines.config.policy_files import list_checkpoints, locate_checkpoint, read_link
from pipelines.errors import InputMissing, IntegrityError, UsageError
from pipelines.files.atomic import explain_errors, point, sync_directory
from pipelines.files.checksums import Mismatch, read_checked, read_sealed, seal
from pipelines.files.json import Form, fits
from pipelines.files.malformed import MALFORMED, UNREADABLE, reason
from pipelines.lake.lineage import Data
from pipelines.lake.spaces import Box, Spaces
from pipelines.learning.agent import Agent
from pipelines.nets.cache import count_bytes
from pipelines.nets.init import limit_parameters, make_outline, require_fit

_UNREADABLE: tuple[type[Exception], ...] = (*UNREADABLE, SafetensorError)
_FILES = ("weights.safetensors", "average.safetensors", "training.pt")
TARGET_HEADS = "target_heads."
TRAINING_ONLY = (TARGET_HEADS, "advantage_scale.", "temperature.")  # what acting does not need
_MOST_MEMORY = 4 << 30  # of an actor; attention of 12 layers of width 1,024 keeps 43,000 tokens in it
_LEFT_SECONDS = 60.0  # a temporary link older than this has no live writer


class CheckpointRecord(Form):
    """Fields read from checkpoint.json."""

    update: int
    steps_seen: int = 0
    skipped_updates: int = 0
    skipped_in_a_row: int = 0
    spaces: dict[str, Any] = Field(default_factory=dict)
    agent: dict[str, Any] = Field(default_factory=dict)
    context_length: int = Field(1, ge=1)
    seed: int = 0
    env: dict[str, Any] = Field(default_factory=dict)
    data: Data | None = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Contents of a checkpoint directory, loaded."""

    path: Path
    record: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor]
    average: Mapping[str, torch.Tensor]

    @property
    def acting(self) -> dict[str, torch.Tensor]:
        """Weights to evaluate and to deploy: the moving average, if training keeps one."""
        return {**self.weights, **self.average}

    @property
    def label(self) -> str:
        """What it is called in messages."""
        return f"checkpoint '{self.path}'"

    @property
    def update(self) -> int:
        """Number of gradient updates."""
        return int(self.record["update"])

    @property
    def greedy(self) -> bool:
        """Whether the policy takes the most likely action where nobody chooses: if it has a density over a Box.

        The mode of a choice often hides what was learnt: probabilities that are right on average have a mode that is
        wrong each time. The mode of a density is close to its mean, and sampling only adds noise.
        """
        with self.understood():
            action = Spaces.from_json(self.record["spaces"]).action
            return isinstance(action, Box) and self.record["agent"]["actor"]["distribution"] != "grid"

    def training_state(self) -> dict[str, Any]:
        """Load the optimiser's state and priorities. IntegrityError if unreadable."""
        try:
            content = read_checked(self.path, "training.pt", self.record)
            return dict(torch.load(io.BytesIO(content), weights_only=True, map_location="cpu"))
        except UNREADABLE as error:
            raise _describe_damage(self.path, error) from error

    @contextlib.contextmanager
    def understood(self) -> Iterator[None]:
        """Turn errors from using this checkpoint's content into IntegrityError."""
        try:
            yield
        except MALFORMED as error:
            raise _describe_damage(self.path, error) from error


def save(
    directory: Path,
    *,
    record: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    training_state: Mapping[str, Any],
    keep: int,
    average: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write a checkpoint under `directory`, point `latest` at it and delete all but the newest `keep` (and `best`)."""
    name = f"{record['update']:06d}"
    temporary, final = directory / f".tmp-{name}-{os.getpid()}", directory / name
    with explain_errors(f"write a checkpoint into '{directory}'"):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            buffer = io.BytesIO()
            torch.save(dict(training_state), buffer)
            contents = (encode_tensors(weights), encode_tensors(average or {}), buffer.getbuffer())
            files: dict[str, bytes | memoryview] = dict(zip(_FILES, contents, strict=True))
            for file_name, content in {**files, "checkpoint.json": seal(record, files)}.items():
                # The serialisers would report a full disk only as errors of their own types.
                with (temporary / file_name).open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            sync_directory(temporary)
            if final.exists():  # same update reached again after a resume: same content
                _remove(final)
            os.rename(temporary, final)
            sync_directory(directory)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    _point(directory / "latest", name)
    _prune(directory, keep)
    return final


def load(directory: Path, which: str = "latest") -> Checkpoint:
    """Load the checkpoint `which` ("latest", "best" or an update number) under `directory`.

    InputMissing if there is none; IntegrityError if one of its files was changed or damaged, naming the newest intact
    one.
    """
    path = locate_checkpoint(directory, which)
    try:
        record = _read_record(path)
        weights, average = (load_tensors(read_checked(path, name, record)) for name in _FILES[:2])
    except _UNREADABLE as error:
        raise _describe_damage(path, error) from error
    return Checkpoint(path=path, record=record, weights=weights, average=average)


def _read_record(path: Path) -> dict[str, Any]:
    record = read_sealed(path / "checkpoint.json")
    if record.get("update") != int(path.name) or not fits(record, CheckpointRecord):
        raise ValueError("checkpoint.json is not that of this checkpoint")
    return record


def _describe_damage(path: Path, error: Exception) -> IntegrityError:
    """Make the error for a damaged checkpoint, whose hint names the newest intact one."""

    def is_intact(number: int) -> bool:
        other = path.parent / f"{number:06d}"
        try:
            record = _read_record(other)
            for name in _FILES:
                read_checked(other, name, record)
        except (OSError, ValueError):
            return False
        return True

    good = next(filter(is_intact, reversed(list_checkpoints(path.parent))), None)
    hint = "no checkpoint of the run is intact: restore one from a copy, or train again with --fresh"
    if good is not None:
        hint = (
            f"the newest intact one is {good}: name it (@{good}, --checkpoint {good}), or resume from it by deleting "
        )
        hint += "the damaged newer ones"
    return IntegrityError(f"checkpoint '{path}' is damaged: {reason(error).partition('. ')[0]}", hint=hint)


def mark_best(directory: Path, update: int) -> None:
    """Point `best` at the checkpoint of `update`, which pruning then keeps."""
    _point(directory / "best", f"{update:06d}")


def _point(link: Path, name: str) -> None:
    """Make `link` point at the checkpoint called `name`. A copy of a run that followed its links has a folder there,
    whose content is that of a numbered one."""
    if link.is_dir() and not link.is_symlink():
        with explain_errors(f"write '{link}'"):
            _remove(link)
    point(link, name)


def _prune(directory: Path, keep: int) -> None:
    protected = read_link(directory / "best")
    for number in list_checkpoints(directory)[:-keep]:
        name = f"{number:06d}"
        if name != protected:
            _remove(directory / name)
    for link in (*directory.glob(".latest.*"), *directory.glob(".best.*")):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - link.lstat().st_mtime > _LEFT_SECONDS:
                link.unlink()
    for leftover in directory.glob(".tmp-*"):
        pid = leftover.name.rpartition("-")[2]
        try:
            os.kill(int(pid), 0)
        except PermissionError:  # it is alive, and another user's
            continue
        except (ValueError, ProcessLookupError):
            shutil.rmtree(leftover, ignore_errors=True)


def _remove(path: Path) -> None:
    """Rename a checkpoint out of the way, then delete it: a half-deleted one would look damaged."""
    aside = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}-{os.getpid()}")
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def encode_tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Encode tensors as a safetensors file."""
    return safetensors_bytes({key: value.detach().contiguous().cpu() for key, value in tensors.items()})


def load_agent(checkpoint: Checkpoint, device: str = "cpu", *, own: AgentSettings | None = None) -> Agent:
    """Load the agent of a checkpoint, ready to act. InputMissing where it names modules that are not trusted; a caller
    from Python trusts those in `own`, which are settings of its own."""
    trusted = own.model_dump() if own is not None else None
    trust.require_all(checkpoint.record["agent"], where=checkpoint.label, trusted=trusted)
    with checkpoint.understood():
        spaces = Spaces.from_json(checkpoint.record["spaces"])
        settings, weights = AgentSettings.model_validate(checkpoint.record["agent"]), checkpoint.acting

        def make() -> Agent:
            try:
                agent = Agent(spaces, settings, seed=checkpoint.record["seed"])
            except UsageError as error:
                # Nobody typed these settings here.
                raise Mismatch(error.message) from error
            if not any(name.startswith(TARGET_HEADS) for name in weights):
                # The weights are those of acting alone.
                agent.target_heads = agent.advantage_scale = agent.temperature = None
            return agent

        is_plain = settings.timestep.kind == "auto" and not isinstance(settings.sequence, SequencePluginSettings)
        # Modules of a plug-in may need values while they are built; its author is trusted.
        if is_plain and all(loss.kind == "next-step" for loss in settings.auxiliary_losses):
            outline, context = make_outline(make, weights), checkpoint.record["context_length"]
            require_fit(outline, weights)
            size = count_bytes(outline.sequence.memory(num_actors=1, capacity=context, device="meta"))
            if size > _MOST_MEMORY:  # more than any agent that is trained remembers
                raise Mismatch(f"a context of {context:,} tokens takes {size / 2**30:,.0f} GiB an actor")
        with limit_parameters(weights):
            agent = make()
        require_fit(agent, weights)
        agent.load_state_dict(weights)
    return agent.to(resolve_device(device)).eval()


def resolve_device(name: str) -> torch.device:
    """Resolve a device: `auto` is CUDA if there is one, and each rank of a host has a device of its own. InputMissing
    for a CUDA device that is not there, UsageError for nonsense."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and count_ranks() > 1:
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"train.device '{name}' is not a device", hint="use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"train.device '{name}' is not supported", hint="use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise InputMissing(
            f"train.device '{name}' is not here: {found} CUDA device{'s' * (found != 1)} found",
            hint="use auto or cpu; see amago doctor",
        )
    return device
