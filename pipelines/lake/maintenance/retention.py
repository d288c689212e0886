"""Expiry of trajectories: by age, by SQL, or the oldest first until the rest fits.

Each decision is one entry of the log. It names whole segments if nothing else is in them, single trajectories
otherwise, and with a trajectory all overlays of it. Protected trajectories stay. The pieces of an episode are as old as
the newest one, and expire together where single trajectories do; where whole files do, what is left of an episode no
longer counts as one.

The log names what expired by segment, and forgets it once the files are deleted. A lake that was copied into also keeps
the uids: a copy may have written a trajectory under the id of another segment, and the next copy must not bring it
back. `expired/<us>-<token>.uids` are the CRC-32 and the uids of one expiry, 16 bytes each. A lake begins to keep them
when it is first copied into: in others they would grow with every trajectory that passes through, for nothing.
"""

from __future__ import annotations

import secrets
import time
import zlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipelines.errors import IntegrityError, UsageError
from pipelines.events import Listener, silent
from pipelines.files.atomic import explain_errors
from pipelines.lake.footer import hex_uids
from pipelines.lake.log import LogEntry, append, lease
from pipelines.lake.maintenance.files import GRACE_SECONDS, File, FileTable, SweepResult, sweep
from pipelines.lake.storage import Storage
from pipelines.lake.uids import contains, positions

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

EXPIRED = "expired"
_SUFFIX = ".uids"
_MOST_FILES = 64
_MERGED_UIDS = 1 << 20  # a file that has so many is left as it is


@dataclass(frozen=True, kw_only=True)
class RetentionLimits:
    """What may stay (0: no limit): `max_steps` actions, `max_trajectories`, `max_bytes` of segments, `max_age` seconds
    since a trajectory was committed. Trajectories stored in full count; overlays expire with their bases, and their
    bytes count as those of the bases. `where`: a SQL predicate; only matching trajectories count and expire, and all of
    them if there is no other limit.
    """

    max_steps: int = 0
    max_trajectories: int = 0
    max_bytes: int = 0
    max_age: float = 0.0
    where: str = ""

    @property
    def caps(self) -> tuple[int, int, int]:
        return self.max_steps, self.max_trajectories, self.max_bytes

    def __str__(self) -> str:
        names = ("max_steps", "max_trajectories", "max_bytes", "max_age")
        parts = [f"{name} {value:g}" for name in names if (value := getattr(self, name))]
        return ", ".join([*parts, *([f"where {self.where}"] if self.where.strip() else [])])


@dataclass(frozen=True)
class _FileExpiry:
    """The trajectories (n,) bool of a file that expire; `is_whole`: nothing else in it counts, so the file may go."""

    file: File
    mask: np.ndarray
    is_whole: bool

    @property
    def trajectories(self) -> int:
        return int(self.mask.sum())

    @property
    def steps(self) -> int:
        return int(self.file.steps[self.mask].sum())

    @property
    def bytes(self) -> float:
        return float(self.file.row_bytes[self.mask].sum())


@dataclass(frozen=True)
class ExpiryPlan:
    """The trajectories to expire, file by file in the order of ids; `protected` counts those that may not. `position`:
    number of the log's newest file when this was decided.
    """

    going: tuple[_FileExpiry, ...]
    protected: int
    position: int

    def carry_out(self, lake: Lake, *, reason: str) -> None:
        """Enter the plan in the log."""
        if not self.going:
            return
        whole: list[str] = []
        trajectories: dict[str, list[str]] = {}
        steps: Counter[str] = Counter()
        for part in self.going:
            file = part.file
            if not file.is_overlay:
                for name, count in zip(file.collectors[part.mask], file.steps[part.mask].tolist(), strict=True):
                    steps[name] += count
            if part.is_whole:
                whole.append(file.id)
            else:
                trajectories[file.id] = hex_uids(file.uids[part.mask])
        ExpiredUids(lake.storage).add(np.concatenate([part.file.uids[part.mask] for part in self.going]))
        entry = LogEntry(time=time.time(), reason=reason, segments=whole, trajectories=trajectories, steps=dict(steps))
        append(lake.storage, entry, after=self.position)

    def count_left(self, inventory: FileTable) -> dict[str, int]:
        """Count what is live without the trajectories of this plan; see `ExpiryResult`."""
        gone = {part.file.id: part.mask for part in self.going}
        trajectories, steps, size = 0, 0, 0.0
        for id, file in inventory.files.items():
            live = file.alive & ~gone[id] if id in gone else file.alive
            size += float(file.row_bytes[live].sum())
            if not file.is_overlay:
                trajectories, steps = trajectories + int(live.sum()), steps + int(file.steps[live].sum())
        return {"trajectories": trajectories, "steps": steps, "bytes": round(size)}


