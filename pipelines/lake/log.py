"""The log of a lake: what was removed, rewritten, quarantined and protected, in order.

A segment that is there is committed; the log says which of them no longer count. `log/<n>.json`, n = 1, 2, ... in
twelve digits, holds `entries`, their CRC-32 `crc`, and `restart`. The fields of an entry are those of `LogEntry`. The
holder of the maintenance lease appends a file by creating the next number. A maintainer whose lease ran out finds the
number taken. A file that restarts the log repeats all that still matters, and the files before it may be gone.
"""

from __future__ import annotations

import json
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field

from pipelines.errors import InputMissing, IntegrityError, Locked, StageFailed, UsageError
from pipelines.events import Listener, Notice, silent
from pipelines.files.atomic import explain_errors, make_storage_error
from pipelines.files.json import Form
from pipelines.files.malformed import MALFORMED
from pipelines.lake.folders import LOG, REWRITTEN, read_stamp
from pipelines.lake.storage import LocalStorage, Storage
from pipelines.lake.uids import contains, raw_uids, unite

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

_NAME = re.compile(r"[0-9]{12}\.json")
_MANY = 64  # files, at which a log is restarted though nothing in it can be forgotten
_FORGOTTEN = "names of expired segments that are gone were forgotten"
_ATTEMPTS = 5  # to read a log that others restart meanwhile
_NONE = np.zeros(0, "S16")
_Uid = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class LogEntry(Form):
    """One change of the live set, for one `reason`.

    `moved`: ids of segments that were rewritten, and of the segment that each was rewritten into; `added`: rewritten
    segments that count. `segments` expired as a whole; of others, `trajectories` expired, by their uids. `steps`: how
    many steps of each collector expired. `quarantine`: damaged segments with what is known of the damage; null ends it.
    `protect`: protections by name, with their `time` and `segments` (none: the whole lake); null ends one.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    time: Annotated[float, Field(allow_inf_nan=False)]
    reason: str = ""
    added: list[str] = Field(default_factory=list)
    moved: dict[str, str] = Field(default_factory=dict)
    segments: list[str] = Field(default_factory=list)
    trajectories: dict[str, list[_Uid]] = Field(default_factory=dict)
    steps: dict[str, int] = Field(default_factory=dict)
    quarantine: dict[str, dict[str, Any] | None] = Field(default_factory=dict)
    protect: dict[str, dict[str, Any] | None] = Field(default_factory=dict)


class _LogFile(Form):
    """The content of a file of the log."""

    entries: list[LogEntry]
    crc: str
    restart: bool = False


class Removal(NamedTuple):
    """When and why a segment, or trajectories of it, were removed; `file` of the log says so since `seconds` after
    `time`."""

    time: float
    reason: str
    file: str
    seconds: float


class LogNews(NamedTuple):
    """What a process has read of the log: names of all files, that of the last one that restarted the log, new entries
    since then with their files and ages in them, and problems.
    """

    names: tuple[str, ...]
    restarted: str
    entries: list[tuple[str, LogEntry, float]]
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Protection:
    """A protection from expiry. `name` is "lake" for the whole lake (with no `segments`), otherwise a snapshot's."""

    name: str
    time: float
    segments: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        return self.name == "lake"


