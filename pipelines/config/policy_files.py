"""Policies on disk, found and identified without torch, so that a wrong name is reported at once: checkpoints of a run,
the record of a policy bundle, and the source of a warm start.

The record of a bundle, policy.json, has the checksum of every file of the bundle, and its own. Nothing in it is
imported or executed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from pipelines import trust
from pipelines.config import amago_weights
from pipelines.config.places import AMAGO, find_bundle, is_run, split_checkpoint, suggest
from pipelines.errors import InputMissing, IntegrityError, UsageError
from pipelines.files.checksums import Mismatch, checksum, parse_sealed, read_sealed
from pipelines.files.hub import HubAddress, is_on_hub
from pipelines.files.json import Form, fits, read_object
from pipelines.files.malformed import UNREADABLE, read_limited, reason

RECORD = "policy.json"
_NAME = re.compile(r"\d{6,}")


def list_checkpoints(directory: Path) -> list[int]:
    """List the update numbers of the complete checkpoints under `directory`, ascending."""
    if not directory.is_dir():
        return []
    found = (entry for entry in directory.iterdir() if _NAME.fullmatch(entry.name))
    return sorted(int(entry.name) for entry in found if (entry / "checkpoint.json").is_file())


def read_link(link: Path) -> str:
    """Read the name of the checkpoint that `link`, or the folder in its place, stands for; "" if none."""
    if link.is_symlink():
        return os.readlink(link)
    update = (read_object(link / "checkpoint.json") or {}).get("update")
    return f"{update:06d}" if isinstance(update, int) else ""


def locate_checkpoint(directory: Path, which: str) -> Path:
    """Find the checkpoint `which` ("latest", "best" or an update number) under `directory`. InputMissing if there is
    none, UsageError for anything else."""
    known = list_checkpoints(directory)
    if not known:
        raise InputMissing(
            f"no checkpoint in '{directory}'", hint=f"train the run first: amago train --from-lake {directory.parent}"
        )
    if which == "latest":
        return directory / f"{known[-1]:06d}"  # not by the link: a kill between rename and link loses nothing
    if which == "best":
        name = read_link(directory / "best")
        if not name or not (directory / name / "checkpoint.json").is_file():
            hint = "evaluate with evaluate.mark_best = true, or use 'latest'"
            raise InputMissing(f"no best checkpoint in '{directory}'", hint=hint)
        return directory / name
    if not which.isdigit():
        raise UsageError(f"'{which}' is not a checkpoint", hint="give latest, best or an update number")
    if int(which) not in known:
        raise InputMissing(f"no checkpoint {which} in '{directory}'", hint=f"there are: {', '.join(map(str, known))}")
    return directory / f"{int(which):06d}"


class _BundleRecord(Form):
    """Fields read from policy.json."""

    format: str
    version: int
    spaces: dict[str, Any]
    agent: dict[str, Any]
    context_length: int = Field(ge=1)
    greedy: bool
    update: int = Field(ge=0)
    env: dict[str, Any]


def read_record(directory: Path) -> dict[str, Any]:
    """Read policy.json, with its own SHA-256 as `checksum`, which therefore covers all files of the bundle.

    FileNotFoundError if there is none, ValueError if it was altered.
    """
    content = read_limited(directory / RECORD)
    record = parse_sealed(content, RECORD)
    if not fits(record, _BundleRecord):
        raise Mismatch(f"{RECORD} has not the fields of one")
    return record | {"checksum": checksum(content)}


def load_record(directory: Path) -> dict[str, Any]:
    """As `read_record`, but IntegrityError if the record cannot be read or was altered."""
    try:
        return read_record(directory)
    except UNREADABLE as error:
        raise make_damage_error(directory, error) from error


def make_damage_error(directory: Path, error: Exception) -> IntegrityError:
    """Make the error for a bundle whose content raised `error`."""
    return IntegrityError(
        f"policy bundle '{directory}' is damaged: {reason(error)}", hint="copy it again, or make it again"
    )


class PolicySource:
    """A policy that training takes, by its `source`: RUN[@CHECKPOINT], a bundle, zoo:NAME, hf://ORG/NAME or amago:PATH.
    A `setting` names it: `init.source`, whose weights a run begins with, `agent.reference`, or `train.like`, a run's
    checkpoint whose trajectories are drawn from."""

    def __init__(self, source: str, setting: str = "init.source") -> None:
        self.source, self.setting = source, setting

    def _read(self, stored: Mapping[str, Any] | None) -> str:
        """Read the setting of a run; "" if it has none."""
        table, _, key = self.setting.partition(".")
        found = (stored or {}).get(table)
        return str(found.get(key, "")) if isinstance(found, Mapping) else ""

    @property
    def _address(self) -> HubAddress | None:
        return HubAddress.parse(self.source, kind="models") if is_on_hub(self.source) else None

    def read_network(self) -> dict[str, Any]:
        """Read the settings that the weights of the warm start need: [agent], and the context length.

        InputMissing if there is no such policy, or if it names a module that is not trusted; IntegrityError if its
        record is damaged.
        """
        if self.source.startswith(AMAGO):
            weights = amago_weights.read(self.source)
            known = weights.context_length
            return {"agent": weights.agent, **({"train": {"context_length": known}} if known else {})}
        directory, checkpoint = self._find_weights()
        try:
            record = read_record(directory) if checkpoint is None else read_sealed(checkpoint / "checkpoint.json")
            agent, context = record.get("agent"), record.get("context_length")
            if not isinstance(agent, dict) or not isinstance(context, int):
                raise Mismatch("its record lacks the settings of its agent")
        except UNREADABLE as error:
            if checkpoint is None:
                raise make_damage_error(directory, error) from error
            text = f"checkpoint '{checkpoint}' is damaged: {reason(error)}"
            raise IntegrityError(text, hint="name another one: RUN@CHECKPOINT") from error
        trust.require_all(agent, where=f"{self.setting} '{self.source}'")
        kept = {key: value for key, value in agent.items() if not key.startswith("reference")}
        return {"agent": kept, "train": {"context_length": context}}

    def pin(self, stored: Mapping[str, Any] | None) -> str:
        """Add the number of its checkpoint, or its commit on the Hub, to the source, so that a run which is repeated
        begins with the same weights. A run that has begun keeps its own: what it has `stored`, unless the call names
        another checkpoint."""
        if stored and self.is_stored(stored):
            return self._read(stored)
        if self.source.startswith(AMAGO):
            return self.source
        _, checkpoint = self._find_weights()
        if self._address is not None:
            return str(self._address.pin())
        return self.source if checkpoint is None else f"{split_checkpoint(self.source)[0]}@{int(checkpoint.name)}"

    def is_stored(self, stored: Mapping[str, Any] | None) -> bool:
        """Check whether a run has stored this source; one without a number means the number which is stored."""
        before = self._read(stored)
        if self._address is not None and is_on_hub(before):
            pinned = HubAddress.parse(before, kind="models")
            return self._address in (pinned, replace(pinned, revision=""))
        path, which = split_checkpoint(self.source)
        return bool(before) and (
            self.source == before or (which in ("", "latest", "best") and split_checkpoint(before)[0] == path)
        )

    def _find_weights(self) -> tuple[Path, Path | None]:
        """Find the directory of a bundle (and None), or of a run and that of its checkpoint."""
        path, which = split_checkpoint(self.source)
        if is_run(Path(path)):
            return Path(path), locate_checkpoint(Path(path) / "checkpoints", which or "latest")
        bundle = find_bundle(self.source)
        if bundle is None:
            known = "give RUN[@CHECKPOINT], a bundle, zoo:NAME, hf://ORG/NAME or amago:PATH"
            where = suggest(Path(path), is_run, inside="it contains runs", otherwise=known)
            raise InputMissing(f"{self.setting}: no run or policy bundle at '{self.source}'", hint=where)
        return bundle, None
