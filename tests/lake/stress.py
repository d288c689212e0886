"""Many processes at once on one lake: who does what in a storm, and what must hold afterwards.

Writers acknowledge into ledgers of their own; what a trajectory must contain follows from a key in its observation,
so every reader can tell a whole trajectory from any other. Processes come from a fork server and are killed with -9.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.data.strategy import Strategy
from pipelines.data.view import View
from pipelines.errors import InputMissing, StageFailed
from pipelines.lake.footer import hex_uids
from pipelines.lake.maintenance import compaction, retention
from pipelines.lake.maintenance.verify import verify
from pipelines.lake.overlays import OverlayBatch, OverlayWriter, overlay_uids
from pipelines.lake.reading import Reader
from pipelines.lake.sql import catalog
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from pipelines.lake.uids import positions
from tests.data.seeded import SeededSampler
from tests.lake.keyed import LONGEST, PICTURES, PLAIN, checksum, content, differs

COMMIT_SECONDS = 0.05
KEPT = 2000  # trajectories that the maintainer leaves


class Ledger:
    """An append-only file of JSON lines; a line is there as a whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, **fields: Any) -> None:
        os.write(self._descriptor, (json.dumps(fields) + "\n").encode())

    @staticmethod
    def lines(folder: Path, pattern: str) -> Iterator[dict[str, Any]]:
        for path in sorted(folder.glob(pattern)):
            text = path.read_text()
            yield from (json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines())


def write(lake: Path, notes: Path, number: int, life: int, seed: int) -> None:
    """A collector: a trajectory and a commit each 50 ms, for ever. The last of the writers makes pictures."""
    schema = PICTURES if number == 7 else PLAIN
    ledger = Ledger(notes / f"writer-{number}-{life}")
    rng = random.Random(f"{seed}-{number}-{life}")
    keys = (rng.getrandbits(62) for _ in itertools.count())
    writer = Lake(lake).writer(schema, name=f"w{number}", seal_seconds=1e9)
    due = time.monotonic()
    while True:
        uids = []
        for key in itertools.islice(keys, rng.randint(1, 3)):
            columns = content(key, schema)
            uids.append(writer.append(columns, TrajectoryInfo(env="storm", task=f"t{number}", seed=key)))
            ledger.note(uid=uids[-1], crc=checksum(schema, columns))
        writer.seal()
        ledger.note(sealed=uids, time=time.time())
        due = max(due + COMMIT_SECONDS, time.monotonic() - 1)
        time.sleep(max(0.0, due - time.monotonic()))


def relabel(lake: Path, notes: Path, life: int, seed: int) -> None:
    """A relabeler, which works in rounds."""
    ledger, opened = Ledger(notes / f"relabeler-{life}"), Lake(lake)
    while True:
        relabel_once(opened, ledger)
        time.sleep(0.2)


def relabel_once(opened: Lake, ledger: Ledger) -> None:
    """Derive one trajectory from each of those without pictures, about 20 at most."""
    opened.salvage()
    reader = Reader(opened)
    reader.refresh()
    known = reader.list_derived()
    with OverlayWriter(opened, PLAIN, ["obs.key", "reward"], name="relabel", seal_bytes=4000) as writer:
        for segment in reader.list_originals():
            lacking = positions(known, overlay_uids(segment.uids, "storm", 0)) < 0
            if segment.schema_id != PLAIN.id or not lacking.any() or writer.trajectories > 20:
                continue
            try:
                portion = reader.read_portion(segment.number, segment.uids[lacking])
            except StageFailed:  # files vanish as fast as they are looked for
                continue
            if portion is None:
                continue
            values = portion.columns(["obs.key", "reward"])
            count = len(portion)
            batch = OverlayBatch(
                place=np.arange(count),
                offset=np.zeros(count, dtype=np.int64),
                rows=portion.rows,
                columns={name: -array for name, array in values.items()},
            )
            uids = overlay_uids(portion.uids, "storm", 0)
            writer.append(portion.id, portion.table, batch, uids, "storm")
            ledger.note(bases=dict(zip(hex_uids(uids), hex_uids(portion.uids), strict=True)))
    ledger.note(derived=writer.trajectories)


def follow(lake: Path, notes: Path, seed: int) -> None:
    """A trainer: takes in what is new, draws whole trajectories as windows, and compares every byte."""
    ledger, opened = Ledger(notes / "follower"), Lake(lake)
    told: list[Any] = []
    view = View(opened, PLAIN.id, listener=told.append)
    sampler = SeededSampler(view, length=LONGEST, seed=seed, strategy=Strategy(placement="full"))
    seen = windows = 0
    while True:
        view.refresh()
        segments = view.live.segments
        uids = [uid.ljust(16, b"\0").hex() for segment in segments[seen:] for uid in segment.uids.tolist()]
        seen = len(segments)
        if uids:
            ledger.note(seen=uids, time=time.time())
        with contextlib.suppress(InputMissing):
            batch = sampler.sample(32)
            for i, length in enumerate(batch.lengths.tolist()):
                whole = {name: values[i, :length] for name, values in batch.columns.items()}
                wrong = differs(PLAIN, whole)
                if wrong is not None:
                    ledger.note(wrong=wrong, by="follower")
            windows += len(batch.lengths)
            ledger.note(windows=32)
        for event in told:
            ledger.note(told=str(getattr(event, "text", event)))
        told.clear()
        time.sleep(0.02)


