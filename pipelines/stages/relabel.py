"""relabel: derive new goals and rewards as overlays, which leave the originals unchanged.

The choice of trajectories and goals follows from the seed and the trajectory's uid, and so does the derived uid.
Existing versions are not derived again, so the command can be repeated, after a kill or after more data has been
collected. An error leaves the lake unchanged.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipelines.config.relabelling import RelabelSettings
from pipelines.config.settings import Settings
from pipelines.events import Listener, Notice, Progress, silent
from pipelines.lake.overlays import OverlayWriter, overlay_uids
from pipelines.lake.reading import Reader
from pipelines.lake.sql.selection import select
from pipelines.lake.store import Lake
from pipelines.lake.uids import positions
from pipelines.relabelers.base import Chain, Context
from pipelines.relabelers.paths import shares_of
from pipelines.stages.result import Result

_CHUNK_BYTES = 32 << 20  # of columns that are relabelled at once


def run(settings: Settings, *, lake: Path | str, listener: Listener = silent) -> Result:
    """Relabel the selected share of the lake's original trajectories, `relabel.copies` times each."""
    started = time.monotonic()
    store = Lake(lake)
    store.salvage(listener=listener)
    job = _Job(store, settings.relabel, seed=settings.seed, listener=listener)
    work = job.plan()
    with contextlib.ExitStack() as stack:
        for part in work:
            job.relabel(part, stack)
    if job.expired:
        text = f"{job.expired} of {job.total} trajectories expired before they were relabelled"
        listener(Notice(text=text))
    seconds = time.monotonic() - started
    writers = job.writers.values()
    steps = sum(writer.steps for writer in writers)
    return Result(
        command="relabel",
        status="done" if job.total else "skipped",
        lake=store.name,
        metrics={
            "trajectories": sum(writer.trajectories for writer in writers),
            "steps": steps,
            "overlay_bytes": sum(writer.bytes for writer in writers),
            "base_bytes": steps * job.schema.step_bytes,
            "considered": job.total,
            "trajectories_per_second": job.done * settings.relabel.copies / seconds if job.done else 0.0,
        },
        outputs=[store.name],
        seconds=seconds,
    )


@dataclass(frozen=True)
class _RelabelledPart:
    """Trajectories `uids` (n,) "S16" of one environment in the segment `number`."""

    number: int
    env: str
    uids: np.ndarray


class _Job:
    """Counts of originals: `total` without all their versions, `done`, and `expired` before they were read."""

    def __init__(self, store: Lake, wanted: RelabelSettings, *, seed: int, listener: Listener) -> None:
        self.store, self.wanted, self.seed, self.listener = store, wanted, seed, listener
        self.schema = store.only_schema()
        self.writers: dict[tuple[str, ...], OverlayWriter] = {}
        self.total = self.done = self.expired = 0
        self._chains: dict[str, Chain] = {}

    def plan(self) -> list[_RelabelledPart]:
        """Find originals without all their versions. Invalid settings are detected here."""
        chosen = select(self.store, self.wanted.where, originals=True, listener=self.listener).uids
        if self.wanted.fraction < 1:
            chosen = chosen[shares_of(self.seed, chosen) < self.wanted.fraction]
        self._reader = Reader(self.store, listener=self.listener)
        self._reader.refresh()
        self._known = self._reader.derived()
        parts = []
        for segment in self._reader.originals():
            mine = segment.uids[positions(chosen, segment.uids, np.arange(len(chosen))) >= 0]
            portion = self._reader.portion(segment.number, mine)
            if portion is not None:
                names, codes = portion.envs()
                found = ((env, portion.uids[codes == code]) for code, env in enumerate(names))
                parts += [_RelabelledPart(segment.number, env, self._lacking(env, uids)) for env, uids in found]
        parts = [part for part in parts if len(part.uids)]
        self.total = sum(len(part.uids) for part in parts)
        return parts

    def _chain(self, env: str) -> Chain:
        if env not in self._chains:
            context = Context(schema=self.schema, env=env, goal=self.wanted.goal, listener=self.listener)
            self._chains[env] = Chain(self.wanted.relabelers, context, seed=self.seed)
        return self._chains[env]

    def _lacking(self, env: str, uids: np.ndarray) -> np.ndarray:
        """Return those of `uids` that lack a version."""
        lacks = np.zeros(len(uids), dtype=bool)
        for copy in range(self.wanted.copies):
            lacks |= ~self._is_known(overlay_uids(uids, self._chain(env).method, copy))
        return uids[lacks]

    def _is_known(self, uids: np.ndarray) -> np.ndarray:
        """Return (n,) bool: which are in the lake."""
        return positions(self._known, uids, np.arange(len(self._known))) >= 0

    def relabel(self, part: _RelabelledPart, stack: contextlib.ExitStack) -> None:
        """Write the missing versions of a part."""
        chain = self._chain(part.env)
        portion = self._reader.portion(part.number, part.uids)
        gone = len(part.uids) - (len(portion) if portion is not None else 0)
        self.expired += gone
        self.done += gone
        if portion is None:
            return
        for chunk in portion.chunks(chain.reads, _CHUNK_BYTES):
            for copy in range(self.wanted.copies):
                targets = overlay_uids(chunk.uids, chain.method, copy)
                lacking = np.flatnonzero(~self._is_known(targets))
                if not len(lacking):
                    continue
                some = chunk.only(lacking)
                derived = chain.derive(some.columns(chain.reads), some.rows, some.uids, copy)
                own = targets[lacking][derived.place]
                self._writer(chain, stack).append(some.id, some.table, derived, own, chain.method)
            self.done += len(chunk)
            figures = {"written": float(sum(writer.trajectories for writer in self.writers.values()))}
            self.listener(
                Progress(stage="relabel", done=self.done, total=self.total, unit="trajectories", metrics=figures)
            )

    def _writer(self, chain: Chain, stack: contextlib.ExitStack) -> OverlayWriter:
        """Return the writer for these columns; `stack` closes it."""
        if chain.changes not in self.writers:
            writer = OverlayWriter(self.store, self.schema, chain.changes, name="relabel")
            self.writers[chain.changes] = stack.enter_context(writer)
        return self.writers[chain.changes]
