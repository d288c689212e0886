"""Reading a policy bundle, the directory that `amago export` writes, as a checkpoint to act with.

Nothing in a bundle is imported or executed. Its record, policy.json, has the checksum of every file, which are all
compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from pipelines.config.policy_files import RECORD, make_damage_error, read_record
from pipelines.errors import InputMissing
from pipelines.files.checksums import Mismatch, read_checked
from pipelines.files.malformed import MALFORMED, UNREADABLE
from pipelines.learning.checkpoint import Checkpoint

FORMAT, VERSION = "amago-policy", 1
WEIGHTS = "weights.safetensors"
_UNREADABLE: tuple[type[Exception], ...] = (*UNREADABLE, SafetensorError)


class Bundle(Checkpoint):
    """A bundle, loaded; its weights are those of acting."""

    @property
    def label(self) -> str:
        return f"policy bundle '{self.path}'"

    @property
    def identity(self) -> str:
        """The name of its policy in lakes, which depends on its content alone."""
        return f"bundle-{self.record['checksum'][:12]}"

    @property
    def greedy(self) -> bool:
        """Whether it takes the most likely actions unless its user chooses, as in the evaluation of its export."""
        return bool(self.record["greedy"])

    @property
    def env(self) -> dict[str, Any]:
        """The settings of the environment in which it was trained; empty if unknown."""
        return dict(self.record["env"])

    @contextlib.contextmanager
    def understood(self) -> Iterator[None]:
        try:
            yield
        except MALFORMED as error:
            raise make_damage_error(self.path, error) from error


def read(directory: Path) -> Bundle:
    """Load a bundle.

    InputMissing if there is none or it needs a newer version; IntegrityError if one of its files was altered.
    """
    try:
        record = read_record(directory)
        contents = checked_files(directory, record)
        if WEIGHTS not in contents:
            raise Mismatch(f"{WEIGHTS} is not among its files")
        if (record["format"], record["version"]) != (FORMAT, VERSION):
            raise InputMissing(f"'{directory}' has format {record['format']} {record['version']}", hint="upgrade amago")
        weights = load_tensors(contents[WEIGHTS])
    except FileNotFoundError as error:
        raise InputMissing(f"no policy bundle at '{directory}'", hint="make one with: amago export RUN") from error
    except _UNREADABLE as error:
        raise make_damage_error(directory, error) from error
    return Bundle(path=directory, record=record | {"seed": 0}, weights=weights, average={})


def checked_files(directory: Path, record: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the content of every file that `record` names. ValueError if one was altered."""
    outside = [name for name in record["files"] if Path(name).name != name]
    if outside:
        raise Mismatch(f"{RECORD} names a file outside its directory")
    return {name: read_checked(directory, name, record) for name in record["files"]}
