"""relabel: derive new goals and rewards from what a lake holds, as overlays that leave the originals alone.

Which trajectories, which goals: all follows from the seed and a trajectory's uid, and what was already derived by
the same method, strategy and seed is not derived again; so the command can be repeated, after a kill too, and after
more has been collected.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.config.settings import Settings
from pipelines.errors import InputMissing
from pipelines.events import Listener, Notice, Progress, silent
from pipelines.lake.footer import hex_uids
from pipelines.lake.reading import Reader
from pipelines.lake.sql.catalog import query
from pipelines.lake.sql.selection import select
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectory
from pipelines.relabelers.base import Relabeler, generator_for, make_relabeler
from pipelines.stages.result import Result


def run(settings: Settings, *, lake: Path | str, listener: Listener = silent) -> Result:
    """Relabel the chosen share of the lake's original trajectories, `relabel.copies` times each."""
    wanted, started = settings.relabel, time.monotonic()
    store = Lake.open(lake)
    store.salvage(listener=listener)
    relabeler = make_relabeler(wanted.relabeler, **({"strategy": wanted.strategy} if wanted.strategy else {}))
    method = f"{relabeler.method}/{settings.seed}"
    schema = store.only_schema()
    done = _done(store, method)
    reader = Reader(store, listener=listener)
    chosen = _chosen(reader, wanted.where, wanted.fraction, settings.seed, done, wanted.copies, listener)
    written = steps = overlay_bytes = read = expired = 0
    with store.overlay_writer(schema, relabeler.columns, name="relabel") as writer:
        for uid in chosen:
            try:
                trajectory = reader.read(uid)
                for copy in range(done[uid], wanted.copies):
                    uid_steps = _relabel(writer, relabeler, trajectory, settings.seed, copy, method)
                    written += uid_steps > 0
                    steps += uid_steps
            except InputMissing:
                if reader.lives(uid):
                    raise
                expired += 1
            read += 1
            figures = {"written": float(written)}
            listener(Progress(stage="relabel", done=read, total=len(chosen), unit="trajectories", metrics=figures))
        overlay_bytes = writer.bytes
    if expired:
        listener(Notice(text=f"{expired} of {len(chosen)} trajectories expired before they were relabelled"))
    seconds = time.monotonic() - started
    return Result(
        command="relabel",
        status="done" if chosen else "skipped",
        lake=store.name,
        metrics={
            "trajectories": written,
            "steps": steps,
            "overlay_bytes": overlay_bytes,
            "base_bytes": steps * schema.step_bytes,
            "considered": len(chosen),
            "trajectories_per_second": read / seconds if read else 0.0,
        },
        outputs=[store.name],
        seconds=seconds,
    )


def _relabel(writer: Any, relabeler: Relabeler, base: Trajectory, seed: int, copy: int, method: str) -> int:
    """Write one relabelled copy; returns its length in steps (0: the relabeler found nothing to choose)."""
    found = relabeler.relabel(base, generator_for(seed, base.uid, copy))
    if found is None:
        return 0
    info = replace(base.info, success=found.success, source="relabel")
    writer.append(base.uid, found.columns, base_offset=found.offset, method=method, info=info)
    return found.length


def _done(lake: Lake, method: str) -> Counter[str]:
    """How many copies by `method` each original already has."""
    quoted = method.replace("'", "''")
    _, rows = query(lake, f"select base_uid from trajectories where relabel_method = '{quoted}'")
    return Counter(uid for (uid,) in rows)


def _chosen(
    reader: Reader, where: str, fraction: float, seed: int, done: Counter[str], copies: int, listener: Listener
) -> list[str]:
    """Originals that match, belong to the share, and lack copies, in the lake's order."""
    matching = set(hex_uids(select(reader.lake, where, originals=True, listener=listener).uids))
    return [uid for uid in reader.uids() if uid in matching and _share(seed, uid) < fraction and done[uid] < copies]


def _share(seed: int, uid: str) -> float:
    """A number in [0, 1) that the seed and the uid decide."""
    digest = hashlib.sha256(f"{seed}/{uid}/share".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
