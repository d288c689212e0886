"""What is out of every reader's sight: expired trajectories and damaged segments.

`tombstones/<us>-<token>.json` is one decision to expire: {"time", "reason", "segments": [ids that are dead as a
whole], "trajectories": {segment id: [uids]}}. `quarantine/NAME.json` marks a segment that cannot be read.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipelines.config.atomic import explained, storage_error
from pipelines.errors import IntegrityError
from pipelines.lake.storage import Storage

FOLDER, QUARANTINE = "tombstones", "quarantine"
FRESH_SECONDS = 2.0  # a file may appear in the same tick of the file system's clock


@dataclass(frozen=True, kw_only=True)
class Tombstone:
    """One decision to expire: `segments` as a whole, `trajectories` of others by their uids (32 hex digits)."""

    time: float
    reason: str
    segments: tuple[str, ...] = ()
    trajectories: Mapping[str, Sequence[str]] = field(default_factory=dict)


def bury(storage: Storage, tombstone: Tombstone) -> str:
    """Write a tombstone, in one step for all that it names; returns its name."""
    name = f"{time.time_ns() // 1000:016x}-{secrets.token_hex(4)}.json"
    text = json.dumps(
        {
            "time": tombstone.time,
            "reason": tombstone.reason,
            "segments": list(tombstone.segments),
            "trajectories": {id: list(uids) for id, uids in tombstone.trajectories.items()},
        }
    )
    with explained(f"write '{storage.url(FOLDER)}'"):
        storage.write(f"{FOLDER}/{name}", text.encode())
    return name


def read_tombstone(storage: Storage, name: str) -> Tombstone:
    """A tombstone by its name. FileNotFoundError if it is gone, IntegrityError if it is damaged."""
    key = f"{FOLDER}/{name}"
    try:
        data = json.loads(storage.read(key))
        return Tombstone(
            time=float(data["time"]),
            reason=str(data["reason"]),
            segments=tuple(data["segments"]),
            trajectories={id: tuple(uids) for id, uids in data["trajectories"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, IsADirectoryError) as error:
        raise IntegrityError(
            f"tombstone '{storage.url(key)}' is damaged",
            hint="restore it from a copy, or remove it: what it hid is seen again",
        ) from error


class Hidden:
    """What is hidden now; a refresh costs what is new.

    `whole`: ids of segments of which nothing is live; `partial`: dead uids ("S16", sorted) of other segments.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._stamps: dict[str, int | None] = {}
        self._read: set[str] = set()
        self._quarantined: set[str] = set()
        self.whole: set[str] = set()
        self.partial: dict[str, np.ndarray] = {}

    def refresh(self) -> set[str]:
        """Ids (of quarantined segments: names without their hour) that were touched since the last time."""
        touched: set[str] = set()
        if self._moved(QUARANTINE):
            names = self._names(QUARANTINE)
            touched |= names ^ self._quarantined
            self._quarantined = names
        if self._moved(FOLDER):
            for name in sorted(self._names(FOLDER) - self._read):
                touched |= self._take(name)
        return touched

    def hides(self, id: str) -> bool:
        """Whether nothing of the segment is to be seen."""
        return id in self.whole or id.rpartition("/")[2] in self._quarantined

    def alive(self, id: str, uids: np.ndarray) -> np.ndarray:
        """(n,) bool: which of the `uids` ("S16") of a segment are not hidden."""
        if self.hides(id):
            return np.zeros(len(uids), dtype=bool)
        dead = self.partial.get(id)
        return np.ones(len(uids), dtype=bool) if dead is None else ~np.isin(uids, dead)

    def _take(self, name: str) -> set[str]:
        try:
            tombstone = read_tombstone(self._storage, f"{name}.json")
        except FileNotFoundError:  # swept: the files it hid are gone too
            return set()
        self._read.add(name)
        self.whole.update(tombstone.segments)
        for id, uids in tombstone.trajectories.items():
            raw = np.array([bytes.fromhex(uid) for uid in uids], dtype="S16")
            self.partial[id] = np.union1d(self.partial.get(id, raw), raw)
        return {*tombstone.segments, *tombstone.trajectories}

    def _moved(self, folder: str) -> bool:
        """Whether a name may have appeared in `folder` since it was last listed."""
        try:
            stamp = self._storage.stamp(folder)
        except OSError as error:
            raise storage_error(error, f"read '{self._storage.url(folder)}'") from error
        if stamp is not None and self._stamps.get(folder) == stamp:
            return False
        settled = stamp is not None and (time.time_ns() - stamp > FRESH_SECONDS * 1e9 or stamp == 0)
        self._stamps[folder] = stamp if settled else None
        return True

    def _names(self, folder: str) -> set[str]:
        try:
            names = self._storage.names(folder)
        except OSError as error:
            raise storage_error(error, f"read '{self._storage.url(folder)}'") from error
        return {name.removesuffix(".json") for name in names if name.endswith(".json") and not name.startswith(".")}
