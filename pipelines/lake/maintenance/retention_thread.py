"""A thread that keeps a lake within limits while others fill it and draw from it.

It checks about once a second: the oldest segments expire once the lake exceeds its limits, small segments are merged
when there are many, and removed files are deleted after the grace period. Any number of collectors may run one on the
same lake: the lease admits one at a time, and the others skip that round. Of a lake in an object store, the same one
goes on while it lives: each that took a turn would fetch the footers of all collectors.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from pipelines.errors import AmagoError, Locked
from pipelines.events import Listener, Notice, silent
from pipelines.lake.log import Held, lease
from pipelines.lake.maintenance.compaction import TARGET_BYTES, rewrite
from pipelines.lake.maintenance.files import File, FileTable, sweep
from pipelines.lake.maintenance.retention import RetentionLimits, expire_orphans, make_plan
from pipelines.lake.storage import LocalStorage

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

LOOK_SECONDS, _LOOK_FAR_SECONDS = 1.0, 30.0  # between checks; far: each costs requests to an object store
_LEFT_SECONDS = 60.0  # between checks whether another process still maintains it
MANY = 16  # small segments of similar size that are worth merging
FEW = 4  # likewise, where they become one that is large enough never to be merged again
_ALIKE = 4  # times the largest of them: their minimum total size
_SHARE = 16  # merged segments are at most this fraction of the limit: whole segments expire
_SLACK = 1.125  # beyond this multiple of the limit, single trajectories of large segments expire


class _Abandoned(Exception):
    """The process is about to end: what is left is for the next one that maintains the lake."""


class RetentionThread:
    """A thread that keeps a lake within `max_steps` and `max_bytes` (0: no limit), counted as in `RetentionLimits`.

    `look` does what is due now; as a context manager, a thread calls it regularly. Errors there are reported to
    `listener` (from that thread), once per reason, and retried.
    """

    def __init__(
        self,
        lake: Lake,
        *,
        max_steps: int = 0,
        max_bytes: int = 0,
        grace_seconds: float = 60.0,
        merge: bool = True,
        listener: Listener = silent,
    ) -> None:
        self.lake, self.limits = lake, RetentionLimits(max_steps=max_steps, max_bytes=max_bytes)
        self._grace, self._merge, self._listener = grace_seconds, merge, listener
        self._inventory = FileTable(lake)
        self._sweep_at = 0.0  # once at the start, for leftovers of other processes
        self._left_alone: set[str] = set()  # damaged: they cannot be merged
        self._reported: set[str] = set()
        self._other = ""  # of whom the lease was when it was last asked
        self._stop, self._abandoned = threading.Event(), False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> RetentionThread:
        self._thread = threading.Thread(target=self._watch, name="lake cap", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Check a last time, after the last segment. After an error or an interruption, leave the rest to others."""
        self._abandoned = kind is not None
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if kind is None:
            self._try()

    def _watch(self) -> None:
        regular = LOOK_SECONDS if isinstance(self.lake.storage, LocalStorage) else _LOOK_FAR_SECONDS
        seconds = regular
        while not self._stop.wait(seconds):
            seconds = regular if self._try(leave=True) else _LEFT_SECONDS

    def _try(self, *, leave: bool = False) -> bool:
        """Look, unless (with `leave`) another process does so regularly; return False then."""
        try:
            if leave and self._is_left_to_another():
                return False
            self.look()
        except (AmagoError, OSError) as error:
            self._warn(f"lake '{self.lake.name}' cannot be maintained at the moment: {error}")
        return True

    def _is_left_to_another(self) -> bool:
        """Return whether another process has maintained the lake since this was last asked."""
        before, self._other = self._other, self.lake.storage.held_by_another("maintenance")
        return self._other not in ("", before)

    def _warn(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._listener(Notice(text=text, level="warning"))

    def look(self) -> None:
        """Expire, merge and delete what is due, unless another process maintains the lake."""
        try:
            with lease(self.lake, wait_seconds=0.0) as holds:

                def require_lease() -> None:
                    holds()
                    if self._abandoned:
                        raise _Abandoned

                self._inventory.refresh()
                self._inventory.log.require_whole()
                if self._expire(require_lease) | (self._merge and self._compact(require_lease)):
                    self._sweep_at = min(self._sweep_at, time.monotonic() + self._grace)
                if time.monotonic() >= self._sweep_at:
                    expire_orphans(self._inventory)
                    swept = sweep(self._inventory, require_lease, grace_seconds=self._grace)
                    self._sweep_at = time.monotonic() + self._grace / 2 if swept.waiting else math.inf
                self._inventory.write_manifests(require_lease)
        except (Locked, _Abandoned):
            return

    def _expire(self, held: Held) -> bool:
        """Expire what exceeds the limits; return whether anything did."""
        if self._measure_fullness() <= 1:
            return False
        protected = self._inventory.log.protected.values()
        if any(protection.is_whole for protection in protected):
            self._warn(f"lake '{self.lake.name}' is protected: it grows beyond its limits")
            return False
        kept = {id for protection in protected for id in protection.segments}
        gone = False
        for whole, above in ((True, 1.0), (False, _SLACK)):
            if self._measure_fullness() > above:
                plan = make_plan(self._inventory, self.limits, kept=kept, now=time.time(), whole=whole)
                held()
                plan.carry_out(self.lake, reason="the lake was full")
                self._inventory.refresh()
                gone = gone or bool(plan.going)
        return gone

    def _measure_fullness(self) -> float:
        """Compute the size of the lake as a fraction of its limit."""
        files = list(self._inventory.files.values())
        steps = sum(file.live_steps for file in files if not file.is_overlay)
        size = sum(file.live_bytes for file in files)
        allowed = ((steps, self.limits.max_steps), (size, self.limits.max_bytes))
        return max(value / most if most else 0.0 for value, most in allowed)

    def _compact(self, held: Held) -> bool:
        """Merge small segments where there are many; return whether that was done."""
        target = TARGET_BYTES // 2
        allowed = self.limits.max_bytes
        if not allowed:  # then the bytes that so many steps take here
            stored = [file for file in self._inventory.files.values() if not file.is_overlay]
            steps = sum(int(file.steps.sum()) for file in stored)
            allowed = int(self.limits.max_steps * sum(file.bytes for file in stored) / steps) if steps else 0
        if allowed:
            target = max(min(target, allowed // _SHARE), 1)
        files = [file for id, file in self._inventory.files.items() if id not in self._left_alone]
        run = choose_ripe(files, target_bytes=target)
        if not run:
            return False
        written = rewrite(self.lake, {file.id: file.alive for file in run}, held, listener=self._listener)
        self._left_alone |= {file.id for file in run} - set(written.replaced if written is not None else ())
        self._inventory.refresh()
        return written is not None


def choose_ripe(files: Iterable[File], *, target_bytes: int) -> list[File]:
    """Choose files of one kind below half the target that are worth merging now, in the order of their ids; none if
    there are few.

    They are the newest, of similar size: merging files again and again as they grow would write every byte many times.
    A few that fill half the target are worth it whatever their sizes, since that is the last time. A file that is at
    least half dead is worth rewriting alone.
    """
    kinds: dict[tuple[str, bool, tuple[str, ...]], list[File]] = defaultdict(list)
    for file in files:
        if file.alive.any() and file.is_wasteful:
            return [file]
        if file.alive.any() and 2 * file.bytes < target_bytes:
            kinds[file.kind].append(file)
    for kind in sorted(kinds):
        newest = sorted(kinds[kind], key=lambda file: (-file.times.max(), file.id))
        total, largest, count = 0, 0, 0
        for number, file in enumerate(newest, 1):
            total, largest = total + file.bytes, max(largest, file.bytes)
            if total > target_bytes:
                break
            if (number >= MANY and total >= _ALIKE * largest) or (number >= FEW and 2 * total >= target_bytes):
                count = number
        if count:
            return sorted(newest[:count], key=lambda file: file.id)
    return []
