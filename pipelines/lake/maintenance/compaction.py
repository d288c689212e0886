"""Merging many small segments into few large ones, and reclaiming the space of dead trajectories."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.errors import UsageError
from pipelines.events import Listener, Progress, silent
from pipelines.lake.log import lease
from pipelines.lake.maintenance.files import File, FileTable
from pipelines.lake.maintenance.rewrite import SegmentPart, rewrite
from pipelines.lake.maintenance.sweep import GRACE_SECONDS, SweepResult, expire_orphans, sweep

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

SMALL_BYTES, TARGET_BYTES = 16 << 20, 128 << 20
_WASTEFUL = 0.5  # share of dead bytes at which a segment is rewritten
_SETTLE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class CompactionRules:
    """Thresholds of compaction. Segments below `small_bytes` are merged, up to `target_bytes` together; while a writer
    is active, those younger than `settle_seconds` are left alone, because more will follow.
    """

    small_bytes: int = SMALL_BYTES
    target_bytes: int = TARGET_BYTES
    settle_seconds: float = _SETTLE_SECONDS

    def __post_init__(self) -> None:
        if not 0 < self.small_bytes <= self.target_bytes:
            raise UsageError(
                f"segments below {self.small_bytes} bytes cannot be merged up to {self.target_bytes}",
                hint="the target must be at least the size that counts as small",
            )


@dataclass(frozen=True)
class CompactionResult:
    """The effect of compaction, predicted in a dry run. `runs`: ids of the segments that became one, run by run;
    `segments` and `bytes` of live files, before and after.
    """

    runs: tuple[tuple[str, ...], ...]
    trajectories: int
    segments: tuple[int, int]
    bytes: tuple[int, int]
    swept: SweepResult | None = None


def compact(
    lake: Lake,
    rules: CompactionRules | None = None,
    *,
    grace_seconds: float = GRACE_SECONDS,
    dry_run: bool = False,
    listener: Listener = silent,
) -> CompactionResult:
    """Merge small segments, rewrite those that are half dead, then sweep. Locked while another process maintains the
    lake.

    Others may read and write meanwhile; the trajectories, and what a snapshot draws from them, stay the same. A damaged
    segment is left unchanged, with a Notice.
    """
    if not dry_run:
        lake.salvage(listener=listener)
    with lease(lake) as held:
        inventory = FileTable(lake, listener)
        inventory.refresh()
        planned = plan(inventory, rules or CompactionRules())
        before = _totals(inventory)
        if dry_run:
            return _foreseen(planned, before)
        inventory.log.require_whole()
        expire_orphans(inventory)
        done, trajectories = [], 0
        for number, run in enumerate(planned, 1):
            parts = [SegmentPart(file.id, inventory.files[file.id].alive) for file in run]
            written = rewrite(lake, parts, held, listener=listener)
            if written is not None:
                done.append(written.replaced)
                trajectories += written.trajectories
            listener(Progress(stage="compact", done=number, total=len(planned), unit="runs"))
        inventory.refresh()
        after = _totals(inventory)
        swept = sweep(inventory, held, grace_seconds=grace_seconds, listener=listener)
    return CompactionResult(tuple(done), trajectories, (before[0], after[0]), (before[1], after[1]), swept)


def plan(inventory: FileTable, rules: CompactionRules) -> list[list[File]]:
    """Choose the files to rewrite, each run into one."""
    writing = any((inventory.lake.local / "wal").glob("*.wal"))
    newest = time.time() - (rules.settle_seconds if writing else 0.0)
    settled = [file for file in inventory.files.values() if file.alive.any() and file.times.max() <= newest]
    return runs(settled, small_bytes=rules.small_bytes, target_bytes=rules.target_bytes)


def runs(files: Iterable[File], *, small_bytes: int, target_bytes: int) -> list[list[File]]:
    """Group small or half dead files of one schema, kind and set of columns into runs, in the order of their ids. A run
    has several files, or one that is half dead; their live bytes fit the target.
    """
    kinds: dict[tuple[str, bool, tuple[str, ...]], list[File]] = defaultdict(list)
    for file in sorted(files, key=lambda file: file.id):
        if file.bytes < small_bytes or is_wasteful(file):
            kinds[file.kind].append(file)
    found: list[list[File]] = []
    for kind in sorted(kinds):
        run: list[File] = []
        for file in kinds[kind]:
            if run and sum(member.live_bytes for member in [*run, file]) > target_bytes:
                found.append(run)
                run = []
            run.append(file)
        found.append(run)
    return [run for run in found if len(run) > 1 or is_wasteful(run[0])]


def is_wasteful(file: File) -> bool:
    """Return whether at least half of a file is dead."""
    return file.live_bytes <= (1 - _WASTEFUL) * file.bytes


def _totals(inventory: FileTable) -> tuple[int, int]:
    live = [file.bytes for file in inventory.files.values() if file.alive.any()]
    return len(live), sum(live)


def _foreseen(planned: list[list[File]], before: tuple[int, int]) -> CompactionResult:
    files = [file for run in planned for file in run]
    return CompactionResult(
        runs=tuple(tuple(file.id for file in run) for run in planned),
        trajectories=sum(int(file.alive.sum()) for file in files),
        segments=(before[0], before[0] - len(files) + len(planned)),
        bytes=(before[1], before[1] - round(sum(file.bytes - file.live_bytes for file in files))),
    )
