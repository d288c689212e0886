from __future__ import annotations

import os
import random
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from pipelines.lake import folders
from pipelines.lake.folders import FolderChooser, FolderWatcher, list_all
from pipelines.lake.live import LiveTable
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.maintenance.verify import verify
from pipelines.lake.reading import Reader
from pipelines.lake.sql import catalog
from pipelines.lake.storage import LocalStorage
from pipelines.lake.store import Lake
from pipelines.lake.writer import Writer
from tests.lake.factories import INFO, SCHEMA, columns, fill, segment_files

HOUR = "2026010203"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of four files, counted at every second publication."""
    monkeypatch.setattr(folders, "FULL", 4)
    monkeypatch.setattr(folders, "COUNTED_EVERY", 2)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "segments").mkdir()
    return tmp_path / "segments"


def put(root: Path, folder: str, *names: str) -> None:
    (root / folder).mkdir(exist_ok=True)
    for name in names:
        (root / folder / f"{name}.arrow").touch()


def opened(lake: Lake) -> list[str]:
    return sorted(path.name for path in (lake.path / "segments").iterdir())


@pytest.mark.usefixtures("small")
def test_an_hour_has_as_many_folders_as_its_files_need_and_ids_sort_in_time_order(lake: Lake) -> None:
    follower, written = LiveTable(lake), []
    with lake.writer(SCHEMA, seal_seconds=1e9) as writer:
        for turn in range(4):
            written += publish(writer, 5, seed=turn)
            follower.refresh()
    ids = list_all(lake.storage)
    sizes = {name: len(list((lake.path / "segments" / name).iterdir())) for name in opened(lake)}
    assert max(sizes.values()) <= 4 + 1  # the count may be one publication old
    assert len(sizes) >= 4
    assert len({name.partition("_")[0] for name in sizes}) <= 2
    assert ids == sorted(ids, key=lambda id: id.rpartition("/")[2])
    fresh = LiveTable(lake)
    fresh.refresh()
    assert [s.id for s in follower.segments] == [s.id for s in fresh.segments] == ids
    assert Reader(lake).uids() == written
    again = LiveTable(lake)
    assert again.restore(ids[::-1]).added == 20
    assert [s.id for s in again.segments] == ids[::-1]
    assert again.refresh().added == 0


def publish(writer: Writer, count: int, *, seed: int = 0) -> list[str]:
    """Segments of one trajectory each; their uids."""
    rng, uids = np.random.default_rng(seed), []
    for _ in range(count):
        uids.append(writer.append(columns(rng, 3), INFO))
        writer.seal()
    return uids


@pytest.mark.system
@pytest.mark.usefixtures("small")
def test_index_verify_and_compaction_know_every_folder(lake: Lake) -> None:
    with lake.writer(SCHEMA, seal_seconds=1e9) as writer:
        written = publish(writer, 11)
    assert len(opened(lake)) == 3
    assert catalog.query(lake, "select count(*), count(distinct segment) from trajectories")[1] == [(11, 11)]
    assert verify(lake).segments_checked == 11
    follower = LiveTable(lake)
    follower.refresh()
    done = compact(lake, grace_seconds=0.0)
    assert done.segments == (11, 1)
    assert list_all(lake.storage)[0].startswith(f"{opened(lake)[-1]}/")
    follower.refresh(), follower.refresh()
    assert len({segment.file for segment in follower.segments if len(segment.uids)}) == 1
    assert sorted(Reader(lake).uids()) == sorted(written)
    assert catalog.query(lake, "select count(*), count(distinct segment) from trajectories")[1] == [(11, 1)]


@pytest.mark.usefixtures("small")
def test_writers_that_open_the_next_folder_at_once_open_the_same(root: Path) -> None:
    storage = LocalStorage(root.parent)
    put(root, HOUR, *"abcd")
    barrier, chosen = threading.Barrier(8), []

    def choose() -> None:
        mine = FolderChooser(storage)
        barrier.wait()
        chosen.append(mine.choose(HOUR))

    threads = [threading.Thread(target=choose) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chosen == [f"{HOUR}_0001"] * 8
    assert not (root / f"{HOUR}_0001").exists()  # the publisher makes it


@pytest.mark.usefixtures("small")
def test_a_writer_moves_on_as_soon_as_another_has(root: Path) -> None:
    one = FolderChooser(LocalStorage(root.parent))
    assert one.choose(HOUR) == HOUR
    put(root, HOUR, *"abcd")
    assert one.choose(HOUR) == HOUR  # not counted yet
    put(root, f"{HOUR}_0001")
    assert one.choose(HOUR) == f"{HOUR}_0001"
    put(root, f"{HOUR}_0001", *"abcd")
    put(root, f"{HOUR}_0002", *"abcd")
    put(root, f"{HOUR}_0007", *"ab")
    assert one.choose(HOUR) == f"{HOUR}_0007"
    assert one.choose("2026010204") == "2026010204"
    assert one.choose(HOUR) == f"{HOUR}_0007"  # a clock that went back


@pytest.mark.usefixtures("small")
def test_a_gap_and_strange_names_mislead_nobody(root: Path) -> None:
    put(root, HOUR, *"abcd")
    put(root, f"{HOUR}_0003", *"abcd")
    for name in (f"{HOUR}_x", f"{HOUR}_00009", f"{HOUR}-0009", f"{HOUR}_0008.bak"):
        put(root, name, "a")
    (root / f"{HOUR}_0009").touch()
    assert FolderChooser(LocalStorage(root.parent)).choose(HOUR) == f"{HOUR}_0004"


def test_numbers_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "FULL", 1)
    put(root, f"{HOUR}_9999", "a")
    assert FolderChooser(LocalStorage(root.parent)).choose(HOUR) == f"{HOUR}_9999"


def test_where_nothing_shows_what_changed_an_hour_has_one_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "FULL", 1)
    monkeypatch.setattr(LocalStorage, "stamp", lambda *_: None)
    put(root, HOUR, "a")
    assert FolderChooser(LocalStorage(root.parent)).choose(HOUR) == HOUR


class Clock:
    """Stamps of folders that can be relied on: long ago, and another one after each change."""

    def __init__(self, root: Path) -> None:
        self.root, self.now = root, 1_000

    def settle(self, *names: str) -> None:
        for folder in (self.root, *(self.root / name for name in names)):
            if folder.is_dir():
                self.now += 1
                os.utime(folder, (self.now, self.now))


def seen(changes: FolderWatcher) -> tuple[list[str], list[str]]:
    found = list(changes)
    return sorted(id for new, _ in found for id in new), sorted(id for _, gone in found for id in gone)


def test_a_late_file_in_any_folder_is_found(root: Path) -> None:
    clock = Clock(root)
    names = [HOUR, *(f"{HOUR}_{number:04d}" for number in range(1, 60)), "2026010204"]
    for name in names:
        put(root, name, "a")
        clock.settle(name)
    changes = FolderWatcher(LocalStorage(root.parent))
    assert len(seen(changes)[0]) == 61
    for name in random.Random(0).sample(names, 12):
        put(root, name, "late")
        clock.settle(name)
        looks = 1 if name in names[-16:] else 3
        found = [seen(changes) for _ in range(looks)]
        assert [new for new, _ in found if new] == [[f"{name}/late"]]
        assert not any(gone for _, gone in found)


def test_what_is_quiet_is_not_listed_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(root)
    names = [HOUR, *(f"{HOUR}_{number:04d}" for number in range(1, 99))]
    for name in names:
        put(root, name, "a")
        clock.settle(name)
    changes, listed, looked = FolderWatcher(LocalStorage(root.parent)), [], []
    seen(changes)
    list_names, list_folders, stamp = LocalStorage.names, LocalStorage.folders, LocalStorage.stamp
    monkeypatch.setattr(LocalStorage, "names", lambda self, name: listed.append(name) or list_names(self, name))
    monkeypatch.setattr(LocalStorage, "folders", lambda self, name: listed.append(name) or list_folders(self, name))
    monkeypatch.setattr(LocalStorage, "stamp", lambda self, name: looked.append(name) or stamp(self, name))
    assert seen(changes) == ([], [])
    assert listed == []
    assert len(looked) == 1 + folders.WATCHED_FOLDERS + folders.TURN
    put(root, names[-1], "b")
    clock.settle(names[-1])
    assert seen(changes) == ([f"{names[-1]}/b"], [])
    assert listed == ["segments", f"segments/{names[-1]}"]


def test_from_a_folder_that_has_gone_everything_has(root: Path) -> None:
    clock, changes = Clock(root), FolderWatcher(LocalStorage(root.parent))
    put(root, HOUR, "a", "b", "b.blob")
    clock.settle(HOUR)
    assert seen(changes) == ([f"{HOUR}/a", f"{HOUR}/b"], [])
    shutil.rmtree(root / HOUR)
    clock.settle()
    assert seen(changes) == ([], [f"{HOUR}/a", f"{HOUR}/b"])
    put(root, HOUR, "b", "c")
    clock.settle(HOUR)
    assert seen(changes) == ([f"{HOUR}/b", f"{HOUR}/c"], [])


@pytest.mark.parametrize("seed", range(6))
def test_what_came_and_went_adds_up_to_what_is_there(root: Path, seed: int) -> None:
    rng, clock, changes, held = random.Random(seed), Clock(root), FolderWatcher(LocalStorage(root.parent)), set()
    names = [
        f"{hour}{number}" for hour in (HOUR, "2026010204") for number in ("", *(f"_{i:04d}" for i in range(1, 30)))
    ]
    for _ in range(60):
        for name in rng.sample(names, 5):
            if rng.random() < 0.2:
                shutil.rmtree(root / name, ignore_errors=True)
            else:
                put(root, name, *(str(rng.randrange(9)) for _ in range(3)))
                for path in rng.sample(sorted((root / name).iterdir()), rng.randint(0, 1)):
                    path.unlink()
            clock.settle(name)
        for _ in range(rng.randint(0, 2)):
            new, gone = seen(changes)
            assert not held & set(new)
            assert set(gone) <= held
            held = held - set(gone) | set(new)
    for _ in range(5):
        new, gone = seen(changes)
        held = held - set(gone) | set(new)
    assert sorted(held) == list_all(LocalStorage(root.parent))


@pytest.mark.system
@pytest.mark.usefixtures("small")
def test_a_writer_that_was_stopped_before_it_published_is_found_by_who_follows(lake: Lake) -> None:
    follower, clock = LiveTable(lake), Clock(lake.path / "segments")
    fill(lake, [3])
    (late,) = segment_files(lake)
    held = lake.path / "tmp" / "held"
    shutil.move(late, held)
    with lake.writer(SCHEMA, seal_seconds=1e9) as writer:
        publish(writer, 90)
    clock.settle(*opened(lake))
    assert follower.refresh().added == 90
    shutil.move(held, late)
    clock.settle(*opened(lake))
    assert sum(follower.refresh().added for _ in range(3)) == 1


def test_a_folder_that_is_swept_while_somebody_publishes_is_made_again(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_parent, swept = LocalStorage._make_parent, []

    def sweep_after(self: LocalStorage, path: Path) -> None:
        make_parent(self, path)
        if path.parent.parent.name == "segments" and not swept:
            swept.append(path.parent)
            path.parent.rmdir()

    monkeypatch.setattr(LocalStorage, "_make_parent", sweep_after)
    written = fill(lake, [3, 4])
    assert swept
    assert Reader(lake).uids() == list(written)


def test_hours_are_told_from_the_folders_names() -> None:
    names = ["2026010204", f"{HOUR}_0010", HOUR, "stray", f"{HOUR}_0009"]
    assert folders.by_hour(names) == {
        HOUR: [HOUR, f"{HOUR}_0009", f"{HOUR}_0010"],
        "2026010204": ["2026010204"],
        "stray": ["stray"],
    }
    ids = [f"{name}/x" for name in folders.by_hour(names)[HOUR]]
    assert sorted([*ids, "2026010204/x"]) == [*ids, "2026010204/x"]
