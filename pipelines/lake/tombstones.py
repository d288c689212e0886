"""Removals: expired trajectories and quarantined segments.

`tombstones/<us>-<token>.json` is one decision to expire: {"time", "reason", "segments": [ids removed as a whole],
"trajectories": {segment id: [uids]}, "steps": {collector: steps}, "merges": [names]}. Once the files it names are
deleted it is merged with others like it into one that keeps the counts of steps and lists the others under "merges".
`quarantine/NAME.json` marks a segment that cannot be read.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pipelines.errors import AmagoError, IntegrityError
from pipelines.events import Listener, Notice, silent
from pipelines.files.atomic import explained, storage_error
from pipelines.files.malformed import MALFORMED
from pipelines.lake.storage import FRESH_SECONDS, Storage

if TYPE_CHECKING:
    from pipelines.lake.footer import Footer

FOLDER, QUARANTINE = "tombstones", "quarantine"
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{8}\.json")
_MARKER = re.compile(r"[^.].*\.json", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Tombstone:
    """A decision to expire `segments` as a whole, and `trajectories` of others by their uids (32 hex digits).

    `steps`: how many steps of each collector expired; `merges`: names of the tombstones whose steps are included.
    """

    time: float
    reason: str
    segments: tuple[str, ...] = ()
    trajectories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    merges: tuple[str, ...] = ()

    @property
    def names(self) -> set[str]:
        """Ids of the segments that it affects."""
        return {*self.segments, *self.trajectories}


def write_tombstone(storage: Storage, tombstone: Tombstone) -> str:
    """Write a tombstone, atomically for all that it names; returns its name."""
    name = f"{time.time_ns() // 1000:016x}-{secrets.token_hex(4)}.json"
    text = json.dumps(
        {
            "time": tombstone.time,
            "reason": tombstone.reason,
            "segments": list(tombstone.segments),
            "trajectories": {id: list(uids) for id, uids in tombstone.trajectories.items()},
            "steps": dict(tombstone.steps),
            "merges": list(tombstone.merges),
        }
    )
    with explained(f"write '{storage.url(FOLDER)}'"):
        storage.write(f"{FOLDER}/{name}", text.encode())
    return name


def read_tombstone(storage: Storage, name: str) -> Tombstone:
    """Read a tombstone by its name. FileNotFoundError if it is gone, IntegrityError if it is damaged, StageFailed if
    the storage fails.
    """
    key = f"{FOLDER}/{name}"
    try:
        data = json.loads(storage.read(key))
        return Tombstone(
            time=float(data["time"]),
            reason=str(data["reason"]),
            segments=_texts(data["segments"]),
            trajectories={id: _uids(uids) for id, uids in data["trajectories"].items()},
            steps={collector: int(steps) for collector, steps in data["steps"].items()},
            merges=_texts(data["merges"]),
        )
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error(error, f"read '{storage.url(key)}'") from error
    except MALFORMED as error:
        raise IntegrityError(
            f"tombstone '{storage.url(key)}' is damaged",
            hint="restore it from a copy, or remove it, which makes what it hid live again",
        ) from error


def _texts(values: Sequence[str]) -> tuple[str, ...]:
    if isinstance(values, str) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{values!r} is not a list of texts")
    return tuple(values)


def _uids(values: Sequence[str]) -> tuple[str, ...]:
    if not all(len(bytes.fromhex(uid)) == 16 for uid in _texts(values)):
        raise ValueError("a uid has 32 hex digits")
    return tuple(values)


def tombstone_names(storage: Storage) -> list[str]:
    """Return the names of all tombstones in order of time. StageFailed if the storage fails."""
    try:
        return sorted(name for name in storage.names(FOLDER) if _NAME.fullmatch(name))
    except OSError as error:
        raise storage_error(error, f"read '{storage.url(FOLDER)}'") from error


def read_tombstones(storage: Storage) -> dict[str, Tombstone]:
    """Read every tombstone by its name, as of one moment or a later one."""
    while True:
        try:
            return {name: read_tombstone(storage, name) for name in tombstone_names(storage)}
        except FileNotFoundError:  # merged meanwhile
            continue


def expired_steps(storage: Storage) -> Counter[str]:
    """Return how many steps of each collector's own experience have expired so far."""
    known = read_tombstones(storage)
    merged = {name for tombstone in known.values() for name in tombstone.merges}
    steps: Counter[str] = Counter()
    for name in known.keys() - merged:
        steps.update(known[name].steps)
    return steps


