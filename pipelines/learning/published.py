"""Policies that a training publishes in the lake it trains on, for collectors on other hosts.

    policies/RUN/000200.safetensors  weights to act with
                 000200.json         what the weights are of: update, spaces, settings of the agent; their SHA-256
                 latest.json         the newest update, and the SHA-256 of its record

`latest.json` is replaced on condition that no other process has written it. What is read may come from somebody else:
files are limited in size and compared with their checksums, and weights are tensors only.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from pipelines.errors import InputMissing, IntegrityError, UsageError
from pipelines.files import atomic
from pipelines.files.checksums import Mismatch, checksum, parse_sealed, seal
from pipelines.files.json import Form, fits
from pipelines.files.malformed import UNREADABLE, reason
from pipelines.lake.storage import Storage, is_remote
from pipelines.lake.store import Lake
from pipelines.learning.checkpoint import Checkpoint, CheckpointRecord, encode_tensors

FOLDER = "policies"
KEPT = 3  # newest policies of a run
_LATEST = "latest.json"
_POINTER_BYTES, _WEIGHTS_BYTES = 1 << 16, 1 << 34
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")
_UNREADABLE: tuple[type[Exception], ...] = (*UNREADABLE, SafetensorError)
_RECORDED = ("update", "steps_seen", "spaces", "agent", "context_length", "seed", "env")


class _Pointer(Form):
    update: int = Field(ge=0)
    run: str


@dataclass(frozen=True)
class PublishedPolicy:
    """The newest policy of a run in a lake; `checksum` is that of its record."""

    run: str
    update: int
    checksum: str


def folder_name(run: str) -> str:
    """Name a run's folder of policies.

    >>> folder_name("my maze-1f9c")
    'my-maze-1f9c'
    """
    return re.sub(r"[^A-Za-z0-9_.\-]+", "-", run).lstrip("-.")[-200:] or "run"


class PolicyWriter:
    """Writes policies of one run into a lake."""

    def __init__(self, lake: Lake, run: str) -> None:
        self._storage, self._run = lake.storage, run
        self._folder = f"{FOLDER}/{folder_name(run)}"
        self._kept: list[str] | None = None  # in the order of publication

    def write(self, checkpoint: Checkpoint) -> None:
        """Publish the acting weights of a checkpoint, and remove old ones. FileExistsError if another process publishes
        policies of this run; OSError as the storage raises it.
        """
        name, storage = f"{checkpoint.update:06d}", self._storage
        if self._kept is None:
            listed = storage.names(self._folder)
            self._kept = sorted(file.removesuffix(".json") for file in listed if re.fullmatch(r"\d{6,}\.json", file))
        weights = encode_tensors(checkpoint.acting)
        record = {key: checkpoint.record[key] for key in _RECORDED if key in checkpoint.record}
        content = seal(record | {"run": self._run}, {f"{name}.safetensors": weights})
        pointer = {"update": checkpoint.update, "run": folder_name(self._run), "time": time.time()}
        found = storage.find(f"{self._folder}/{_LATEST}")
        storage.create_folders()
        staged = atomic.stage(storage.local / "tmp", f"policy-{name}", lambda file: file.write(weights))
        try:
            storage.publish(staged, f"{self._folder}/{name}.safetensors")
        finally:
            staged.unlink(missing_ok=True)
        storage.write(f"{self._folder}/{name}.json", content)
        storage.swap(
            f"{self._folder}/{_LATEST}", seal(pointer, {f"{name}.json": content}), None if found is None else found[1]
        )
        self._kept = [*(each for each in self._kept if each != name), name]
        if old := self._kept[:-KEPT]:
            storage.remove(*(f"{self._folder}/{each}{ending}" for each in old for ending in (".json", ".safetensors")))
            self._kept = self._kept[-KEPT:]


def find_published_lake(place: str) -> tuple[str, str] | None:
    """Split LAKE or LAKE/RUN into the lake and the run whose policies are followed ("": the only one); None for a
    directory outside of any lake. The lake may not exist yet.
    """
    if _has_lake(place):
        return place, ""
    body, question, options = place.partition("?") if is_remote(place) else (place, "", "")
    above, _, run = body.rstrip("/").rpartition("/")
    if above and _RUN.fullmatch(run) and _has_lake(above + question + options):
        return above + question + options, run
    return (place, "") if is_remote(place) else None


def _has_lake(place: str) -> bool:
    if is_remote(place):
        return Lake.find(place) is not None
    return (Path(place) / "lake.json").is_file()


def find_newest(lake: Lake, run: str = "") -> PublishedPolicy | None:
    """Find the newest policy of `run` ("": of the only run that publishes); None if there is none yet.

    UsageError if several runs publish; IntegrityError if the pointer is damaged; OSError as the storage raises it.
    """
    if not run:
        runs = sorted(name for name in lake.storage.folders(FOLDER) if _RUN.fullmatch(name))
        if len(runs) > 1:
            names = ", ".join(runs)
            raise UsageError(f"{len(runs)} runs publish policies in '{lake.name}': {names}", hint="name one: LAKE/RUN")
        if not runs:
            return None
        run = runs[0]
    if not _RUN.fullmatch(run):
        raise UsageError(f"'{run}' is not the name of a run that publishes policies", hint="give LAKE/RUN")
    key = f"{FOLDER}/{run}/{_LATEST}"
    found = lake.storage.find(key, limit=_POINTER_BYTES)
    if found is None:
        return None
    try:
        pointer = parse_sealed(found[0], _LATEST)
        if not fits(pointer, _Pointer) or pointer["run"] != run:
            raise Mismatch(f"{_LATEST} is not that of a policy of '{run}'")
        return PublishedPolicy(run, pointer["update"], pointer["files"][f"{pointer['update']:06d}.json"])
    except UNREADABLE as error:
        raise IntegrityError(f"'{lake.storage.url(key)}' is damaged: {reason(error)}", hint="train again") from error


def load(lake: Lake, found: PublishedPolicy) -> Checkpoint:
    """Load a published policy. InputMissing if it is gone, IntegrityError if it is damaged or too large."""
    name = f"{FOLDER}/{found.run}/{found.update:06d}"
    try:
        content = lake.storage.read(f"{name}.json")
        if checksum(content) != found.checksum:
            raise Mismatch("its record is not what was published")
        record = parse_sealed(content, f"{found.update:06d}.json")
        if record.get("update") != found.update or not fits(record, CheckpointRecord):
            raise Mismatch("its record is not that of this policy")
        tensors = load_tensors(_read_weights(lake.storage, f"{name}.safetensors", record))
    except FileNotFoundError as error:
        raise InputMissing(f"policy {found.update} of '{found.run}' is gone from '{lake.name}'") from error
    except _UNREADABLE as error:
        raise IntegrityError(f"policy '{lake.storage.url(name)}' is damaged: {reason(error)}") from error
    return Checkpoint(path=Path(lake.storage.url(name)), record=record, weights=tensors, average={})


def _read_weights(storage: Storage, key: str, record: dict[str, Any]) -> bytes:
    """Read a file that `record` vouches for; this host may have an older one of the same name."""
    expected = record["files"].get(key.rpartition("/")[2])
    for last in (False, True):
        if storage.size(key) > _WEIGHTS_BYTES:
            raise Mismatch(f"its weights have more than {_WEIGHTS_BYTES >> 30} GiB")
        content = storage.fetch(key).read_bytes()
        if checksum(content) == expected:
            return content
        if last or not storage.forget(key):
            break
    raise Mismatch("its weights are not what was published (SHA-256)")