@dataclass(frozen=True)
class ExpiryResult:
    """The effect of expiry, predicted in a dry run; `left` counts what is live afterwards: trajectories stored in full,
    steps, bytes.
    """

    plan: ExpiryPlan
    left: Mapping[str, int]
    swept: SweepResult | None


def expire(
    lake: Lake,
    limits: RetentionLimits,
    *,
    grace_seconds: float = GRACE_SECONDS,
    dry_run: bool = False,
    listener: Listener = silent,
) -> ExpiryResult:
    """Expire what exceeds `limits`, then sweep. UsageError for a protected lake; Locked while another process maintains
    it.
    """
    if not (limits.where.strip() or limits.max_age or any(limits.caps)):
        raise UsageError("nothing to expire", hint="give --max-steps, --max-bytes, --max-age, ... or --where")
    if not dry_run:
        lake.salvage(listener=listener)
    with lease(lake) as held:
        inventory = FileTable(lake, listener)
        inventory.refresh()
        inventory.log.require_whole()
        protected = inventory.log.protected.values()
        if any(protection.is_whole for protection in protected):
            raise UsageError(
                f"lake '{lake.name}' is protected: nothing in it may expire",
                hint=f"unprotect it with: amago lake protect {lake.name} --off lake",
            )
        chosen = None
        if limits.where.strip():
            from pipelines.lake.sql.selection import select

            chosen = select(lake, limits.where, listener=listener).uids
        kept = {id for protection in protected for id in protection.segments}
        plan = make_plan(inventory, limits, chosen=chosen, kept=kept, now=time.time())
        if dry_run:
            return ExpiryResult(plan, plan.count_left(inventory), None)
        held()
        plan.carry_out(lake, reason=str(limits))
        inventory.refresh()
        expire_orphans(inventory)
        left = ExpiryPlan((), 0, 0).count_left(inventory)
        swept = sweep(inventory, held, grace_seconds=grace_seconds, listener=listener)
        inventory.write_manifests(held)
        return ExpiryResult(plan, left, swept)


def expire_orphans(inventory: FileTable) -> None:
    """Expire overlays whose bases are gone for good, e.g. written while their bases expired."""
    log, going = inventory.log, []
    for overlay in (file for file in inventory.list_overlays() if not file.alive.all()):
        orphans = np.zeros(len(overlay.uids), dtype=bool)
        for id in dict.fromkeys(overlay.base_ids):
            base = inventory.live.file_of(id)
            if base not in log.quarantined and base not in inventory.live.unreadable:  # otherwise it may return
                orphans |= (overlay.base_ids == id) & ~overlay.alive
        orphans &= log.select_live(overlay.id, overlay.uids)  # the others are removed already
        if orphans.any():
            going.append(_FileExpiry(overlay, orphans, bool(orphans.all())))
    if going:
        plan = ExpiryPlan(tuple(going), 0, log.last)
        plan.carry_out(inventory.lake, reason="derived from removed trajectories")
        inventory.refresh()


