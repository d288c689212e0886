"""What expired in a lake that was copied into, so that the next copy does not bring it back.

The log forgets what expired once the files are deleted. It names segments, and a copy may have written those itself,
under ids that its source does not know.
`expired/<us>-<token>.uids` are the CRC-32 and the uids of one expiry, 16 bytes each. A lake begins to keep them when it
is first copied into: in others they would grow with every trajectory that passes through, for nothing.
"""

from __future__ import annotations

import secrets
import time
import zlib

import numpy as np

from pipelines.errors import IntegrityError
from pipelines.files.atomic import explained
from pipelines.lake.storage import Storage

FOLDER = "expired"
_SUFFIX = ".uids"
_MOST_FILES = 64
_MERGED_UIDS = 1 << 20  # a file that has so many is left as it is


def keep_expired(storage: Storage) -> None:
    """Begin to keep what expires in a lake. StageFailed if the storage fails."""
    if not _names(storage):
        _write(storage, np.zeros(0, "S16"))


def add_expired(storage: Storage, uids: np.ndarray) -> None:
    """Add uids ("S16") to what expired, if the lake keeps that; under the lease of maintenance, before they expire."""
    names = _names(storage)
    if not names or not len(uids):
        return
    merged: list[str] = []
    if len(names) >= _MOST_FILES:
        found = {name: _read(storage, name) for name in names}
        merged = [name for name, some in found.items() if len(some) < _MERGED_UIDS]
        uids = np.concatenate([uids, *(found[name] for name in merged)])
    _write(storage, np.unique(uids))
    with explained(f"write '{storage.url(FOLDER)}'"):
        storage.remove(*(f"{FOLDER}/{name}" for name in merged))


def read_expired(storage: Storage) -> np.ndarray:
    """Read the sorted uids (n,) "S16" of what expired. IntegrityError for a damaged file."""
    while True:
        try:
            found = [_read(storage, name) for name in _names(storage)]
        except FileNotFoundError:  # merged meanwhile
            continue
        return np.unique(np.concatenate([np.zeros(0, "S16"), *found]))


def _names(storage: Storage) -> list[str]:
    with explained(f"read '{storage.url(FOLDER)}'"):
        return sorted(name for name in storage.names(FOLDER) if name.endswith(_SUFFIX) and not name.startswith("."))


def _read(storage: Storage, name: str) -> np.ndarray:
    key = f"{FOLDER}/{name}"
    content = storage.read(key)
    if len(content) % 16 != 4 or zlib.crc32(content[4:]) != int.from_bytes(content[:4], "little"):
        raise IntegrityError(
            f"'{storage.url(key)}' is damaged",
            hint="restore it from a copy; or remove it, and what expired can be copied into the lake again",
        )
    return np.frombuffer(content[4:], "S16")


def _write(storage: Storage, uids: np.ndarray) -> None:
    name, content = f"{time.time_ns() // 1000:016x}-{secrets.token_hex(4)}{_SUFFIX}", uids.tobytes()
    with explained(f"write '{storage.url(FOLDER)}'"):
        storage.write(f"{FOLDER}/{name}", zlib.crc32(content).to_bytes(4, "little") + content)