def read(lake: Path, notes: Path, seed: int) -> None:
    """A reader of single trajectories, against their checksums, and a user who asks SQL."""
    ledger, opened, rng = Ledger(notes / "reader"), Lake(lake), random.Random(seed)
    told: list[Any] = []
    reader = Reader(opened, listener=told.append)
    for turn in itertools.count():
        uids = reader.uids()
        for uid in rng.sample(uids, min(10, len(uids))):
            try:
                schema = opened.schema(reader.locate(uid)[0].schema_id)
                columns = reader.read(uid).columns
                stored = reader.locate(uid)[0].columns
                expected = reader.row(uid)["crc"]
            except InputMissing:  # expired since
                continue
            wrong = differs(schema, columns)
            if wrong is None and checksum(schema, columns, stored) != expected:
                wrong = f"{uid}: not the checksum of its footer"
            if wrong is not None:
                ledger.note(wrong=wrong, by="reader")
            ledger.note(read=uid)
        if turn % 20 == 0:
            (count, distinct), *_ = catalog.query(opened, "select count(*), count(distinct uid) from trajectories")[1]
            ledger.note(counted=count)
            if count != distinct:
                ledger.note(wrong=f"{count} rows for {distinct} uids", by="sql")
        for event in told:
            ledger.note(told=str(getattr(event, "text", event)))
        told.clear()
        time.sleep(0.1)


def maintain(lake: Path, notes: Path, seed: int) -> None:
    """Somebody who merges small segments, lets the oldest go, and removes files two seconds after they died."""
    ledger, opened = Ledger(notes / f"maintainer-{os.getpid()}"), Lake(lake)
    carry_out = retention.ExpiryPlan.carry_out

    def noted(plan: retention.ExpiryPlan, lake: Lake, *, reason: str) -> None:
        uids = [uid for going in plan.going for uid in hex_uids(going.file.uids[going.mask])]
        ledger.note(expired=uids)
        carry_out(plan, lake, reason=reason)
        ledger.note(gone=uids)

    retention.ExpiryPlan.carry_out = noted  # type: ignore[method-assign]
    rules = compaction.CompactionRules(small_bytes=1 << 17, target_bytes=1 << 19, settle_seconds=1)
    while True:
        retention.expire(opened, retention.RetentionLimits(max_trajectories=KEPT), grace_seconds=2)
        done = compaction.compact(opened, rules, grace_seconds=2)
        ledger.note(compacted=sum(len(run) for run in done.runs))


@dataclass
class Outcome:
    """What a storm left behind. `expired`: uids of which somebody began to let go; `gone`: did so. `left`: live uids
    before everything was merged and swept once more, at rest; `live`: afterwards.
    """

    acknowledged: dict[str, int]
    sealed: dict[str, float]
    seen: dict[str, float]
    expired: set[str]
    gone: set[str]
    left: list[str]
    live: list[str]
    wrong: list[str]
    told: list[str]
    failures: list[str]
    commits: int
    compacted: int
    kills: int
    reads: int
    windows: int
    seconds: float
    derived: int = 0
    bases: dict[str, str] = field(default_factory=dict)
    index: list[tuple[Any, ...]] = field(default_factory=list)
    rebuilt: list[tuple[Any, ...]] = field(default_factory=list)
    corrupt: int = 0
    foreign: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    segments: int = 0

    @property
    def lost(self) -> set[str]:
        return set(self.acknowledged) - set(self.live) - self.expired

    @property
    def doubled(self) -> list[str]:
        return [uid for uid, count in Counter(self.live).items() if count > 1]

    def visible(self) -> float:
        """Median seconds from a commit to the moment a follower has it."""
        waits = [max(0.0, self.seen[uid] - at) for uid, at in self.sealed.items() if uid in self.seen]
        return statistics.median(waits) if waits else float("nan")

    def figures(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 1),
            "commits_per_second": round(self.commits / self.seconds, 1),
            "visible_median_seconds": round(self.visible(), 3),
            "acknowledged": len(self.acknowledged),
            "live": len(self.live),
            "expired": len(self.expired),
            "lost": len(self.lost),
            "doubled": len(self.doubled),
            "segments_merged": self.compacted,
            "kills": self.kills,
            "read_by_uid": self.reads,
            "windows": self.windows,
            "derived": self.derived,
            "live_derived": sum(uid in self.bases for uid in self.live),
            "wrong_reads": len(self.wrong),
            "segments_at_the_end": self.segments,
        }


