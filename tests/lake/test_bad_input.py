"""A lake whose files were damaged, cut, replaced or refused: what is whole stays usable, and nothing is wrong unsaid.

What a trainer does before anybody ran `verify`: it checks the checksum of a segment's footer and the shape of its
columns, not the columns' checksums, for that would read everything. So a bit that flipped in a column is drawn as it
lies on the disk until `verify` sets the segment aside; one in a footer, in a log or in a table is never drawn.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.data.strategy import Strategy
from pipelines.data.view import View
from pipelines.errors import AmagoError, StageFailed
from pipelines.events import Notice
from pipelines.lake.live import LiveTable
from pipelines.lake.maintenance.verify import verify
from pipelines.lake.reading import Reader
from pipelines.lake.sql import catalog
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from tests.data.seeded import SeededSampler
from tests.lake.factories import derive, remove, segment_files
from tests.lake.stress import LONGEST, PICTURES, PLAIN, content, differs
from tests.tiers import some, trials

SEEN, LOGGED, EXPIRED, DERIVED = range(6), range(10, 15), 5, 2


@dataclass
class Whole:
    """A lake with something of everything. `uids`: by key; the overlays are under minus the key of their base."""

    path: Path
    uids: dict[int, str] = field(default_factory=dict)
    files: dict[str, set[str]] = field(default_factory=dict)
    """Names of segment files: the uids that are read from them."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    made = Whole(tmp_path_factory.mktemp("whole") / "lake")
    lake = Lake.create(made.path)
    for schema, keys in ((PLAIN, (0, 1, 2)), (PLAIN, (3, 5)), (PICTURES, (4,))):
        before = {path.name for path in segment_files(lake)}
        with lake.writer(schema) as writer:
            for key in keys:
                made.uids[key] = writer.append(content(key, schema), TrajectoryInfo(env="bad", seed=key))
        for path in segment_files(lake):
            if path.name not in before:
                made.files[path.name] = {made.uids[key] for key in keys}
    reward = content(DERIVED)["reward"] + 1
    (made.uids[-DERIVED],) = derive(lake, {made.uids[DERIVED]: {"reward": reward}})
    for path in segment_files(lake):
        made.files.setdefault(path.name, {made.uids[-DERIVED]})
        if made.uids[DERIVED] in made.files[path.name]:
            made.files[path.name].add(made.uids[-DERIVED])
    named = next(path for path in segment_files(lake) if made.uids[EXPIRED] in made.files[path.name])
    id = f"{named.parent.name}/{named.stem}"
    remove(lake, time=1.0, reason="old", trajectories={id: [made.uids.pop(EXPIRED)]})
    dead = lake.writer(PLAIN)
    for key in LOGGED:
        made.uids[key] = dead.append(content(key), TrajectoryInfo(env="bad", seed=key))
    dead._abandon()
    catalog.refresh(lake)
    return made


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if there is one: some tests make hundreds of lakes."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


@dataclass
class Use:
    """The readable content of a lake: keys by uid, what was read wrongly, and what was reported."""

    read: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    refused: list[AmagoError] = field(default_factory=list)


def use(path: Path, *, sql: bool = False) -> Use:
    """Read a lake in every way. Only errors that a user can read are tolerated."""
    found = Use()

    def tell(event: Any) -> None:
        if isinstance(event, Notice):
            found.told.append(event.text)

    def look(schema_id: str, columns: Any) -> str | None:
        schema = PLAIN if schema_id == PLAIN.id else PICTURES
        wrong = differs(schema, columns)
        overlay = content(int(columns["obs.key"][0]), schema)["reward"] + 1
        return None if wrong and wrong.endswith(": reward") and np.array_equal(columns["reward"], overlay) else wrong

    try:
        lake = Lake(path)
        lake.salvage(listener=tell)
        reader = Reader(lake, listener=tell)
        uids = reader.uids()
    except AmagoError as error:
        found.refused.append(error)
        return found
    for uid in uids:
        try:
            segment, columns = reader.locate(uid)[0], reader.read(uid).columns
        except AmagoError as error:
            found.refused.append(error)
            continue
        wrong = look(segment.schema_id, columns)
        found.wrong += [wrong] if wrong else []
        found.read[uid] = int(columns["obs.key"][0])
    for schema in (PLAIN, PICTURES):
        try:
            view = View(lake, schema.id, listener=tell)
            view.refresh()
            batch = SeededSampler(view, length=LONGEST, seed=0, strategy=Strategy(placement="full")).sample(16)
        except AmagoError as error:
            found.refused.append(error)
            continue
        for i, length in enumerate(batch.lengths.tolist()):
            wrong = look(schema.id, {name: values[i, :length] for name, values in batch.columns.items()})
            found.wrong += [wrong] if wrong else []
    if sql:
        (answer,) = catalog.query(lake, "select list(uid order by uid) from trajectories", listener=tell)[1]
        assert set(answer[0] or ()) >= set(found.read), "the index has less than the reader"
    return found


