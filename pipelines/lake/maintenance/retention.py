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
from pipelines.files.atomic import explained
from pipelines.lake.footer import hex_uids
from pipelines.lake.log import LogEntry, append, lease
from pipelines.lake.maintenance.files import File, FileTable
from pipelines.lake.maintenance.sweep import GRACE_SECONDS, SweepResult, sweep
from pipelines.lake.storage import Storage
from pipelines.lake.uids import positions

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
            return ExpiryResult(plan, _count_left(inventory, plan), None)
        held()
        carry_out(lake, plan, reason=_reason(limits))
        inventory.refresh()
        expire_orphans(inventory)
        left = _count_left(inventory, ExpiryPlan((), 0, 0))
        return ExpiryResult(plan, left, sweep(inventory, held, grace_seconds=grace_seconds, listener=listener))


def carry_out(lake: Lake, plan: ExpiryPlan, *, reason: str) -> None:
    """Enter a plan in the log."""
    if not plan.going:
        return
    whole: list[str] = []
    trajectories: dict[str, list[str]] = {}
    steps: Counter[str] = Counter()
    for part in plan.going:
        file = part.file
        if not file.is_overlay:
            for name, count in zip(file.collectors[part.mask], file.steps[part.mask].tolist(), strict=True):
                steps[name] += count
        if part.is_whole:
            whole.append(file.id)
        else:
            trajectories[file.id] = hex_uids(file.uids[part.mask])
    add_expired(lake.storage, np.concatenate([part.file.uids[part.mask] for part in plan.going]))
    entry = LogEntry(time=time.time(), reason=reason, segments=whole, trajectories=trajectories, steps=dict(steps))
    append(lake.storage, entry, after=plan.position)


def expire_orphans(inventory: FileTable) -> None:
    """Expire overlays whose bases are gone for good, e.g. written while their bases expired."""
    log, going = inventory.log, []
    for overlay in (file for file in inventory.files.values() if file.is_overlay and not file.alive.all()):
        orphans = np.zeros(len(overlay.uids), dtype=bool)
        for id in dict.fromkeys(overlay.base_ids):
            base = inventory.live.file_of(id)
            if base not in log.quarantined and base not in inventory.live.unreadable:  # otherwise it may return
                orphans |= (overlay.base_ids == id) & ~overlay.alive
        orphans &= log.alive(overlay.id, overlay.uids)  # the others are removed already
        if orphans.any():
            going.append(_FileExpiry(overlay, orphans, bool(orphans.all())))
    if going:
        plan = ExpiryPlan(tuple(going), 0, log.last)
        carry_out(inventory.lake, plan, reason="derived from removed trajectories")
        inventory.refresh()


def make_plan(
    inventory: FileTable,
    limits: RetentionLimits,
    *,
    chosen: np.ndarray | None = None,
    kept: Collection[str] = (),
    now: float,
    whole: bool = False,
) -> ExpiryPlan:
    """Choose the trajectories to expire so that `limits` hold; the oldest first, by the time of commit.

    `chosen`: uids ("S16", sorted) that `where` selects; `kept`: ids of protected segments. `whole`: meet the limits by
    whole files only, so that up to one file more than they allow stays; otherwise they are met exactly (bytes to the
    nearest trajectory).
    """
    free = {id: file.alive & ~file.named(kept) for id, file in inventory.files.items()}
    for overlay in (file for file in inventory.files.values() if file.is_overlay):
        held = overlay.alive & ~free[overlay.id]
        for base, rows in _bases(inventory, overlay) if held.any() else ():
            free[base.id] &= ~np.isin(base.uids, overlay.base_uids[rows][held[rows]])
    protected = sum(int(file.alive.sum() - free[id].sum()) for id, file in inventory.files.items())
    if chosen is not None:
        free = {id: mask & _among(inventory.files[id].uids, chosen) for id, mask in free.items()}
    masks = {id: np.zeros(len(mask), dtype=bool) for id, mask in free.items()}
    times = _episode_times(inventory)
    if limits.max_age:
        for id, mask in free.items():
            masks[id] |= mask & (times[id] < now - limits.max_age)
    if any(limits.caps):
        _fit(inventory, limits, times, chosen, free, masks, whole)
    elif not limits.max_age:
        masks = {id: mask.copy() for id, mask in free.items()}
    _take_overlays(inventory, masks)
    files = inventory.files
    going = tuple(
        _FileExpiry(files[id], mask, bool((mask == files[id].alive).all()))
        for id, mask in sorted(masks.items())
        if mask.any()
    )
    return ExpiryPlan(going, protected, inventory.log.last)


def _episode_times(inventory: FileTable) -> dict[str, np.ndarray]:
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