class Storm:
    """Processes on a lake; those that are killed come again until the end."""

    def __init__(self, folder: Path, *, writers: int, seed: int) -> None:
        self.lake, self.notes = folder / "lake", folder / "notes"
        self.notes.mkdir(parents=True)
        lake = Lake.create(self.lake)
        lake.register(PLAIN)
        lake.register(PICTURES)
        self._rng, self._seed, self._writers = random.Random(seed), seed, writers
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._living: dict[str, BaseProcess] = {}
        self._lives: Counter[str] = Counter()
        self.failures: list[str] = []
        self.kills = 0

    def begin(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        process = self._context.Process(target=work, args=(self.lake, self.notes, *arguments), daemon=True)
        process.start()
        self._living[name] = process

    def begin_writer(self, number: int) -> None:
        name = f"writer-{number}"
        self.begin(name, write, number, self._lives[name], self._seed)
        self._lives[name] += 1

    def begin_relabeler(self) -> None:
        self.begin("relabeler", relabel, self._lives["relabeler"], self._seed)
        self._lives["relabeler"] += 1

    def kill(self, name: str) -> None:
        process = self._living.pop(name)
        if process.exitcode is not None:
            self.failures.append(f"{name} ended with exit code {process.exitcode}")
        process.kill()
        process.join()
        self.kills += 1

    def rage(self, seconds: float) -> Outcome:
        """Writers, a follower, a reader and a maintainer for so long; writers are killed, the maintainer rarely."""
        for number in range(self._writers):
            self.begin_writer(number)
        for name, work in (("follower", follow), ("reader", read), ("maintainer", maintain)):
            self.begin(name, work, self._seed)
        self.begin_relabeler()
        begun = time.monotonic()
        try:
            while time.monotonic() - begun < seconds:
                time.sleep(self._rng.uniform(0.1, 0.7))
                number = self._rng.randrange(self._writers)
                self.kill(f"writer-{number}")
                self.begin_writer(number)
                if self._rng.random() < 0.3:
                    self.kill("relabeler")
                    self.begin_relabeler()
                if self._rng.random() < 0.015:
                    self.kill("maintainer")
                    self.begin("maintainer", maintain, self._seed)
                dead = [name for name, process in self._living.items() if process.exitcode is not None]
                if dead:
                    break
        finally:
            took = time.monotonic() - begun
            for name in sorted(self._living):
                self.kill(name)
        return self._outcome(took)

    def _outcome(self, seconds: float) -> Outcome:
        lake = Lake(self.lake)
        lake.salvage()
        relabel_once(lake, Ledger(self.notes / "relabeler-last"))  # however far those that were killed came
        left = Reader(lake).uids()
        compaction.compact(lake, compaction.CompactionRules(settle_seconds=0), grace_seconds=0)
        written = list(Ledger.lines(self.notes, "writer-*"))
        followed = list(Ledger.lines(self.notes, "follower"))
        maintained = list(Ledger.lines(self.notes, "maintainer-*"))
        was_read = list(Ledger.lines(self.notes, "reader"))
        relabelled = list(Ledger.lines(self.notes, "relabeler-*"))
        everything = "select * from trajectories order by uid"
        index = catalog.query(lake, everything)[1]
        catalog.rebuild(lake)
        report = verify(lake)
        seals = [line for line in written if "sealed" in line]
        return Outcome(
            acknowledged={line["uid"]: line["crc"] for line in written if "uid" in line},
            sealed={uid: line["time"] for line in seals for uid in line["sealed"]},
            seen={uid: line["time"] for line in reversed(followed) if "seen" in line for uid in line["seen"]},
            expired={uid for line in maintained for uid in line.get("expired", ())},
            gone={uid for line in maintained for uid in line.get("gone", ())},
            compacted=sum(line.get("compacted", 0) for line in maintained),
            left=left,
            live=Reader(lake).uids(),
            derived=sum(line.get("derived", 0) for line in relabelled),
            bases={uid: base for line in relabelled for uid, base in line.get("bases", {}).items()},
            wrong=[line["wrong"] for line in followed + was_read if "wrong" in line],
            told=[line["told"] for line in followed + was_read if "told" in line],
            failures=self.failures,
            commits=len(seals),
            kills=self.kills,
            reads=sum("read" in line for line in was_read),
            windows=sum(line.get("windows", 0) for line in followed),
            seconds=seconds,
            index=index,
            rebuilt=catalog.query(lake, everything)[1],
            corrupt=len(report.corrupt),
            foreign=report.foreign,
            leftovers=tuple(path.name for name in ("wal", "tmp") for path in (self.lake / name).iterdir()),
            segments=report.segments_checked,
        )
