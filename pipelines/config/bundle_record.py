"""The record of a policy bundle, policy.json, read without importing torch.

It has the checksum of every file of the bundle, and its own. Nothing in it is imported or executed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from pipelines.errors import IntegrityError
from pipelines.files.checksums import Mismatch, checksum, parse_sealed
from pipelines.files.json import Form, fits
from pipelines.files.malformed import UNREADABLE, read_limited, reason

RECORD = "policy.json"


class _BundleRecord(Form):
    """What is read of policy.json."""

    format: str
    version: int
    spaces: dict[str, Any]
    agent: dict[str, Any]
    context_length: int = Field(ge=1)
    greedy: bool
    update: int = 0
    env: dict[str, Any] = Field(default_factory=dict)


def identify(directory: Path) -> str:
    """Return the checksum of a bundle, which covers all of its files. IntegrityError if its record was altered."""
    try:
        return str(read_record(directory)["checksum"])
    except UNREADABLE as error:
        raise make_damage_error(directory, error) from error


def read_settings(directory: Path) -> dict[str, Any]:
    """Return the settings of the environment of a bundle. Errors as of `identify`."""
    try:
        return dict(read_record(directory)["env"])
    except UNREADABLE as error:
        raise make_damage_error(directory, error) from error


def read_record(directory: Path) -> dict[str, Any]:
    """Return policy.json, with its own SHA-256 as `checksum`. FileNotFoundError if there is none, ValueError if it was
    altered."""
    content = read_limited(directory / RECORD)
    record = parse_sealed(content, RECORD)
    if not fits(record, _BundleRecord):
        raise Mismatch(f"{RECORD} has not the fields of one")
    return record | {"checksum": checksum(content)}


def make_damage_error(directory: Path, error: Exception) -> IntegrityError:
    """Return the error for a bundle whose content raised `error`."""
    return IntegrityError(
        f"policy bundle '{directory}' is damaged: {reason(error)}", hint="copy it again, or make it again"
    )
