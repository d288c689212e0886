"""An index that followed a lake through all that can happen to it equals one that is built from it."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipelines.lake import footer, reading
from pipelines.lake.arrow import arrow_schema, to_arrow
from pipelines.lake.folders import FolderChooser, is_rewritten, list_all, segment_key
from pipelines.lake.log import LogEntry, append, list_files
from pipelines.lake.maintenance.compaction import CompactionRules, compact, purge
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.segment import checksum, open_segment
from pipelines.lake.sql import catalog
from pipelines.lake.store import Lake
from tests.lake.factories import SCHEMA, derive, fill, quarantine, remove
from tests.tiers import some, trials

QUESTIONS = (
    "select * from trajectories order by uid",
    "select * from segments order by segment",
    "select uid, t, reward from steps order by uid, t",
)


def rewrite(lake: Lake, ids: list[str]) -> str:
    """One segment from what lives of several of steps, written out by hand."""
    columns, parts, tables, replaces, count, row0 = SCHEMA.columns, [], [], {}, 0, 0
    live = {bytes.fromhex(uid) for (uid,) in catalog.query(lake, "select uid from trajectories")[1]}
    for id in ids:
        found = footer.read_footer(lake.storage, id)
        file, whole = open_segment(lake.storage, id, columns), found.trajectories
        keep = np.array([uid in live for uid in whole["uid"].to_pylist()], dtype=bool)
        before = np.concatenate([[0], np.cumsum(keep)]).tolist()
        for old, (first, number) in {**found.header.get("replaces", {}), id: (0, len(keep))}.items():
            replaces[old] = [count + before[first], before[first + number] - before[first]]
        table, rows = whole.filter(pa.array(keep)), np.repeat(keep, whole["length"].to_numpy() + 1)
        lengths, place = table["length"].to_numpy() + 1, table.schema.get_field_index("row0")
        tables.append(table.set_column(place, "row0", pa.array(row0 + np.cumsum(lengths) - lengths)))
        parts.append({c.name: file.columns[c.name][rows] for c in columns})
        count, row0 = count + table.num_rows, row0 + int(rows.sum())
    values = {c.name: np.concatenate([part[c.name] for part in parts]) for c in columns}
    header = {
        **found.header,
        "writer": f"compact.{lake.id[:8]}.x",
        "sequence": 0,
        "rows": row0,
        "replaces": replaces,
        "columns": {name: checksum(array) for name, array in values.items()},
    }
    header.pop("trajectories_bytes")
    new = FolderChooser(lake.storage).name_segment(f"compact.{lake.id[:8]}.x", 0, overlay=False)
    batch = pa.record_batch([to_arrow(c, values[c.name]) for c in columns], schema=arrow_schema(columns))
    path = lake.path / segment_key(new)
    path.parent.mkdir(exist_ok=True)
    metadata = footer.encode(header, pa.concat_tables(tables))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema, metadata=metadata) as writer:
        writer.write_batch(batch)
    append(lake.storage, LogEntry(time=0.0, moved=dict.fromkeys(ids, new)))
    return new


class Life:
    """Things that happen to a lake, one after the other, as a generator of random numbers decides."""

    def __init__(self, lake: Lake, seed: int) -> None:
        self.lake, self.rng = lake, np.random.default_rng(seed)
        self.aside: set[str] = set()

    def originals(self) -> list[str]:
        return [id for (id,) in catalog.query(self.lake, "select segment from segments where kind = 'steps'")[1]]

    def some(self, ids: list[str], most: int = 3) -> list[str]:
        count = min(len(ids), int(self.rng.integers(1, most + 1)))
        return [ids[i] for i in sorted(self.rng.choice(len(ids), count, replace=False))] if ids else []

    def write(self) -> None:
        lengths = self.rng.integers(1, 5, int(self.rng.integers(2, 7))).tolist()
        fill(self.lake, lengths, seal_every=2, seed=int(self.rng.integers(1000)))

    def derive(self) -> None:
        _, rows = catalog.query(self.lake, "select uid, length from trajectories where base_uid is null order by uid")
        some = [rows[i] for i in self.rng.permutation(len(rows))[:2]]
        changes = {uid: {"reward": np.ones(length + 1, dtype=np.float32)} for uid, length in some}
        if changes:
            derive(self.lake, changes, copy=int(self.rng.integers(1 << 40)))

    def expire(self) -> None:
        _, rows = catalog.query(self.lake, "select segment, uid from trajectories order by uid")
        dead: dict[str, list[str]] = {}
        for segment, uid in [rows[i] for i in self.rng.permutation(len(rows))[:2]]:
            dead.setdefault(segment, []).append(uid)
        remove(self.lake, trajectories=dead)

    def expire_whole(self) -> None:
        for id in self.some(self.originals(), 1):
            remove(self.lake, segments=[id])

    def compact(self) -> None:
        self.old = self.some(self.originals())
        if self.old:
            rewrite(self.lake, self.old)

    def sweep(self) -> None:
        for id in getattr(self, "old", []):
            (self.lake.path / segment_key(id)).unlink(missing_ok=True)

    def set_aside(self) -> None:
        for id in self.some([id for id in self.originals() if not is_rewritten(id)], 1):
            quarantine(self.lake, id)
            self.aside.add(id)

    def set_back(self) -> None:
        while self.aside:
            quarantine(self.lake, self.aside.pop(), None)

    def publish_twice(self) -> None:
        """A copy of a segment under another name, before or after it."""
        for id in self.some([id for id in self.originals() if not is_rewritten(id)], 1):
            hour, _, stem = id.partition("/")
            copy = self.lake.path / "segments" / hour / f"{stem[:-1]}{self.rng.choice(['', 'z'])}.arrow"
            copy.write_bytes((self.lake.path / segment_key(id)).read_bytes())

    def expire_by_command(self) -> None:
        count = int(self.rng.integers(1, 6))
        grace = float(self.rng.choice([0.0, 600.0]))
        expire(self.lake, RetentionLimits(where=f"length % 5 = {count - 1} and base_uid is null"), grace_seconds=grace)

    def compact_by_command(self) -> None:
        compact(self.lake, CompactionRules(settle_seconds=0.0), grace_seconds=float(self.rng.choice([0.0, 600.0])))

    def purge(self) -> None:
        purge(self.lake)

    def lose_the_last_decision(self) -> None:
        """What it removed counts again, until it is found."""
        names = list_files(self.lake.storage)
        if names:
            path = self.lake.path / "log" / names[-1]
            path.rename(self.lake.path / "aside")
            catalog.refresh(self.lake)
            (self.lake.path / "aside").rename(path)


EVENTS = ["write", "write", "derive", "expire", "expire_whole", "compact", "sweep", "set_aside", "set_back"]


@pytest.mark.system
@pytest.mark.trials
@pytest.mark.parametrize("seed", some(range(4), 0))
@pytest.mark.parametrize("events", some([EVENTS, [*EVENTS, "publish_twice"]], 1), ids=["once", "twice"])
def test_the_index_equals_one_built_anew_after_anything(lake: Lake, tmp_path: Path, seed: int, events: list) -> None:
    life = Life(lake, seed)
    life.write()
    for _ in range(trials(12, quick=3)):
        event = str(life.rng.choice(events))
        getattr(life, event)()
        live = [catalog.query(lake, sql) for sql in QUESTIONS]
        catalog.rebuild(lake)
        assert [catalog.query(lake, sql) for sql in QUESTIONS] == live, event
        uids = [row[0] for row in live[0][1]]
        assert len(uids) == len(set(uids))
        if "publish_twice" not in events:
            assert sorted(reading.Reader(lake).uids()) == uids, event


def read_index(lake: Lake) -> list[list[tuple]]:
    """Every row of every table of the updated index, but for the listings of folders."""
    with catalog.open_index(lake) as connection:
        tables = ("bookkeeping.rows", "bookkeeping.files", "segments")
        return [connection.execute(f"from {table} order by all").fetchall() for table in tables]


@pytest.mark.system
@pytest.mark.trials
@pytest.mark.parametrize("seed", some(range(12), 1))
def test_an_index_updated_many_times_equals_one_built_anew_row_by_row(lake: Lake, seed: int) -> None:
    life = Life(lake, seed)
    life.write()
    events = ["write", "derive", "expire", "expire_by_command", "compact_by_command", "purge", "publish_twice"]
    for _ in range(trials(15, quick=8)):
        getattr(life, str(life.rng.choice([*events, "expire_by_command", "lose_the_last_decision"])))()
        updated = read_index(lake)
        catalog.SqlIndex(lake).path.rename(lake.path / "kept")
        assert read_index(lake) == updated
        (lake.path / "kept").rename(catalog.SqlIndex(lake).path)  # to be updated again


@pytest.mark.system
def test_expiry_is_marked_in_the_index_and_no_footer_is_read_again(lake: Lake, monkeypatch) -> None:
    """Also when it is undone: the last decision is lost, and found."""
    written = fill(lake, [3, 4, 5, 6], seal_every=2)
    catalog.refresh(lake)
    names = "select uid from trajectories order by length"
    monkeypatch.setattr(catalog, "read_footer", None)
    expire(lake, RetentionLimits(where="length in (3, 6)"))
    assert [uid for (uid,) in catalog.query(lake, names)[1]] == list(written)[1:3]
    assert catalog.query(lake, "select expired from segments")[1] == [(1,), (1,)]
    (entry,) = (lake.path / "log").iterdir()
    entry.rename(lake.path / "aside")
    assert [uid for (uid,) in catalog.query(lake, names)[1]] == list(written)
    assert catalog.query(lake, "select expired from segments")[1] == [(0,), (0,)]
    (lake.path / "aside").rename(entry)
    assert [uid for (uid,) in catalog.query(lake, names)[1]] == list(written)[1:3]


def test_an_overlay_does_not_count_in_the_index_once_its_base_has_expired(lake: Lake) -> None:
    base, other = fill(lake, [3, 4])
    derive(lake, {base: {"reward": np.ones(4, dtype=np.float32)}})
    assert len(catalog.query(lake, "select uid from trajectories")[1]) == 3
    (segment,) = [id for id in list_all(lake.storage) if not id.endswith(".ovl")]
    remove(lake, trajectories={segment: [base]})
    assert catalog.query(lake, "select uid from trajectories")[1] == [(other,)]


def test_a_quiet_folder_is_not_listed_again(lake: Lake, monkeypatch) -> None:
    fill(lake, [3, 4], seal_every=1)
    (hour,) = (lake.path / "segments").iterdir()
    os.utime(hour, (1, 1))
    catalog.refresh(lake)
    listed = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(str(path)) or real(path))
    catalog.refresh(lake)
    assert str(lake.path / "segments") in listed
    assert str(hour) not in listed


def test_an_unreadable_segment_is_told_each_time_and_read_again_only_when_its_folder_changes(
    lake: Lake, monkeypatch
) -> None:
    fill(lake, [3, 4], seal_every=1)
    path = lake.path / segment_key(list_all(lake.storage)[0])
    whole = path.read_bytes()
    path.write_bytes(whole[:200])
    os.utime(path.parent, (1, 1))
    read, told = [], []
    real = catalog.read_footer
    monkeypatch.setattr(catalog, "read_footer", lambda storage, id: read.append(id) or real(storage, id))
    for times in (1, 2, 3):
        catalog.refresh(lake, listener=told.append)
        assert len(told) == times
    assert len(read) == 2
    path.unlink()
    path.write_bytes(whole)
    os.utime(path.parent, (2, 2))
    assert catalog.query(lake, "select count(*) from trajectories", listener=told.append)[1] == [(2,)]
    assert len(told) == 3
