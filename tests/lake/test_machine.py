"""A lake through any order of appending, crashing, deriving, reading, expiring, compacting, sweeping and losing its
index, against a dictionary: what was acknowledged is there byte for byte until it expires, in the order in which it was
seen; what expired stays away; a protected snapshot is the same for ever.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipelines.data.view import View
from pipelines.lake import folders, log, manifest, reading
from pipelines.lake import segment as segments
from pipelines.lake.folders import FolderChooser
from pipelines.lake.footer import hex_uids
from pipelines.lake.log import lease, list_protections, protect
from pipelines.lake.maintenance.compaction import CompactionRules, compact
from pipelines.lake.maintenance.files import FileTable, sweep
from pipelines.lake.maintenance.retention import RetentionLimits, expire, make_plan
from pipelines.lake.maintenance.verify import verify
from pipelines.lake.overlays import overlay_uids
from pipelines.lake.segment import StagedFiles
from pipelines.lake.sql import catalog
from pipelines.lake.storage import LocalStorage
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectories, TrajectoryInfo
from pipelines.lake.wal import Log
from tests.lake.factories import SCHEMA, assert_same, columns, derive
from tests.lake.windows import windows_of
from tests.tiers import trials


@pytest.fixture(autouse=True, scope="module")
def small_folders() -> Iterator[None]:
    """An hour has many folders, and a few segments have a manifest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "LEAST", 2)
        patch.setattr(manifest, "_FULL", 4)
        patch.setattr(folders, "FULL", 3)
        patch.setattr(folders, "COUNTED_EVERY", 2)
        yield


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=4)
SEALING = [(segments, "stage"), (Log, "mark"), (StagedFiles, "publish"), (Log, "drop")]
REWRITING = [(segments, "stage_files"), (FolderChooser, "name_segment"), (StagedFiles, "publish"), (log, "_create")]
SWEEPING = [(log, "_create"), (LocalStorage, "remove"), (LocalStorage, "write")]  # write: manifests
DERIVING = [(Log, "create"), (segments, "stage_files"), (Log, "mark"), (LocalStorage, "publish"), (Log, "drop")]
EVERYTHING = CompactionRules(settle_seconds=0.0)


class Killed(BaseException):
    pass


def die() -> None:
    raise Killed


@dataclass
class Snapshot:
    """What `View.snapshot` gave, the uids in its order, and whether it was protected when they lived."""

    data: dict[str, Any]
    uids: list[str]
    protected: bool = False


