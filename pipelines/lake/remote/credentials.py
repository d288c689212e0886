"""Access keys of AWS from the files of its tools, for a process whose environment has none.

AWS_PROFILE (else `default`) names a section of AWS_SHARED_CREDENTIALS_FILE (else ~/.aws/credentials) and of
AWS_CONFIG_FILE (else ~/.aws/config). Web identities, containers and instances are left to the store's client.
"""

from __future__ import annotations

import configparser
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from pipelines.errors import StorageError, UsageError
from pipelines.lake.remote.location import Location

_ELSEWHERE = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_FIELDS = {
    "access_key_id": "aws_access_key_id",
    "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
    "region": "region",
}
_METADATA = "http://169.254.169.254"
_METADATA_SECONDS = 1.0


def found(location: Location) -> dict[str, str]:
    """Return the keys and the region of the chosen profile; none where the environment has others.

    UsageError if AWS_PROFILE names a profile without keys; StorageError if neither the environment, the files nor the
    machine have any.
    """
    name = os.environ.get("AWS_PROFILE")
    if any(os.environ.get(variable) for variable in _ELSEWHERE):
        return {}
    sections = _section("AWS_CONFIG_FILE", "config", f"profile {name}" if name else "default")
    sections |= _section("AWS_SHARED_CREDENTIALS_FILE", "credentials", name or "default")
    keys = {key: sections[field] for key, field in _FIELDS.items() if sections.get(field)}
    if {"access_key_id", "secret_access_key"} <= keys.keys():
        return keys
    if name is not None:
        raise UsageError(
            f"AWS_PROFILE is '{name}', which has no access keys in the files of AWS",
            hint=f'if it signs in otherwise: eval "$(aws configure export-credentials --profile {name} --format env)"',
        )
    if not _is_on_an_instance():
        raise StorageError(f"no credentials were found: give {location.credentials}")
    return {key: value for key, value in keys.items() if key == "region"}


def _is_on_an_instance() -> bool:
    """Return whether there is a service that gives credentials to the programs of a machine of AWS."""
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    address = urlsplit(os.environ.get("AWS_METADATA_ENDPOINT") or _METADATA)
    try:
        socket.create_connection((address.hostname or "", address.port or 80), timeout=_METADATA_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


def _section(variable: str, file: str, name: str) -> dict[str, str]:
    path = Path(os.environ.get(variable) or Path.home() / ".aws" / file)
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError, OSError):
        return {}
    return dict(parser[name]) if parser.has_section(name) else {}
