"""A record that vouches for the files beside it: their SHA-256, and its own.

A flipped bit in weights is still a number, and in JSON often still JSON; only a checksum finds it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.files.malformed import open_regular, read_limited


class Mismatch(ValueError):
    """A file is not what was written; the message names it."""


def seal(record: Mapping[str, Any], files: Mapping[str, bytes | memoryview]) -> bytes:
    """Write the JSON of `record` with the checksums of `files` and of itself."""
    whole = {**record, "files": {name: checksum(content) for name, content in files.items()}}
    return json.dumps({**whole, "checksum": _checksum_record(whole)}, indent=1).encode()


def read_sealed(path: Path) -> dict[str, Any]:
    """Read the record at `path`. ValueError if the file is not such a record or was altered."""
    return parse_sealed(read_limited(path), path.name)


def parse_sealed(content: bytes, name: str) -> dict[str, Any]:
    """Parse the record in the content of a file called `name`. ValueError if it is not such a record or was altered."""
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Mismatch(f"{name} cannot be read") from error
    if not isinstance(record, dict) or not isinstance(record.get("files"), dict):
        raise Mismatch(f"{name} is not a record with checksums")
    if record.pop("checksum", None) != _checksum_record(record):
        raise Mismatch(f"{name} is not as it was written")
    return record


def checksum(content: bytes | memoryview) -> str:
    """Compute the SHA-256 of a file's content."""
    return hashlib.sha256(content).hexdigest()


def read_checked(folder: Path, name: str, record: Mapping[str, Any]) -> bytes:
    """Read a file that `record` vouches for. Mismatch if it is gone, or not as it was written."""
    try:
        with open_regular(folder / name) as file:
            content = file.read()
    except FileNotFoundError as error:
        raise Mismatch(f"{name} is missing") from error
    if checksum(content) != record["files"].get(name):
        raise Mismatch(f"{name} is not as it was written (SHA-256)")
    return content


def _checksum_record(record: Mapping[str, Any]) -> str:
    """Compute the SHA-256 of a record as it will be read: decoded from JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(record)), sort_keys=True).encode()).hexdigest()
