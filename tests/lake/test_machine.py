"""A lake through any order of appending, crashing, deriving, reading and losing its index, against a dictionary."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipelines.data.view import View
from pipelines.lake import catalog, reading
from pipelines.lake import segment as segments
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from pipelines.lake.verify import verify
from pipelines.lake.wal import Log
from tests.lake.factories import SCHEMA, assert_same, columns


class Killed(BaseException):
    pass


class LakeMachine(RuleBasedStateMachine):
    @initialize()
    def create(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.lake = Lake.create(self.folder / "lake")
        self.lake.register(SCHEMA)
        self.rng = np.random.default_rng(0)
        self.writers: list[Any] = []
        self.acknowledged: dict[str, dict[str, np.ndarray]] = {}
        self.sealed: set[str] = set()
        self.bases: set[str] = set()
        self.snapshots: list[tuple[dict[str, Any], np.ndarray]] = []
        self.view = View(self.lake, SCHEMA.id)

    def teardown(self) -> None:
        for writer in getattr(self, "writers", []):
            writer._abandon()
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    @rule(actions=st.integers(1, 12), which=st.integers(0, 1))
    def append(self, actions: int, which: int) -> None:
        while len(self.writers) <= which:
            self.writers.append(self.lake.writer(SCHEMA, seal_seconds=1e9))
        values = columns(self.rng, actions)
        self.acknowledged[self.writers[which].append(values, TrajectoryInfo(seed=actions))] = values

    @precondition(lambda self: self.writers)
    @rule()
    def seal(self) -> None:
        self.writers[0].seal()

    @precondition(lambda self: self.writers)
    @rule()
    def crash(self) -> None:
        self.writers.pop()._abandon()

    @precondition(lambda self: self.writers)
    @rule(step=st.sampled_from([(segments, "stage"), (Log, "mark"), (segments, "publish"), (Log, "drop")]))
    def crash_while_sealing(self, step: tuple[Any, str]) -> None:
        def die(*_: object, **__: object) -> None:
            raise Killed

        owner, name = step
        real = getattr(owner, name)
        setattr(owner, name, die)
        writer = self.writers.pop()
        try:
            writer.seal()
        except Killed:
            pass
        finally:
            setattr(owner, name, real)
            writer._abandon()

    @rule()
    def salvage_and_read_everything(self) -> None:
        for writer in self.writers:
            writer.seal()
        self.lake.salvage()
        reader = reading.Reader(self.lake)
        assert sorted(reader.uids()) == sorted(self.acknowledged)
        self.sealed = set(self.acknowledged)
        for uid in sorted(self.sealed)[-3:]:
            assert_same(dict(reader.read(uid).columns), self.acknowledged[uid])
        self.bases |= {uid for uid in self.sealed if not reader.locate(uid)[0].is_overlay}

    @precondition(lambda self: self.bases)
    @rule(pick=st.integers(0, 1000), crash=st.booleans())
    def derive(self, pick: int, crash: bool) -> None:
        base = sorted(self.bases)[pick % len(self.bases)]
        whole = self.acknowledged[base]
        rows = 2 + pick % (len(whole["reward"]) - 1)
        changed = {"reward": whole["reward"][:rows] - 1}
        writer = self.lake.overlay_writer(SCHEMA, ["reward"])
        uid = writer.append(base, changed, method="m")
        self.acknowledged[uid] = {name: array[:rows] for name, array in whole.items()} | changed
        writer._abandon() if crash else writer.close()

    @rule()
    def snapshot(self) -> None:
        self.view.refresh()
        self.snapshots.append((self.view.snapshot(), self.view.table.copy()))

    @precondition(lambda self: self.snapshots)
    @rule(pick=st.integers(0, 1000))
    def restore(self, pick: int) -> None:
        snapshot, table = self.snapshots[pick % len(self.snapshots)]
        view = View(Lake.open(self.lake.path), SCHEMA.id)
        view.restore(snapshot)
        np.testing.assert_array_equal(view.table, table)

    @rule()
    def lose_the_index(self) -> None:
        live = catalog.query(self.lake, "select * from trajectories order by uid")
        (self.lake.path / "index.duckdb").unlink()
        assert catalog.query(self.lake, "select * from trajectories order by uid") == live

    @rule()
    def reopen(self) -> None:
        self.lake = Lake.open(self.lake.path)

    @rule()
    def check(self) -> None:
        report = verify(self.lake)
        assert not report.corrupt
        assert not report.foreign

    @invariant()
    def nothing_sealed_is_lost_or_doubled(self) -> None:
        if hasattr(self, "lake"):
            uids = reading.Reader(self.lake).uids()
            assert len(uids) == len(set(uids))
            assert self.sealed <= set(uids) <= set(self.acknowledged)


LakeMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
TestLakeMachine = LakeMachine.TestCase