class Removals:
    """The removed segments and trajectories. A refresh costs as much as there is new.

    `whole`: ids of segments of which nothing is live; `partial`: removed uids ("S16", sorted) of other segments. A
    tombstone that cannot be read is reported to `listener` and skipped: what it hid is live again.
    """

    def __init__(self, storage: Storage, listener: Listener = silent) -> None:
        self._storage, self._listener = storage, listener
        self._reported: set[str] = set()
        self._stamps: dict[str, int | None] = {}
        self.listed: dict[str, Sequence[str]] = {}
        """The names in `FOLDER` and `QUARANTINE`, as last listed."""
        self._read: set[str] = set()
        self._steps: dict[str, int] = {}
        self._merged: set[str] = set()
        self._quarantined: set[str] = set()
        self._touched: set[str] = set()
        self.whole: set[str] = set()
        self.partial: dict[str, np.ndarray] = {}

    def refresh(self, listed: Mapping[str, Sequence[str]] | None = None) -> set[str]:
        """Return the ids (of quarantined segments: names without folder) that were affected since the last time.

        `listed`: the names in `FOLDER` and `QUARANTINE`, as far as they have just been listed (None: list both).
        """
        if listed is None:
            listed = {folder: self._names(folder) for folder in (QUARANTINE, FOLDER) if self._moved(folder)}
        self.listed |= listed
        try:
            if QUARANTINE in listed:
                names = {name.removesuffix(".json") for name in listed[QUARANTINE] if _MARKER.fullmatch(name)}
                self._touched |= names ^ self._quarantined
                self._quarantined = names
            if FOLDER in listed:
                known = sorted(name for name in listed[FOLDER] if _NAME.fullmatch(name))
                for name in known:
                    self._touched |= self._take(name) if name not in self._read else set()
                self._steps = {name: self._steps[name] for name in known if name in self._steps}
        except BaseException:
            self._stamps.clear()  # what was not read is read the next time
            raise
        touched, self._touched = self._touched, set()
        return touched

    @property
    def expired_steps(self) -> int:
        """Number of steps that have expired so far, over all collectors."""
        return sum(steps for name, steps in self._steps.items() if name not in self._merged)

    def hides(self, id: str, file: str | None = None) -> bool:
        """Return whether a segment is removed as a whole; `file`: the one that holds its trajectories now."""
        file = id if file is None else file
        return id in self.whole or file in self.whole or self.is_quarantined(file)

    def is_quarantined(self, file: str) -> bool:
        """Return whether the file of a segment is quarantined."""
        return file.rpartition("/")[2] in self._quarantined

    def alive(self, id: str, uids: np.ndarray, file: str | None = None) -> np.ndarray:
        """Return (n,) bool: which of the `uids` ("S16") of a segment are not removed."""
        if self.hides(id, file):
            return np.zeros(len(uids), dtype=bool)
        alive = np.ones(len(uids), dtype=bool)
        for dead in (self.partial.get(name) for name in {id, id if file is None else file}):
            if dead is not None:
                alive &= ~np.isin(uids, dead)
        return alive

    def living(self, id: str, footer: Footer) -> np.ndarray:
        """Return (n,) bool: which trajectories of a segment have not expired, under its own id or that of a segment it
        was rewritten from. Quarantine does not count.
        """
        uids = footer.uids()
        alive = np.ones(len(uids), dtype=bool)
        for name in (id, *footer.replaces):
            first, count = (0, len(uids)) if name == id else footer.part(name)
            part = slice(first, first + count)
            if name in self.whole:
                alive[part] = False
            elif name in self.partial:
                alive[part] &= ~np.isin(uids[part], self.partial[name])
        return alive

    def _take(self, name: str) -> set[str]:
        try:
            tombstone = read_tombstone(self._storage, name)
        except FileNotFoundError:  # swept: the files it hid are deleted too
            return set()
        except AmagoError as error:
            if name not in self._reported:
                self._reported.add(name)
                self._listener(Notice(text=f"{error.message}; what it hid is live again", level="warning"))
            return set()
        self._read.add(name)
        self._steps[name] = sum(tombstone.steps.values())
        self._merged.update(tombstone.merges)
        self.whole.update(tombstone.segments)
        for id, uids in tombstone.trajectories.items():
            raw = np.array([bytes.fromhex(uid) for uid in uids], dtype="S16")
            self.partial[id] = np.union1d(self.partial.get(id, raw), raw)
        return tombstone.names

    def _moved(self, folder: str) -> bool:
        """Return whether a name may have appeared in `folder` since it was last listed."""
        try:
            stamp = self._storage.stamp(folder)
        except OSError as error:
            raise storage_error(error, f"read '{self._storage.url(folder)}'") from error
        if stamp is not None and self._stamps.get(folder) == stamp:
            return False
        settled = stamp is not None and (time.time_ns() - stamp > FRESH_SECONDS * 1e9 or stamp == 0)
        self._stamps[folder] = stamp if settled else None
        return True

    def _names(self, folder: str) -> list[str]:
        try:
            return self._storage.names(folder)
        except OSError as error:
            self._stamps.clear()
            raise storage_error(error, f"read '{self._storage.url(folder)}'") from error