class LakeMachine(RuleBasedStateMachine):
    @initialize(segments=st.lists(LENGTHS, min_size=2, max_size=5))
    def create(self, segments: list[list[int]]) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.lake = Lake.create(self.folder / "lake")
        self.lake.register(SCHEMA)
        self.rng = np.random.default_rng(0)
        self.writers: list[Any] = []
        self.acknowledged: dict[str, dict[str, np.ndarray]] = {}
        self.base_of: dict[str, str] = {}
        self.copy_of: dict[str, int] = {}
        self.copies = 0
        self.sealed: set[str] = set()
        self.expired: set[str] = set()
        self.snapshots: list[Snapshot] = []
        self.view = View(self.lake, SCHEMA.id)
        for lengths in segments:
            self.add(lengths)

    def teardown(self) -> None:
        for writer in getattr(self, "writers", []):
            writer._abandon()
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    # Writing

    def writer(self, which: int) -> Any:
        while len(self.writers) <= which:
            self.writers.append(self.lake.writer(SCHEMA, seal_seconds=1e9))
        return self.writers[which]

    def add(self, lengths: list[int], which: int = 0, seal: bool = True) -> None:
        parts = [columns(self.rng, actions) for actions in lengths]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        info = [TrajectoryInfo(seed=actions, collector="c") for actions in lengths]
        uids = self.writer(which).append_many(Trajectories(joined, [actions + 1 for actions in lengths], info))
        self.acknowledged |= dict(zip(uids, parts, strict=True))
        if seal:
            self.writers[which].seal()

    @rule(lengths=LENGTHS, which=st.integers(0, 1), seal=st.booleans())
    def append(self, lengths: list[int], which: int, seal: bool) -> None:
        self.add(lengths, which, seal)

    @precondition(lambda self: self.writers)
    @rule()
    def crash(self) -> None:
        self.writers.pop()._abandon()

    @precondition(lambda self: self.writers)
    @rule(step=st.sampled_from(SEALING))
    def crash_while_sealing(self, step: tuple[Any, str]) -> None:
        writer = self.writers.pop()
        self.kill_at(*step, writer.seal)
        writer._abandon()

    def kill_at(self, owner: Any, name: str, action: Any, after: int = 0) -> None:
        """Die in call number `after` of a function, as by kill -9: nothing is cleaned up afterwards."""
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(StagedFiles, "discard", lambda _: None)
            patch.setattr(segments, "drop_orphan", lambda *_: None)
            patch.setattr(Log, "drop", Log.close)
            real, calls = getattr(owner, name), itertools.count()
            patch.setattr(owner, name, lambda *args, **named: die() if next(calls) == after else real(*args, **named))
            action()

    @precondition(lambda self: self.sealed)
    @rule(pick=st.integers(0, 1000), kill=st.none() | st.sampled_from(DERIVING), after=st.integers(0, 2))
    def derive(self, pick: int, kill: tuple[Any, str] | None, after: int) -> None:
        """Derive from up to three trajectories, each in a segment of its own."""
        bases = [uid for uid in self.in_order(self.sealed - self.expired) if uid not in self.base_of]
        if not bases:
            return
        changes = {}
        for base in bases[pick % len(bases) :][:3]:
            reward = self.acknowledged[base]["reward"]
            changes[base] = {"reward": reward[: 2 + pick % (len(reward) - 1)] - 1}
        self.copies += 1

        def work() -> None:
            derive(self.lake, changes, copy=self.copies, seal_bytes=1)

        self.kill_at(*kill, work, after) if kill is not None else work()
        live = set(reading.Reader(self.lake).uids())
        for base, changed in changes.items():
            (uid,) = hex_uids(overlay_uids(np.array([bytes.fromhex(base)], "S16"), "m", self.copies))
            assert uid in live or kill is not None
            if uid in live:
                rows = len(changed["reward"])
                self.acknowledged[uid] = {n: array[:rows] for n, array in self.acknowledged[base].items()} | changed
                self.base_of[uid], self.copy_of[uid] = base, self.copies
                self.sealed.add(uid)

    @property
    def derivable(self) -> list[str]:
        """What was derived and has expired, of bases that have not."""
        return [uid for uid in self.in_order(self.copy_of.keys() & self.expired) if self.base_of[uid] in self.sealed]

    @precondition(lambda self: self.derivable)
    @rule(pick=st.integers(0, 1000), look=st.booleans())
    def derive_again(self, pick: int, look: bool) -> None:
        """What expired is derived again under the same uid, in a segment that no snapshot has."""
        uid = self.derivable[pick % len(self.derivable)]
        base = self.base_of[uid]
        if look:
            self.look(self.view)  # otherwise it sees both at once
        reward = self.acknowledged[base]["reward"] + 1
        assert derive(self.lake, {base: {"reward": reward}}, copy=self.copy_of[uid]) == [uid]
        self.acknowledged[uid] = self.acknowledged[base] | {"reward": reward}
        for snapshot in self.snapshots:
            snapshot.uids = [each for each in snapshot.uids if each != uid]
        self.expired.discard(uid)
        self.sealed.add(uid)
        assert uid in reading.Reader(self.lake).uids()

    def in_order(self, uids: set[str]) -> list[str]:
        """As they were written: uids are random, and what is done must follow from what hypothesis draws."""
        return [uid for uid in self.acknowledged if uid in uids]

    # Maintenance

    def flush(self) -> None:
        """Everything acknowledged is in a segment."""
        for writer in self.writers:
            writer.seal()
        self.lake.salvage()
        self.sealed = set(self.acknowledged) - self.expired

    def bury(self, before: set[str], after: set[str]) -> None:
        assert after <= before
        self.expired |= before - after
        self.sealed -= self.expired
        self.restore_all()

    @rule(steps=st.integers(1, 40), grace=st.sampled_from([0.0, 600.0]))
    def expire_by_steps(self, steps: int, grace: float) -> None:
        self.flush()
        before = set(reading.Reader(self.lake).uids())
        found = expire(self.lake, RetentionLimits(max_steps=steps), grace_seconds=grace)
        after = set(reading.Reader(self.lake).uids())
        kept = {uid for snapshot in self.snapshots if snapshot.protected for uid in snapshot.uids}
        assert kept <= after
        assert found.left["steps"] == sum(self.length(uid) for uid in after if uid not in self.base_of)
        assert found.left["steps"] <= max(steps, sum(self.length(uid) for uid in kept if uid not in self.base_of))
        gone = {uid for uid in before if uid not in after}
        assert all(self.base_of[uid] in gone for uid in gone if uid in self.base_of)
        self.bury(before, after)

    @rule(steps=st.integers(1, 40))
    def expire_whole_segments(self, steps: int) -> None:
        """As a running collector does."""
        self.flush()
        before = set(reading.Reader(self.lake).uids())
        with lease(self.lake):
            inventory = FileTable(self.lake)
            inventory.refresh()
            kept = {id for protection in list_protections(self.lake.storage) for id in protection.segments}
            plan = make_plan(inventory, RetentionLimits(max_steps=steps), kept=kept, now=0.0, whole=True)
            assert all(part.is_whole for part in plan.going)
            plan.carry_out(self.lake, reason="cap")
        after = set(reading.Reader(self.lake).uids())
        if plan.going:
            assert sum(self.length(uid) for uid in after if uid not in self.base_of) >= steps
        self.bury(before, after)

    def length(self, uid: str) -> int:
        return len(self.acknowledged[uid]["reward"]) - 1

    @precondition(lambda self: self.sealed - self.expired)
    @rule(pick=st.integers(0, 1000))
    def expire_one(self, pick: int) -> None:
        self.flush()
        before = set(reading.Reader(self.lake).uids())
        victim = self.in_order(before)[pick % len(before)]
        expire(self.lake, RetentionLimits(where=f"uid = '{victim}'"), grace_seconds=600.0)
        after = set(reading.Reader(self.lake).uids())
        kept = {uid for snapshot in self.snapshots if snapshot.protected for uid in snapshot.uids}
        dying = {victim} | {uid for uid, base in self.base_of.items() if base == victim}
        assert before - after == (set() if dying & kept else dying & before)
        self.bury(before, after)

    @rule(small=st.sampled_from([1 << 10, 6 << 10, 16 << 20]), grace=st.sampled_from([0.0, 600.0]))
    def compact(self, small: int, grace: float) -> None:
        before = set(reading.Reader(self.lake).uids())
        rules = CompactionRules(small_bytes=small, target_bytes=max(small, 20 << 10), settle_seconds=0.0)
        done = compact(self.lake, rules, grace_seconds=grace)
        assert done.segments[1] == done.segments[0] - sum(len(run) - 1 for run in done.runs)
        assert before <= set(reading.Reader(self.lake).uids())  # salvage may have added some
        self.restore_all()

    @rule(step=st.sampled_from(REWRITING))
    def crash_while_compacting(self, step: tuple[Any, str]) -> None:
        self.kill_at(*step, lambda: compact(self.lake, EVERYTHING, grace_seconds=0.0))

    @rule(steps=st.integers(1, 40), step=st.sampled_from(SWEEPING), after=st.integers(0, 4))
    def crash_while_expiring(self, steps: int, step: tuple[Any, str], after: int) -> None:
        """Die while an expiry is entered in the log, files are deleted, or the log is restarted."""
        self.flush()
        before = set(reading.Reader(self.lake).uids())
        self.kill_at(*step, lambda: expire(self.lake, RetentionLimits(max_steps=steps), grace_seconds=0.0), after)
        self.bury(before, set(reading.Reader(self.lake).uids()))

    @rule()
    def sweep(self) -> None:
        with lease(self.lake) as held:
            inventory = FileTable(self.lake)
            inventory.refresh()
            inventory.refresh()
            sweep(inventory, held, grace_seconds=0.0)
        assert not list((self.lake.path / "tmp").glob("compact.*"))
        self.restore_all()

    # Reading

    @rule()
    def read_everything(self) -> None:
        self.flush()
        reader = reading.Reader(self.lake)
        assert sorted(reader.uids()) == sorted(self.sealed)
        for uid in sorted(self.sealed)[-3:]:
            assert_same(dict(reader.read(uid).columns), self.acknowledged[uid])

    @rule(keep=st.booleans(), lengths=LENGTHS)
    def snapshot(self, keep: bool, lengths: list[int]) -> None:
        self.add(lengths)
        self.look(self.view)
        data = self.view.snapshot()
        self.snapshots.append(Snapshot(data, self.known()))
        if keep and data["segments"]:
            protect(self.lake, data["segments"], name=f"run@{len(self.snapshots)}")
            self.snapshots[-1].protected = True

    def known(self) -> list[str]:
        return hex_uids(self.view.uids())

    def restore_all(self) -> None:
        """Every snapshot is what is left of it, in its order; of a protected one, all."""
        for snapshot in self.snapshots:
            view = View(Lake(self.lake.path), SCHEMA.id)
            view.restore(snapshot.data)
            expected = [uid for uid in snapshot.uids if uid not in self.expired]
            assert hex_uids(view.uids()) == expected
            assert not snapshot.protected or expected == snapshot.uids
            self.check_bytes(view)

    @rule()
    def follow(self) -> None:
        """A view that has seen everything come and go against one that begins now."""
        fresh = View(Lake(self.lake.path), SCHEMA.id)
        self.look(self.view, fresh)
        assert sorted(self.known()) == sorted(hex_uids(fresh.uids()))
        self.check_bytes(self.view)

    def look(self, *views: View) -> None:
        for view in views:
            view.refresh()
            view.refresh()  # that a file has vanished is believed at the second look

    def check_bytes(self, view: View) -> None:
        for uid, window in zip(hex_uids(view.uids()), windows_of(view), strict=True):
            assert_same(window, self.acknowledged[uid])

    @rule()
    def lose_the_index(self) -> None:
        live = catalog.query(self.lake, "select * from trajectories order by uid")
        (self.lake.path / "index.duckdb").unlink()
        assert catalog.query(self.lake, "select * from trajectories order by uid") == live
        uids = [row[live[0].index("uid")] for row in live[1]]
        assert uids == sorted(reading.Reader(self.lake).uids())

    @rule()
    def reopen_and_check(self) -> None:
        self.lake = Lake(self.lake.path)
        report = verify(self.lake)
        assert not report.corrupt

    @invariant()
    def nothing_sealed_is_lost_or_doubled_and_nothing_expired_comes_back(self) -> None:
        if hasattr(self, "lake"):
            uids = reading.Reader(self.lake).uids()
            assert len(uids) == len(set(uids))
            assert self.sealed <= set(uids) <= set(self.acknowledged) - self.expired


