"""Fetching a public file once: to a temporary name, checked, then renamed."""

from __future__ import annotations

import hashlib
import secrets
import urllib.request
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

from pipelines.errors import InputMissing, IntegrityError
from pipelines.events import Listener, Notice, Progress
from pipelines.files.atomic import explained, publish
from pipelines.files.locks import hold_lock
from pipelines.files.user_cache import cache_home

_PIECE = 1 << 20
_TIMEOUT_SECONDS = 30.0


def folder() -> Path:
    """Return the folder of downloads: `datasets` in the cache folder of this host."""
    return cache_home() / "datasets"


def fetched(url: str, *, name: str, sha256: str | None, listener: Listener) -> Path:
    """Return the file at `url`, from the cache folder if it is there. One process of a host fetches, the others wait.

    InputMissing if it cannot be reached; IntegrityError if it is not what `sha256` says, or shorter than announced.
    """
    path = folder() / name
    if path.is_file():
        return path
    with explained(f"write '{path.parent}' (AMAGO_CACHE names another place)"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(path.with_name(f".{name}.lock")):
        if not path.is_file():
            _fetch(url, path, sha256, listener)
    return path


def _fetch(url: str, path: Path, sha256: str | None, listener: Listener) -> None:
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    digest, done = hashlib.sha256(), 0
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
            size = int(answer.headers.get("Content-Length") or 0)
            while piece := answer.read(_PIECE):
                with explained(f"write '{part}'"), part.open("ab") as file:
                    file.write(piece)
                digest.update(piece)
                done += len(piece)
                listener(Progress(stage=f"fetch {path.name}", done=done, total=size or None, unit="B"))
        if done < size:
            raise IntegrityError(f"'{url}' ended after {done:,} of {size:,} bytes", hint="repeat the command")
        found = digest.hexdigest()
        if sha256 is not None and found != sha256:
            raise IntegrityError(
                f"what '{url}' gave is not the file that was published (SHA-256 {found}, {sha256} expected)",
                hint="repeat the command, or fetch it yourself and give its path",
            )
        if sha256 is None:
            listener(Notice(text=f"{path.name}: no checksum of it is known; its SHA-256 is {found}", level="warning"))
        with explained(f"write '{path}'"):
            publish(part, path)
    except (OSError, HTTPException) as error:  # URLError and timeouts are OSErrors
        reason = error if isinstance(error, HTTPError) else getattr(error, "reason", None) or error
        raise InputMissing(
            f"cannot fetch '{url}': {reason}", hint=f"fetch it elsewhere and give its path, or put it at '{path}'"
        ) from error
    finally:
        part.unlink(missing_ok=True)