def make_plan(
    inventory: FileTable, limits: RetentionLimits, *, chosen: np.ndarray | None = None, kept: Collection[str] = (),
    now: float, whole: bool = False,
) -> ExpiryPlan:  # fmt: skip
    """Choose the trajectories to expire so that `limits` hold; the oldest first, by the time of commit.

    `chosen`: uids ("S16", sorted) that `where` selects; `kept`: ids of protected segments. `whole`: meet the limits by
    whole files only, so that up to one file more than they allow stays; otherwise they are met exactly (bytes to the
    nearest trajectory).
    """
    files = inventory.files
    free = {id: file.alive & ~file.select_from(kept) for id, file in files.items()}
    for overlay in inventory.list_overlays():
        held = overlay.alive & ~free[overlay.id]
        for base, rows in inventory.find_bases(overlay) if held.any() else ():
            free[base.id] &= ~np.isin(base.uids, overlay.base_uids[rows][held[rows]])
    protected = sum(int(file.alive.sum() - free[id].sum()) for id, file in files.items())
    selected = {id: file.alive if chosen is None else contains(chosen, file.uids) for id, file in files.items()}
    free = {id: mask & selected[id] for id, mask in free.items()}
    masks = {id: np.zeros(len(mask), dtype=bool) for id, mask in free.items()}
    times = _find_episode_times(inventory)
    if limits.max_age:
        for id, mask in free.items():
            masks[id] |= mask & (times[id] < now - limits.max_age)
    if any(limits.caps):
        counted = {id: files[id].alive & selected[id] & ~masks[id] for id in sorted(files) if not files[id].is_overlay}
        costs = _compute_costs(inventory)
        caps = np.array([cap or np.inf for cap in limits.caps])
        excess = sum((costs[id][own].sum(axis=0) for id, own in counted.items()), np.zeros(3)) - caps
        if whole:
            _expire_files(files, free, counted, costs, excess, masks)
        else:
            _expire_oldest(files, free, counted, costs, excess, times, masks)
    elif not limits.max_age:
        masks = {id: mask.copy() for id, mask in free.items()}
    for overlay in inventory.list_overlays():  # expire together with their bases
        for base, rows in inventory.find_bases(overlay):
            dying = base.uids[masks[base.id]]
            if len(dying):
                masks[overlay.id][rows] |= overlay.alive[rows] & np.isin(overlay.base_uids[rows], dying)
    going = tuple(
        _FileExpiry(files[id], mask, bool((mask == files[id].alive).all()))
        for id, mask in sorted(masks.items())
        if mask.any()
    )
    return ExpiryPlan(going, protected, inventory.log.last)


def _find_episode_times(inventory: FileTable) -> dict[str, np.ndarray]:
    """Return for each trajectory (n,) of each file when it, or the newest live piece of its episode, was committed."""
    times = {id: file.times for id, file in inventory.files.items()}
    cut = {id: file.episodes for id, file in inventory.files.items() if file.episodes is not None}
    if not cut:
        return times
    live = [(cut[id][alive], times[id][alive]) for id in cut if (alive := inventory.files[id].alive).any()]
    numbers, place = np.unique(np.concatenate([np.zeros(1, "u8"), *(each for each, _ in live)]), return_inverse=True)
    newest = np.full(len(numbers), -np.inf)
    np.maximum.at(newest, place, np.concatenate([np.full(1, -np.inf), *(each for _, each in live)]))
    for id, episodes in cut.items():
        found = np.minimum(np.searchsorted(numbers, episodes), len(numbers) - 1)
        is_piece = (episodes > 0) & (numbers[found] == episodes)
        times[id] = np.where(is_piece, newest[found], times[id])
    return times


def _compute_costs(inventory: FileTable) -> dict[str, np.ndarray]:
    """Return the costs (n, 3) float64 of trajectories stored in full: steps, trajectories (one each) and bytes, those
    of overlays included.
    """
    stored = [file for file in inventory.files.values() if not file.is_overlay]
    costs = {f.id: np.column_stack([f.steps, np.ones(len(f.steps)), f.row_bytes]) for f in stored}
    for overlay in inventory.list_overlays():
        for base, rows in inventory.find_bases(overlay):
            if base.id in costs:
                place = positions(base.uids, overlay.base_uids[rows])
                live = (place >= 0) & overlay.alive[rows]
                np.add.at(costs[base.id][:, 2], place[live], overlay.row_bytes[rows][live])
    return costs


_Masks = Mapping[str, np.ndarray]