LakeMachine.TestCase.settings = settings(max_examples=trials(15, 3), stateful_step_count=25, deadline=None)
TestLakeMachine = pytest.mark.trials(LakeMachine.TestCase)


_FULL, _SLOW = range(1, 4), range(4, 40)
_SEEDS: list[Any] = [0, *(pytest.param(n, marks=pytest.mark.full) for n in _FULL)]
_SEEDS += [pytest.param(n, marks=pytest.mark.slow) for n in _SLOW]


@pytest.mark.system
@pytest.mark.parametrize("seed", _SEEDS)
def test_long_histories(seed: int) -> None:
    """The same rules at random: hypothesis favours short histories of few kinds of rules."""
    rng = random.Random(seed)
    machine = LakeMachine()

    def lengths() -> list[int]:
        return [rng.randint(1, 12) for _ in range(rng.randint(1, 4))]

    steps = {
        "append": lambda: machine.append(lengths(), rng.randint(0, 1), rng.random() < 0.7),
        "crash": lambda: machine.writers and machine.crash(),
        "crash_while_sealing": lambda: machine.writers and machine.crash_while_sealing(rng.choice(SEALING)),
        "derive": lambda: machine.derive(rng.randrange(1000), rng.choice([None, None, *DERIVING]), rng.randrange(3)),
        "derive_again": lambda: machine.derivable and machine.derive_again(rng.randrange(1000), rng.random() < 0.5),
        "expire_by_steps": lambda: machine.expire_by_steps(rng.randint(20, 120), rng.choice([0.0, 600.0])),
        "expire_whole_segments": lambda: machine.expire_whole_segments(rng.randint(20, 120)),
        "expire_one": lambda: machine.sealed and machine.expire_one(rng.randrange(1000)),
        "crash_while_expiring": lambda: machine.crash_while_expiring(
            rng.randint(20, 120), rng.choice(SWEEPING), rng.randrange(5)
        ),
        "compact": lambda: machine.compact(rng.choice([1 << 10, 6 << 10, 16 << 20]), rng.choice([0.0, 600.0])),
        "crash_while_compacting": lambda: machine.crash_while_compacting(rng.choice(REWRITING)),
        "sweep": machine.sweep,
        "read_everything": machine.read_everything,
        "snapshot": lambda: machine.snapshot(rng.random() < 0.3, lengths()),
        "follow": machine.follow,
        "lose_the_index": machine.lose_the_index,
        "reopen_and_check": machine.reopen_and_check,
    }
    try:
        machine.create([lengths() for _ in range(4)])
        for _ in range(40):
            steps[rng.choice(list(steps))]()
            machine.nothing_sealed_is_lost_or_doubled_and_nothing_expired_comes_back()
    finally:
        machine.teardown()