@dataclass
class LakeLog:
    """The log of a lake, replayed: which segments and trajectories no longer count. A refresh reads what is new.

    `last`: number of the newest file; `names`: of all files. `whole`: segments that expired as a whole; `dead`: expired
    uids ("S16", sorted) of other segments, as the log names them (`find_dead` knows all); `moved`, `added`,
    `quarantined`, `steps` as of `LogEntry`. `problems`: files that are damaged or missing, which are reported to
    `listener` and passed over: what they removed counts again, and so does every rewritten segment that is there, since
    each trajectory counts once.
    """

    storage: Storage
    lake_id: str = ""
    listener: Listener = silent
    names: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    whole: set[str] = field(default_factory=set)
    dead: dict[str, np.ndarray] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    added: set[str] = field(default_factory=set)
    quarantined: dict[str, dict[str, Any]] = field(default_factory=dict)
    protected: dict[str, Protection] = field(default_factory=dict)
    steps: Counter[str] = field(default_factory=Counter)
    removals: dict[str, Removal] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._entries: list[tuple[str, LogEntry, float]] = []  # since the last restart: file, entry, age in that file
        self._shared = 0  # of them, in the news so far
        self._read: set[str] = set()
        self._restarted = ""  # name of the file that restarted the log last
        self._damaged: dict[str, str] = {}
        self._stamp: int | None = None
        self._unreadable: set[str] = set()  # rewritten segments that this process cannot read
        self._sources: dict[str, list[str]] = {}  # by the segment that was rewritten from them
        self._targets: dict[str, list[str]] = {}  # the reverse; several if it was rewritten again after a quarantine
        self._touched: set[str] = set()
        self._own = f"-{REWRITTEN}.{self.lake_id[:8]}."

    @property
    def last(self) -> int:
        return max((int(name[:12]) for name in self.names), default=0)

    def refresh(self, names: Sequence[str] | None = None) -> set[str]:
        """Read new files; return the ids of segments that they concern. `names`: those in `LOG`, if just listed.
        StageFailed if the storage fails; the next refresh resumes there.
        """
        try:
            if names is None:
                stamp, settled = read_stamp(self.storage, LOG)
                if stamp is None or self._stamp != stamp:
                    self._stamp = stamp if settled else None
                elif not (self.problems or self._touched):
                    return set()
                else:  # no file has appeared since the log was last listed
                    names = self.names
            before: Sequence[str] | None = None
            for _ in range(_ATTEMPTS):
                listed = list_files(self.storage) if names is None else sorted(filter(_NAME.fullmatch, names))
                # A listing is not of one moment: a number that is missing may be there, or no longer matter.
                if self._replay(listed) and (not self._list_missing() or listed == before):
                    break
                before, names = listed, None
            else:
                self._stamp = None  # to be read again
            self._report()
        except BaseException:
            self._stamp = None
            raise
        touched, self._touched = self._touched, set()
        return touched

    def collect_news(self) -> LogNews:
        """Return what refreshes have read since the last call, for other processes to take."""
        new, self._shared = self._entries[self._shared :], len(self._entries)
        return LogNews(self.names, self._restarted, new, self.problems)

    def take(self, news: LogNews) -> set[str]:
        """Apply what another process has read, without reading anything; return as `refresh`."""
        if news.restarted > self._restarted:
            self._restart(news.restarted)
        known = set(self._read)
        for name, entry, age in news.entries:
            self._read.add(name)
            if name not in known:
                self._apply(name, entry, age)
        self.names = news.names
        self._note_problems(news.problems)
        touched, self._touched = self._touched, set()
        return touched

    def _replay(self, names: Sequence[str]) -> bool:
        """Apply the files that were not read yet, from the last one that restarts the log; return False if one is gone.

        Files before that are void even if they are new: a number may be free again, for a maintainer that is too late.
        """
        self.names = tuple(names)
        self._damaged.clear()
        new: list[tuple[str, _LogFile]] = []
        for name in names:
            if name in self._read or name < self._restarted:
                continue
            try:
                content = self._read_file(name)
            except FileNotFoundError:
                return False
            except IntegrityError as error:
                self._damaged[name] = error.message
                continue
            if content.restart:
                new.clear()
            new.append((name, content))
        for name, content in new:
            self._read.add(name)
            if content.restart:
                self._restart(name)
            for entry in content.entries:
                self._apply(name, entry, content.entries[-1].time - entry.time)
        return True

    def _list_missing(self) -> list[int]:
        """List the numbers of files that are not there, since the last restart."""
        here = {int(name[:12]) for name in self.names}
        return [number for number in range(int(self._restarted[:12] or 1), self.last + 1) if number not in here]

    def _report(self) -> None:
        found = [text for name, text in self._damaged.items() if name > self._restarted]
        found += [
            f"entry {number} of the log of '{self.storage.url()}' is missing" for number in self._list_missing()[:3]
        ]
        for text in found:
            if text not in self.problems:
                self.listener(Notice(text=f"{text}; what it removed counts again", level="warning"))
        self._note_problems(tuple(found))

    def _note_problems(self, found: tuple[str, ...]) -> None:
        if bool(found) != bool(self.problems):
            self._touched |= self.added | self.moved.keys()
        self.problems = found

    @property
    def forgot_at(self) -> float:
        """When the log last forgot which segments had expired; 0 if it never did."""
        return max((entry.time for _, entry, _ in self._entries if entry.reason == _FORGOTTEN), default=0.0)

    def _restart(self, name: str) -> None:
        """Forget what the entries that follow repeat. What was removed stays so: it may be listed still."""
        self._restarted = name
        self._entries.clear()
        self._shared = 0
        self._touched |= self.quarantined.keys() | self.moved.keys()
        self.quarantined, self.protected, self.steps = {}, {}, Counter()

    def _apply(self, name: str, entry: LogEntry, age: float) -> None:
        self._entries.append((name, entry, age))
        why = Removal(entry.time, entry.reason, name, age)
        self.added |= {*entry.added, *entry.moved.values()}
        self._touched |= {*entry.added, *entry.moved.values(), *entry.moved, *entry.segments, *entry.trajectories}
        for old, new in entry.moved.items():
            if self.moved.get(old) != new:
                if old in _walk(self._targets, new):  # nobody writes a cycle, which readers would follow for ever
                    continue
                self.moved[old] = new
                self._sources.setdefault(new, []).append(old)
                self._targets.setdefault(old, []).append(new)
            self.removals.setdefault(old, why)
        for id in entry.segments:
            self.whole.add(id)
            self.removals.setdefault(id, why)
        for id, uids in entry.trajectories.items():
            self.removals.setdefault(id, why)
            self.dead[id] = unite([self.dead.get(id, _NONE), raw_uids(uids)])
        self.steps.update(entry.steps)
        for id, damage in entry.quarantine.items():
            self._touched |= {id, *self.moved}
            self.quarantined.pop(id, None)
            if damage is not None:
                self.quarantined[id] = damage
        for about, said in entry.protect.items():
            self.protected.pop(about, None)
            if said is not None:
                ids = tuple(str(id) for id in said.get("segments", ()))
                self.protected[about] = Protection(name=about, time=float(said.get("time", entry.time)), segments=ids)

    def _origins(self, id: str) -> Iterator[str]:
        """Yield a segment and those that it was rewritten from."""
        return _walk(self._sources, id)

    def hides(self, id: str) -> bool:
        """Return whether nothing of a segment counts: it expired, was rewritten or quarantined, or is the result of a
        rewriting that was not finished."""
        return id in self.whole or id in self.quarantined or self.is_superseded(id) or not self.is_finished(id)

    def list_quarantined(self) -> dict[str, str]:
        """List the damaged segments that wait for repair, which hides their intact trajectories, with what to do."""
        cure = "amago lake verify LAKE --repair recovers its intact trajectories"
        return {
            id: f"segment '{id}' is damaged, and nothing of it counts until it is repaired; {cure}"
            for id, damage in self.quarantined.items()
            if "repaired" not in damage and not self.is_superseded(id)
        }

    def is_superseded(self, id: str) -> bool:
        """Return whether a segment was rewritten into one that counts, or has expired since."""
        found = self.moved.get(id)
        while found is not None:
            if found in self.whole or (found not in self.quarantined and found not in self._unreadable):
                return True
            found = self.moved.get(found)
        return False

    def is_finished(self, id: str) -> bool:
        """Return False for a segment that a maintainer of this lake rewrote, but did not enter in the log."""
        return self._own not in id or id in self.added or bool(self.problems)

    def find_final(self, id: str) -> str:
        """Return the id of the last segment that `id` was rewritten into, directly or indirectly; or itself."""
        while id in self.moved:
            id = self.moved[id]
        return id

    def select_live(self, id: str, uids: np.ndarray) -> np.ndarray:
        """Return (n,) bool: which of the `uids` ("S16") of a segment count."""
        return np.zeros(len(uids), dtype=bool) if self.hides(id) else self.select_unexpired(id, uids)

    def select_unexpired(self, id: str, uids: np.ndarray) -> np.ndarray:
        """Return (n,) bool: which of the `uids` ("S16") of a segment have not expired, whether or not it counts."""
        if id in self.whole:
            return np.zeros(len(uids), dtype=bool)
        return ~contains(self.find_dead(id), uids)

    def find_dead(self, id: str) -> np.ndarray:
        """Find the expired uids ("S16", sorted) of a segment that did not expire as a whole. What expires in a segment
        expires in those that it was rewritten from: they count again if it is quarantined. Their uids are joined here,
        when they are asked for, since a merged segment may have a thousand sources.
        """
        found = [self.dead[each] for each in _walk(self._targets, id) if each in self.dead]
        return found[0] if len(found) == 1 else unite(found)

    def ignore(self, id: str) -> set[str]:
        """Let the segments that an unreadable one was rewritten from count again, as far as they are there; return the
        ids that this may concern."""
        self._unreadable.add(id)
        return set(self._sources.get(id, ()))

    def require_whole(self) -> None:
        """Raise IntegrityError if a file of the log is damaged or missing: nothing may be built on the rest."""
        if self.problems:
            raise IntegrityError(
                self.problems[0],
                hint="restore it from a copy, or let what it removed count again: amago lake verify LAKE --repair",
            )

    def shorten(self, ids: Collection[str]) -> bool:
        """Restart the log with what matters to a lake that has the segments `ids`, and delete older files; return
        whether that was necessary. Under the maintenance lease.
        """
        changes: list[dict[str, Any]] = []
        targets: dict[str, set[str]] = {}  # that the shorter log knows
        forgotten, forgot, now = False, self.forgot_at, time.time()
        for _, entry, _ in self._entries:
            moved = {old: self.find_final(new) for old, new in entry.moved.items() if old in ids}
            for source, target in moved.items():
                targets.setdefault(source, set()).add(target)
            segments = [id for id in entry.segments if id in ids]
            # Sources of a segment are named only where the shorter log does not lead from them to it.
            trajectories = {
                each: uids
                for id, uids in entry.trajectories.items()
                for each in self._origins(id)
                if each in ids and (each == id or id not in ids or id not in targets.get(each, ()))
            }
            if len(segments) < len(entry.segments):
                forgot = now
            forgotten |= len(moved) < len(entry.moved) or not entry.trajectories.keys() <= trajectories.keys()
            if moved or segments or trajectories:
                changes.append(
                    {"time": entry.time, "reason": entry.reason}
                    | {"moved": moved, "segments": segments, "trajectories": trajectories}
                )
        if not (forgotten or forgot == now or len(self.names) > _MANY or self.problems):
            return False
        kept = [LogEntry(**change) for change in changes]
        if forgot:
            kept.append(LogEntry(time=forgot, reason=_FORGOTTEN))
        kept.append(
            LogEntry(
                time=now,
                reason="restarted",
                added=sorted(id for id in ids if self._own in id and self.is_finished(id) and id not in self.whole),
                steps=dict(self.steps),
                quarantine=dict(self.quarantined),
                protect={p.name: {"time": p.time, "segments": list(p.segments)} for p in self.protected.values()},
            )
        )
        old = self.names
        _create(self.storage, self.last, kept, restart=True)
        with explain_errors(f"write '{self.storage.url(LOG)}'"):
            self.storage.remove(*(f"{LOG}/{name}" for name in old))
        return True

    def _read_file(self, name: str) -> _LogFile:
        """Read a file of the log. FileNotFoundError if it is gone, IntegrityError if it is damaged, StageFailed if the
        storage fails.
        """
        key = f"{LOG}/{name}"
        try:
            data = json.loads(self.storage.read(key))
            found = _LogFile.model_validate(data)
            if found.crc != _compute_crc(data["entries"]):
                raise ValueError("its checksum is wrong")
            return found
        except FileNotFoundError:
            raise
        except OSError as error:
            raise make_storage_error(error, f"read '{self.storage.url(key)}'") from error
        except MALFORMED as error:
            raise IntegrityError(f"log entry '{self.storage.url(key)}' is damaged") from error