def _fit(
    inventory: FileTable,
    limits: RetentionLimits,
    known_times: Mapping[str, np.ndarray],
    chosen: np.ndarray | None,
    free: Mapping[str, np.ndarray],
    masks: dict[str, np.ndarray],
    whole: bool,
) -> None:
    """Add to `masks` the oldest trajectories stored in full until the rest is within the limits."""
    ids = sorted(id for id, file in inventory.files.items() if not file.is_overlay)
    files = [inventory.files[id] for id in ids]
    # (n, 3) float64: steps, trajectories (one each), bytes
    costs = {f.id: np.column_stack([f.steps, np.ones(len(f.steps)), f.row_bytes]) for f in files}
    _add_overlays(inventory, costs)
    counted = {
        id: inventory.files[id].alive
        & ~masks[id]
        & (True if chosen is None else _among(inventory.files[id].uids, chosen))
        for id in ids
    }
    caps = np.array([cap or np.inf for cap in limits.caps])
    excess = sum((costs[id][counted[id]].sum(axis=0) for id in ids), np.zeros(3)) - caps
    if whole:
        newest = {id: float(inventory.files[id].times[counted[id]].max(initial=-np.inf)) for id in ids}
        for id in sorted(ids, key=lambda id: (newest[id], id)):
            cost = costs[id][counted[id]].sum(axis=0)
            if not counted[id].any() or (counted[id] & ~free[id]).any():
                continue
            if not (excess >= cost)[cost > 0].any():  # stays if no limit can do without it
                break
            masks[id] |= counted[id]
            excess = excess - cost
        return
    places = [(id, np.flatnonzero(counted[id] & free[id])) for id in ids]
    if not sum(len(place) for _, place in places):
        return
    times = np.concatenate([known_times[id][place] for id, place in places])
    cost = np.concatenate([costs[id][place] for id, place in places])
    order = np.argsort(times, kind="stable")
    before = np.cumsum(cost[order], axis=0) - cost[order]  # expired before each
    goes = np.zeros(len(order), dtype=bool)
    goes[order] = (before < excess).any(axis=1)
    parts = [(inventory.files[id].episodes, place) for id, place in places]
    if any(numbers is not None for numbers, _ in parts):
        numbers = [np.zeros(len(place), "u8") if own is None else own[place] for own, place in parts]
        episodes = np.concatenate(numbers)
        goes |= np.isin(episodes, episodes[goes]) & (episodes > 0)  # with one piece, the others
    for id, place in places:
        masks[id][place] |= goes[: len(place)]
        goes = goes[len(place) :]


def _add_overlays(inventory: FileTable, costs: dict[str, np.ndarray]) -> None:
    """Add the bytes of overlays to those of their bases."""
    for overlay in (file for file in inventory.files.values() if file.is_overlay):
        for base, rows in _bases(inventory, overlay):
            if base.id in costs:
                place = positions(base.uids, overlay.base_uids[rows])
                live = (place >= 0) & overlay.alive[rows]
                np.add.at(costs[base.id][:, 2], place[live], overlay.row_bytes[rows][live])


def _take_overlays(inventory: FileTable, masks: dict[str, np.ndarray]) -> None:
    """Expire overlays together with their bases."""
    for overlay in (file for file in inventory.files.values() if file.is_overlay):
        for base, rows in _bases(inventory, overlay):
            dying = base.uids[masks[base.id]]
            if len(dying):
                masks[overlay.id][rows] |= overlay.alive[rows] & np.isin(overlay.base_uids[rows], dying)


def _bases(inventory: FileTable, overlay: File) -> list[tuple[File, np.ndarray]]:
    """Return the files of an overlay's bases, each with the indices of the trajectories that derive from it."""
    found = []
    for id in dict.fromkeys(overlay.base_ids):
        base = inventory.file_of(id)
        if base is not None:
            found.append((base, np.flatnonzero(overlay.base_ids == id)))
    return found


def _among(uids: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    return positions(chosen, uids, np.arange(len(chosen))) >= 0


def _count_left(inventory: FileTable, plan: ExpiryPlan) -> dict[str, int]:
    gone = {part.file.id: part.mask for part in plan.going}
    trajectories, steps, size = 0, 0, 0.0
    for id, file in inventory.files.items():
        live = file.alive & ~gone[id] if id in gone else file.alive
        size += float(file.row_bytes[live].sum())
        if not file.is_overlay:
            trajectories, steps = trajectories + int(live.sum()), steps + int(file.steps[live].sum())
    return {"trajectories": trajectories, "steps": steps, "bytes": round(size)}


def _reason(limits: RetentionLimits) -> str:
    parts = [
        f"{name} {value:g}"
        for name in ("max_steps", "max_trajectories", "max_bytes", "max_age")
        if (value := getattr(limits, name))
    ]
    return ", ".join([*parts, *([f"where {limits.where}"] if limits.where.strip() else [])])


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
    with explained(f"write '{storage.url(EXPIRED)}'"):
        storage.remove(*(f"{EXPIRED}/{name}" for name in merged))


def read_expired(storage: Storage) -> np.ndarray:
    """Read the sorted uids (n,) "S16" of what expired. IntegrityError for a damaged file."""
    while True:
        try:
            found = [_read(storage, name) for name in _names(storage)]
        except FileNotFoundError:  # merged meanwhile
            continue
        return np.unique(np.concatenate([np.zeros(0, "S16"), *found]))


def _names(storage: Storage) -> list[str]:
    with explained(f"read '{storage.url(EXPIRED)}'"):
        return sorted(name for name in storage.names(EXPIRED) if name.endswith(_SUFFIX) and not name.startswith("."))


def _read(storage: Storage, name: str) -> np.ndarray:
    key = f"{EXPIRED}/{name}"
    content = storage.read(key)
    if len(content) % 16 != 4 or zlib.crc32(content[4:]) != int.from_bytes(content[:4], "little"):
        raise IntegrityError(
            f"'{storage.url(key)}' is damaged",
            hint="restore it from a copy; or remove it, and what expired can be copied into the lake again",
        )
    return np.frombuffer(content[4:], "S16")


def _write(storage: Storage, uids: np.ndarray) -> None:
    name, content = f"{time.time_ns() // 1000:016x}-{secrets.token_hex(4)}{_SUFFIX}", uids.tobytes()
    with explained(f"write '{storage.url(EXPIRED)}'"):
        storage.write(f"{EXPIRED}/{name}", zlib.crc32(content).to_bytes(4, "little") + content)