def _expire_files(
    files: Mapping[str, File], free: _Masks, counted: _Masks, costs: _Masks, excess: np.ndarray, masks: _Masks
) -> None:
    """Add to `masks` whole files, the oldest first, while a limit is exceeded by at least their cost."""
    newest = {id: float(files[id].times[own].max(initial=-np.inf)) for id, own in counted.items()}
    for id in sorted(counted, key=lambda id: (newest[id], id)):
        cost = costs[id][counted[id]].sum(axis=0)
        if not counted[id].any() or (counted[id] & ~free[id]).any():
            continue
        if not (excess >= cost)[cost > 0].any():  # stays if no limit can do without it
            return
        masks[id][counted[id]] = True
        excess = excess - cost


def _expire_oldest(
    files: Mapping[str, File], free: _Masks, counted: _Masks, costs: _Masks, excess: np.ndarray, times: _Masks,
    masks: _Masks,
) -> None:  # fmt: skip
    """Add to `masks` single trajectories, the oldest first, until the rest is within the limits."""
    places = [(id, np.flatnonzero(own & free[id])) for id, own in counted.items()]
    if not sum(len(place) for _, place in places):
        return
    cost = np.concatenate([costs[id][place] for id, place in places])
    order = np.argsort(np.concatenate([times[id][place] for id, place in places]), kind="stable")
    before = np.cumsum(cost[order], axis=0) - cost[order]  # expired before each
    goes = np.zeros(len(order), dtype=bool)
    goes[order] = (before < excess).any(axis=1)
    if any(files[id].episodes is not None for id, _ in places):
        numbers = [(files[id].episodes, place) for id, place in places]
        episodes = np.concatenate([np.zeros(len(p), "u8") if own is None else own[p] for own, p in numbers])
        goes |= np.isin(episodes, episodes[goes]) & (episodes > 0)  # with one piece, the others
    for id, place in places:
        masks[id][place] |= goes[: len(place)]
        goes = goes[len(place) :]


class ExpiredUids:
    """The uids of what expired in a lake that was copied into. StageFailed if the storage fails."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def begin(self) -> None:
        """Begin to keep what expires in the lake."""
        if not self._list():
            self._write(np.zeros(0, "S16"))

    def add(self, uids: np.ndarray) -> None:
        """Add uids ("S16"), if the lake keeps them; under the lease of maintenance, before they expire."""
        names = self._list()
        if not names or not len(uids):
            return
        merged: list[str] = []
        if len(names) >= _MOST_FILES:
            found = {name: self._read(name) for name in names}
            merged = [name for name, some in found.items() if len(some) < _MERGED_UIDS]
            uids = np.concatenate([uids, *(found[name] for name in merged)])
        self._write(np.unique(uids))
        with explain_errors(f"write '{self._storage.url(EXPIRED)}'"):
            self._storage.remove(*(f"{EXPIRED}/{name}" for name in merged))

    def read(self) -> np.ndarray:
        """Read the sorted uids (n,) "S16". IntegrityError for a damaged file."""
        while True:
            try:
                found = [self._read(name) for name in self._list()]
            except FileNotFoundError:  # merged meanwhile
                continue
            return np.unique(np.concatenate([np.zeros(0, "S16"), *found]))

    def _list(self) -> list[str]:
        with explain_errors(f"read '{self._storage.url(EXPIRED)}'"):
            names = self._storage.names(EXPIRED)
        return sorted(name for name in names if name.endswith(_SUFFIX) and not name.startswith("."))

    def _read(self, name: str) -> np.ndarray:
        key = f"{EXPIRED}/{name}"
        content = self._storage.read(key)
        if len(content) % 16 != 4 or zlib.crc32(content[4:]) != int.from_bytes(content[:4], "little"):
            raise IntegrityError(
                f"'{self._storage.url(key)}' is damaged",
                hint="restore it from a copy; or remove it, and what expired can be copied into the lake again",
            )
        return np.frombuffer(content[4:], "S16")

    def _write(self, uids: np.ndarray) -> None:
        name, content = f"{time.time_ns() // 1000:016x}-{secrets.token_hex(4)}{_SUFFIX}", uids.tobytes()
        with explain_errors(f"write '{self._storage.url(EXPIRED)}'"):
            self._storage.write(f"{EXPIRED}/{name}", zlib.crc32(content).to_bytes(4, "little") + content)