def read_log(storage: Storage, *, listener: Listener = silent) -> LakeLog:
    """Replay the log of a lake."""
    log = LakeLog(storage, listener=listener)
    log.refresh()
    return log


def list_files(storage: Storage) -> list[str]:
    """Return the names of the log's files, in order. StageFailed if the storage fails."""
    with explain_errors(f"read '{storage.url(LOG)}'"):
        return sorted(filter(_NAME.fullmatch, storage.names(LOG)))


def find_last_number(storage: Storage) -> int:
    """Find the number of the newest file of the log, 0 if there is none."""
    return max((int(name[:12]) for name in list_files(storage)), default=0)


def append(storage: Storage, entry: LogEntry, *, after: int | None = None) -> None:
    """Append an entry to the log, under the maintenance lease. `after`: number of the newest file that the decision
    rests on (None: now). StageFailed if another process has appended one since: its lease was taken over.
    """
    _create(storage, find_last_number(storage) if after is None else after, [entry], restart=False)


def _create(storage: Storage, after: int, entries: Sequence[LogEntry], *, restart: bool) -> None:
    """Create the file that follows number `after`, unless there is one."""
    plain = [entry.model_dump(exclude_defaults=True) for entry in entries]
    data = {"restart": restart, "crc": _compute_crc(plain), "entries": plain}
    key, content = f"{LOG}/{after + 1:012d}.json", (json.dumps(data) + "\n").encode()
    with explain_errors(f"write '{storage.url(LOG)}'"):
        try:
            # The number itself may be free again, once the log was restarted.
            if find_last_number(storage) != after:
                raise FileExistsError
            storage.create(key, content)
        except FileExistsError as error:
            found = storage.find(key)
            if found is None or found[0] != content:  # otherwise an attempt of ours whose response was lost
                raise StageFailed(
                    f"lake '{storage.url()}' was maintained by another process meanwhile", hint="repeat the command"
                ) from error