def flipped(path: Path, rng: np.random.Generator) -> None:
    data = bytearray(path.read_bytes())
    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)


def cut(path: Path, rng: np.random.Generator) -> None:
    os.truncate(path, int(rng.integers(path.stat().st_size)))


def damaged(whole: Whole, scratch: Path, file: Callable[[Path], Path], how: Callable[..., None], seed: int) -> Path:
    """A copy of the lake in which one file is damaged."""
    copy = scratch / "lake"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(whole.path, copy, symlinks=True)
    how(file(copy), np.random.default_rng(seed))
    return copy


@pytest.mark.system
@pytest.mark.trials
@pytest.mark.parametrize("how", [flipped, cut])
def test_a_damaged_segment_costs_only_what_is_in_it(whole: Whole, scratch: Path, how: Callable[..., None]) -> None:
    names, set_aside = sorted(whole.files), 0
    for trial in range(trials(200, quick=5)):
        name = names[trial % len(names)]
        path = damaged(whole, scratch, lambda lake, name=name: next(lake.glob(f"segments/*/{name}")), how, trial)
        before = use(path, sql=trial % 20 == 0)
        others = set(whole.uids.values()) - whole.files[name]
        assert others <= before.read.keys()
        assert len(set(before.read.values())) >= len(others) - 1
        corrupt = verify(Lake(path)).corrupt
        set_aside += len(corrupt)
        assert corrupt or not before.wrong  # what was drawn wrong is found
        after = use(path)
        assert not after.wrong
        assert others <= after.read.keys()
    assert set_aside > trials(200, quick=5) * 0.7


@pytest.mark.system
@pytest.mark.trials
@pytest.mark.parametrize("how", [flipped, cut])
def test_a_damaged_log_costs_one_trajectory_and_says_so(whole: Whole, scratch: Path, how: Callable[..., None]) -> None:
    sealed = {uid for key, uid in whole.uids.items() if key not in LOGGED}
    for trial in range(trials(200, quick=5)):
        path = damaged(whole, scratch, lambda lake: next(lake.glob("wal/*.wal")), how, trial)
        size = next(path.glob("wal/*.wal")).stat().st_size
        found = use(path)
        assert not found.wrong
        assert sealed <= found.read.keys()
        if how is cut:
            order = [whole.uids[key] for key in LOGGED]
            kept = [uid for uid in order if uid in found.read]
            assert kept == order[: len(kept)]
            continue
        lost = set(whole.uids.values()) - found.read.keys()
        whole_log = list(path.glob("wal/*.wal")) or list(path.glob("quarantine/*.wal"))
        if lost:  # the header names the schema: without it, or for a version to come, the log is kept for somebody
            assert len(lost) in (1, len(LOGGED))
            last = whole.uids[LOGGED[-1]]
            assert found.told or lost == {last}  # the end of the last one cannot be told from a torn one
            assert lost == {last} or whole_log[0].stat().st_size == size
        assert not verify(Lake(path)).corrupt


@pytest.mark.system
@pytest.mark.parametrize("how", [flipped, cut])
@pytest.mark.parametrize(
    "pattern",
    ["lake.json", "schemas/*.json", "log/*.json", "index.duckdb"],
    ids=["header", "schema", "log", "index"],
)
@pytest.mark.trials
def test_a_damaged_table_is_named_and_nothing_is_read_wrong(
    whole: Whole, scratch: Path, pattern: str, how: Callable[..., None]
) -> None:
    known = {key for key in whole.uids if key >= 0} | {EXPIRED}
    for trial in range(trials(50, quick=3)):
        path = damaged(whole, scratch, lambda lake: sorted(lake.glob(pattern))[-1], how, trial)
        found = use(path, sql=pattern == "index.duckdb")
        assert not found.wrong
        assert all(error.exit_code in (3, 4) for error in found.refused)
        assert set(found.read.values()) <= known
        if pattern == "index.duckdb":
            assert set(whole.uids.values()) == found.read.keys()
        elif pattern == "log/*.json":
            assert set(whole.uids.values()) <= found.read.keys()
        elif found.refused:
            assert any(name in str(found.refused[0]) for name in ("lake.json", "schema", "format", "features"))


def litter(folder: Path) -> None:
    """Things that nobody expects in a folder."""
    for name in ("README", "x.txt", ".hidden", "~$x.arrow", "a b.arrow.part", "9999.json.bak"):
        (folder / name).write_text("not ours")
    (folder / os.fsdecode(b"\xff\n")).write_bytes(b"")
    for name in ("sub", "sub.json", "sub.arrow", "sub.wal"):
        (folder / name).mkdir(exist_ok=True)
    for name in ("loop", "loop.arrow", "loop.wal", "loop.json"):
        (folder / name).symlink_to(name)
    (folder / "nowhere.arrow").symlink_to("nothing")
    os.mkfifo(folder / "pipe.arrow")