def _compute_crc(entries: Any) -> str:
    return f"{zlib.crc32(json.dumps(entries, sort_keys=True, separators=(',', ':')).encode()):08x}"


def list_protections(storage: Storage) -> list[Protection]:
    """Return every protection, the oldest first. IntegrityError if the log cannot be read: nothing may expire then."""
    log = read_log(storage)
    log.require_whole()
    return sorted(log.protected.values(), key=lambda protection: (protection.time, protection.name))


_LOOK_SECONDS, _LOOK_FAR_SECONDS = 0.05, 1.0  # far: each costs requests to an object store
_WAIT_SECONDS = 10.0  # longer than a collector's maintenance takes

Held = Callable[[], None]
"""Raises StageFailed once the lease is lost; call it before each step that requires the lease."""


@contextmanager
def lease(lake: Lake, *, wait_seconds: float = _WAIT_SECONDS) -> Iterator[Held]:
    """Hold the lake's maintenance lease. Locked, with the holder, if it is not free within `wait_seconds`."""
    deadline = time.monotonic() + wait_seconds
    while True:
        holding = lake.storage.hold("maintenance", what=f"lake '{lake.name}' is being maintained")
        try:
            held = holding.__enter__()
            break
        except Locked as error:
            if time.monotonic() >= deadline:
                raise Locked(error.message, hint="wait for it, then repeat the command") from error
            time.sleep(_LOOK_SECONDS if isinstance(lake.storage, LocalStorage) else _LOOK_FAR_SECONDS)
    try:
        yield held
    finally:
        holding.__exit__(None, None, None)


WHOLE = "lake"


def protect(lake: Lake, segments: Iterable[str] = (), *, name: str = WHOLE) -> Protection:
    """Protect the lake, or the trajectories of `segments` under a name, from expiry. A name is replaced."""
    ids = tuple(segments)
    if (name == WHOLE) != (not ids):
        raise UsageError(f"a snapshot cannot be protected as '{name}'", hint="choose another name")
    protection = Protection(name=name, time=time.time(), segments=ids)
    with lease(lake):
        list_protections(lake.storage)  # refuses a damaged log
        said = {"time": protection.time, "segments": list(ids)}
        append(lake.storage, LogEntry(time=protection.time, reason="protected", protect={name: said}))
    return protection


def unprotect(lake: Lake, name: str = WHOLE) -> None:
    """Remove a protection. InputMissing if there is none of that name."""
    with lease(lake):
        known = [protection.name for protection in list_protections(lake.storage)]
        if name not in known:
            raise InputMissing(
                f"lake '{lake.name}' has no protection '{name}'",
                hint=f"there are: {', '.join(known)}" if known else "nothing in it is protected",
            )
        append(lake.storage, LogEntry(time=time.time(), reason="no longer protected", protect={name: None}))


def _walk(edges: Mapping[str, Sequence[str]], start: str) -> Iterator[str]:
    """Yield `start` and what is reached from it, once each."""
    waiting, known = [start], {start}
    while waiting:
        yield (id := waiting.pop())
        new = [each for each in dict.fromkeys(edges.get(id, ())) if each not in known]
        known.update(new)
        waiting += reversed(new)