@pytest.mark.system
@pytest.mark.parametrize(
    "folder", [".", "wal", "tmp", "locks", "schemas", "segments", "segments/*", "log", "quarantine"]
)
def test_foreign_things_in_a_folder_harm_nobody(whole: Whole, tmp_path: Path, folder: str) -> None:
    copy = Path(shutil.copytree(whole.path, tmp_path / "lake"))
    (copy / "quarantine").mkdir(exist_ok=True)
    place = next(copy.glob(folder)) if folder != "." else copy
    litter(place)
    found = use(copy, sql=True)
    assert not found.wrong
    assert set(found.read) == set(whole.uids.values())
    lake = Lake(copy)
    with lake.writer(PLAIN) as writer:
        uid = writer.append(content(77), TrajectoryInfo())
    verify(lake)
    assert use(copy).read[uid] == 77
    assert (place / "README").read_text() == "not ours"


@pytest.mark.system
@pytest.mark.parametrize(("who", "hours"), some([*product(["writer", "reader"], [-1, 1, -30, 30])], 0, 7))
def test_a_clock_that_is_off_hides_nothing(lake: Lake, monkeypatch: pytest.MonkeyPatch, who: str, hours: float) -> None:
    view = View(lake, lake.register(PLAIN))
    nanoseconds, seconds = time.time_ns, time.time

    @contextlib.contextmanager
    def shifted(shift: bool) -> Iterator[None]:
        with monkeypatch.context() as patch:
            if shift:
                patch.setattr(time, "time_ns", lambda: nanoseconds() + int(hours * 3600e9))
                patch.setattr(time, "time", lambda: seconds() + hours * 3600)
            yield

    for key in range(6):
        with shifted(who == "writer" and key % 2 == 0), lake.writer(PLAIN) as writer:
            writer.append(content(key), TrajectoryInfo(seed=key))
        with shifted(who == "reader"):
            assert view.refresh() == 1
            catalog.refresh(lake)
    assert LiveTable(lake).refresh().added == 6
    assert catalog.query(lake, "select list(seed order by seed) from trajectories")[1] == [([*range(6)],)]
    assert not use(lake.path).wrong


def test_a_lake_on_a_full_disk_can_be_read_and_asked(whole: Whole, small_disk: Path) -> None:
    copy = Path(shutil.copytree(whole.path, small_disk / "lake", ignore=shutil.ignore_patterns("index.duckdb")))
    with contextlib.suppress(OSError), open(small_disk / "more", "wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    found = use(copy, sql=True)
    assert not found.wrong
    assert set(found.read) == {uid for key, uid in whole.uids.items() if key not in LOGGED}
    assert any("no space" in text for text in found.told)  # the log of the dead writer waits
    lake = Lake(copy)
    pictures = {name: np.concatenate([values] * 99) for name, values in content(0, PICTURES).items()}
    with pytest.raises(StageFailed, match="no space left"):
        lake.writer(PICTURES).append(pictures, TrajectoryInfo())
    (small_disk / "more").unlink()
    assert set(use(copy).read) >= set(whole.uids.values())


def test_a_folder_that_becomes_read_only_loses_nothing(lake: Lake) -> None:
    writer = lake.writer(PLAIN)
    uids = {writer.append(content(0), TrajectoryInfo())}
    writer.seal()
    (hour,) = (lake.path / "segments").iterdir()
    if subprocess.run(["chattr", "-R", "+i", str(lake.path / "segments")], capture_output=True).returncode:
        pytest.skip("this file system has no immutable folders")
    try:
        uids.add(writer.append(content(1), TrajectoryInfo()))
        with pytest.raises(StageFailed, match=r"cannot write a segment.*not permitted"):
            writer.seal()
        assert use(lake.path).read.keys() < uids
    finally:
        subprocess.run(["chattr", "-R", "-i", str(lake.path / "segments")], check=True)
    writer.close()
    assert use(lake.path).read.keys() == uids
    assert len(list(hour.iterdir())) == 2


def test_a_trainer_goes_on_while_its_files_go_bad(whole: Whole, tmp_path: Path) -> None:
    lake, told = Lake(shutil.copytree(whole.path, tmp_path / "lake")), []
    view = View(lake, PLAIN.id, listener=told.append)
    view.refresh()
    sampler = SeededSampler(view, length=LONGEST, seed=0, strategy=Strategy(placement="full"))
    for name, what in zip(sorted(whole.files), ("cut", "gone"), strict=False):
        (path,) = lake.path.glob(f"segments/*/{name}")
        path.rename(path.with_suffix(".was"))
        if what == "cut":
            path.write_bytes(path.with_suffix(".was").read_bytes()[:700])
        batch = sampler.sample(16)
        for i, length in enumerate(batch.lengths.tolist()):
            wrong = differs(PLAIN, {n: values[i, :length] for n, values in batch.columns.items()})
            assert wrong is None or wrong.endswith(": reward")
        view.refresh()
        if not view.table["weight"].any():
            break
